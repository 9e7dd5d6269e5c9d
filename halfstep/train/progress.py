"""What a run shows while it trains, and how Ctrl-C ends it after a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from halfstep.interruption import Interruption
from halfstep.stepper import Stepper

Show = Callable[[str, int, int | None], None]
"""Told what happens, in words, after how many steps, and of how many."""


class Progress(TrainerCallback):
    """Shows each step, and stops at the end of one in which Ctrl-C came, with a checkpoint.

    stopped_at: that step, None where nothing stopped the run.
    """

    def __init__(self, show: Show, stepper: Callable[[], Stepper], interruption: Interruption) -> None:
        self._show, self._stepper, self._interruption = show, stepper, interruption
        self._text = "training"
        self.stopped_at: int | None = None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self._text = f"loss {float(logs['loss']):.4g}, gradient norm {float(logs['grad_norm']):.3g}"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._show(self._text, state.global_step, state.max_steps)
        if self._interruption.is_asked(self._stepper()) and state.global_step < state.max_steps:
            self.stopped_at = state.global_step
            control.should_training_stop = control.should_save = True
