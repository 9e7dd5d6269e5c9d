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
    """Shows each step, and stops at the end of one in which Ctrl-C or SIGTERM came, with a checkpoint.

    begin:      called once, by the rank that writes, when nothing can be refused any more.
    stopped_at: the step that was the last because of Ctrl-C or SIGTERM, None where nothing stopped the run.
    """

    def __init__(
        self, show: Show, stepper: Callable[[], Stepper], interruption: Interruption, begin: Callable[[], None]
    ) -> None:
        self._show, self._stepper, self._interruption, self._begin = show, stepper, interruption, begin
        self._text = "training"
        self.stopped_at: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.should_save:
            self._begin()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        if "loss" in logs:
            self._text = f"loss {float(logs['loss']):.4g}, gradient norm {float(logs['grad_norm']):.3g}"
        elif "eval_loss" in logs:
            self._text += f", held out {float(logs['eval_loss']):.4g}"
        else:
            return
        self._show(self._text, state.global_step, state.max_steps)  # a log comes after the end of its step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._show(self._text, state.global_step, state.max_steps)
        if self._interruption.is_asked(self._stepper()) and state.global_step < state.max_steps:
            self.stopped_at = state.global_step
            control.should_training_stop = control.should_save = True
