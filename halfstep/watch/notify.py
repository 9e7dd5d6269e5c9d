"""Alerts to people: over apprise, a plain webhook or a command, from a thread, so that no target holds up a step."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.events import Alert


class Notifier:
    """Sends alerts to ``targets``, as halfstep.watch.settings.Watch.notify describes them.

    HalfstepError for a target that cannot be read, or whose package or environment variable is missing; no message
    of ours ever holds a secret. run: the name of the run, for the title.
    """

    def __init__(self, targets: Sequence[str], run: str) -> None:
        raise NotImplementedError

    def put(self, alert: Alert) -> None:
        """Send it soon. Never blocks, never raises."""

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is left, for ``timeout_s`` at most."""
