"""What ``Accelerator.prepare`` makes of an optimizer: its ``step`` ends the window of a Stepper."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from halfstep.closure import needs_closure
from halfstep.errors import HalfstepError
from halfstep.events import StepReport
from halfstep.gradients import gradients_of

if TYPE_CHECKING:
    from halfstep.integrations.accelerate import Accelerator

_OWN_STEPPER = "Use halfstep.Stepper and stepper.step(closure) for this optimizer; see docs/loops.md."


class Optimizer(AcceleratedOptimizer):
    """A prepared optimizer.

    report: the StepReport of the last window, None before the first.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device_placement: bool, accelerator: Accelerator) -> None:
        if needs_closure(optimizer):
            raise HalfstepError(
                f"prepare() of {type(optimizer).__name__}",
                "it evaluates the loss itself, several times a step, and accelerator.backward knows nothing of that",
                _OWN_STEPPER,
            )
        super().__init__(optimizer, device_placement=device_placement)
        self.accelerator = accelerator
        self.report: StepReport | None = None
        self._is_plain = self._has_warned = False

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if self._is_plain:
            self.optimizer.step(closure)
            return
        if closure is not None:
            raise HalfstepError(
                "optimizer.step(closure) under Accelerate",
                "the loss would be evaluated without accelerator.backward",
                "Call accelerator.backward(loss), then optimizer.step().",
            )
        if self.gradient_state.sync_gradients:
            stepper = self.accelerator.stepper_of(self)
            self.report = stepper.end_window(count=self.accelerator.share)
            stepper.max_norm = None  # a window that nobody clips is not clipped

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if self._is_plain:
            super().zero_grad(set_to_none)
        elif self.gradient_state.sync_gradients:
            self._warn_of_lost_sums()
            self.accelerator.stepper_of(self).drop()

    def _warn_of_lost_sums(self) -> None:
        """Of a loop that clears gradients first, where accumulate() has let those of earlier micro-batches stay."""
        num_before = self.accelerator.num_in_window - 1
        if num_before > 0 and not self._has_warned and gradients_of(self.optimizer):
            self._has_warned = True
            warnings.warn(
                f"optimizer.zero_grad() before optimizer.step() dropped {num_before} of the "
                f"{num_before + 1} micro-batches of a window. Call it after optimizer.step().",
                stacklevel=3,
            )

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped. With a fused optimizer only the device knows, and this reads from it."""
        return self.report is not None and not self.report.applied

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by a GradScaler, before it takes a step of its own."""
        raise HalfstepError(
            "scaler.step(optimizer) of a prepared optimizer",
            "its gradients are scaled and unscaled by the policy's loss scale, and would be so twice",
            "Leave the GradScaler out: accelerator.backward(loss), then optimizer.step().",
        )

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Inside, it is a plain optimizer: torch takes a step without a gradient to make a state that it then loads."""
        self._is_plain = True
        try:
            yield
        finally:
            self._is_plain = False
