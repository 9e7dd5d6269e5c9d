"""What the steps between two logs of a Trainer did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from halfstep.events import StepReport


@dataclass(frozen=True)
class Interval:
    """Some steps, added up.

    num_steps, num_skipped, num_replays: of all of them. scale: the loss scale of the last one, 1.0 without scaling.
    finite_loss, num_finite: sum of the losses that are finite, and how many there are.
    """

    num_steps: int = 0
    num_skipped: int = 0
    num_replays: int = 0
    scale: float = 1.0
    finite_loss: float = 0.0
    num_finite: int = 0

    def plus(self, report: StepReport) -> Interval:
        """With one more step, whose numbers are read from the device."""
        is_finite = math.isfinite(report.loss)
        return Interval(
            self.num_steps + 1,
            self.num_skipped + (not report.applied),
            self.num_replays + report.num_replays,
            report.scale,
            self.finite_loss + (report.loss if is_finite else 0.0),
            self.num_finite + is_finite,
        )


class Intervals:
    """A sink for StepReports. Their numbers stay on the device until an interval ends."""

    _MOST_UNREAD = 256  # a report holds a tensor of its own, and a run may never log

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin anew, as a run does."""
        self._unread: list[StepReport] = []
        self._current = Interval()
        self._total = Interval()

    def __call__(self, event: object) -> None:
        if isinstance(event, StepReport):
            self._unread.append(event)
            if len(self._unread) >= self._MOST_UNREAD:
                self._read()

    def _read(self) -> None:
        self._current = _with(self._current, self._unread)
        self._total = _with(self._total, self._unread)
        self._unread = []

    def current(self) -> Interval:
        """Since the last interval ended."""
        self._read()
        return self._current

    def end(self) -> None:
        """End the interval: the next one begins with what comes."""
        self._read()
        self._current = replace(Interval(), scale=self._current.scale)

    def total(self) -> Interval:
        """Since the run began."""
        self._read()
        return self._total


def _with(interval: Interval, reports: Sequence[StepReport]) -> Interval:
    for report in reports:
        interval = interval.plus(report)
    return interval
