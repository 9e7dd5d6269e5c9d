"""``python -m halfstep`` is the ``halfstep`` command."""

from halfstep.cli import main

main()
