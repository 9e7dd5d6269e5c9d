"""Explains the first bad step of a live run, once.

A micro-batch that is replayed can be captured while it runs. Any other is known to be bad only at its window's end, so
that until the first one is explained the closures of the window wait here, and keep their batches alive, each with the
random state that it began with.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch

from halfstep.diagnosis.calibration import Calibration
from halfstep.diagnosis.capture import Capture
from halfstep.policy import LossScale
from halfstep.report import Report
from halfstep.scale import NoScale
from halfstep.snapshot import RandomState
from halfstep.window import Loss, Verdict


class Explainer:
    """``trace`` of the first bad micro-batch of a run.

    explanation: its report, None until there is one. is_waiting: for the first bad step.
    """

    def __init__(self, settings: LossScale, device: torch.device) -> None:
        self.explanation: Report | None = None
        self.is_waiting = True
        self._device = device
        self._calibration = Calibration(settings)
        self._kept: list[tuple[Callable[[], Loss], RandomState]] = []

    def keep(self, closure: Callable[[], Loss]) -> None:
        """One more micro-batch of the window is about to run."""
        if self.is_waiting:
            state = RandomState(self._device)
            state.save()
            self._kept.append((closure, state))

    def clear(self) -> None:
        """The window is over."""
        self._kept.clear()

    def applied(self) -> None:
        """A window was applied."""
        self._calibration.applied()

    def explain_window(
        self, capture: Callable[[Callable[[], Loss], RandomState], Capture], verdict: Verdict, scale: NoScale
    ) -> Report | None:
        """Explain the micro-batch at fault of a window whose gradient was not finite.

        None where it was only how the loss scale finds its place, and where each micro-batch is finite by itself.
        """
        if not self.is_waiting:
            return None
        can_be_mended = math.isfinite(verdict.numbers[0]) and not scale.is_exhausted()
        if can_be_mended and self._calibration.takes():
            return None
        for closure, start in self._kept:
            candidate = capture(closure, start)
            if not candidate.run().is_finite:
                return self.explain(candidate)
        return None

    def explain(self, capture: Capture) -> Report | None:
        """The report of a bad micro-batch, the first time. A diagnosis that fails warns, and does not end the run."""
        if not self.is_waiting:
            return None
        from halfstep.diagnosis.trace import trace_of  # what it takes to print a report is loaded for one alone

        self.is_waiting = False
        try:
            self.explanation = trace_of(capture)
        except Exception as error:
            warnings.warn(f"step {capture.step} could not be explained: {type(error).__name__}: {error}", stacklevel=2)
        return self.explanation
