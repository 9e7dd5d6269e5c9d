"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from halfstep.errors import HalfstepError


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Put ``content`` into the file at ``path``; a reader, or a full disk, never leaves half of it there."""
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner may read
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise HalfstepError(
            f"output file {target}", f"it cannot be written ({error.strerror})", "Name a file in a folder that exists."
        ) from None
