"""Takes in the events of a run as they come, and says what they were in the end."""

from __future__ import annotations

from collections import deque

from halfstep.events import Alert, Promotion, StepReport
from halfstep.stepper import Event
from halfstep.train.train_report import Precision

_LAG = 32
"""Steps after which the numbers of a report have come from the device by themselves; reading one earlier would wait."""

_NUM_REASONS = 5


class Observer:
    """A sink of a Stepper. :meth:`precision` and :attr:`losses` read what is still on the device."""

    def __init__(self) -> None:
        self._waiting: deque[StepReport] = deque()
        self._losses: list[float] = []
        self._num_steps = self._num_applied = self._num_replays = self._num_alerts = 0
        self._skipped: dict[int, str] = {}
        self._scales: list[float] = []
        self._promoted: list[str] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepReport):
            self._waiting.append(event)
            if len(self._waiting) > _LAG:
                self._take(self._waiting.popleft())
        elif isinstance(event, Promotion):
            self._promoted.append(event.module)
        elif isinstance(event, Alert):
            self._num_alerts += 1

    def _take(self, report: StepReport) -> None:
        self._num_steps += 1
        self._num_replays += report.num_replays
        self._scales = [*self._scales[:1], report.scale]
        if report.applied:
            self._num_applied += 1
            self._losses.append(report.loss)
        elif len(self._skipped) < _NUM_REASONS:
            self._skipped[report.step] = str(report.reason)

    def _take_all(self) -> None:
        while self._waiting:
            self._take(self._waiting.popleft())

    @property
    def losses(self) -> list[float]:
        """True losses of the applied steps, in order."""
        self._take_all()
        return self._losses

    def precision(self) -> Precision:
        """What the steps were so far."""
        self._take_all()
        return Precision(
            self._num_steps,
            self._num_applied,
            self._num_replays,
            dict(self._skipped),
            self._scales[0] if self._scales else 1.0,
            self._scales[-1] if self._scales else 1.0,
            tuple(self._promoted),
            self._num_alerts,
        )


def ends_of(losses: list[float]) -> tuple[float | None, float | None]:
    """The mean of the first tenth and of the last tenth."""
    if not losses:
        return None, None
    num = max(1, len(losses) // 10)
    return sum(losses[:num]) / num, sum(losses[-num:]) / num
