"""Train a workload up to the step that a tool wants to look at, and capture it there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from halfstep.diagnosis.capture import Capture, ForwardState
from halfstep.errors import HalfstepError, ScaleExhausted
from halfstep.events import StepReport
from halfstep.hardware import detect
from halfstep.loop import make_stepper
from halfstep.policy import Policy, auto_policy
from halfstep.share import share
from halfstep.source import Source
from halfstep.window import Loss
from halfstep.workload import stream, to_device


def default_policy(device: str | None = None) -> Policy:
    """What a tool looks at if nobody says: the policy that ``auto`` gives on a GPU, and fp16 without one."""
    hardware = detect(device)
    return auto_policy(hardware)[0] if hardware.kind == "cuda" else Policy("fp16")


class Rehearsal:
    """A run of ``source`` from ``seed`` under ``policy`` on ``device``, one micro-batch at a time.

    Weights are fp32 whatever layout the policy has, so that the same step can run in every format. Where a process
    group of several ranks is open, each of them runs its share, and all together. batch: the last one that was drawn.
    """

    def __init__(self, source: Source, policy: Policy, seed: int = 0, device: str | None = None) -> None:
        self.source, self.seed = source, seed
        device = device or detect(device).kind
        self.workload = share(source.under(str(policy))(seed), device)
        self.stepper = make_stepper(self.workload, replace(policy, master="fp32"), device)
        self._batches = stream(self.workload)
        self.batch: Any = None
        self._last: tuple[ForwardState, Callable[[], Loss]]
        self._scale = 1.0

    @property
    def step(self) -> int:
        """Number of the window that is running or comes next, from 1."""
        return self.stepper.num_steps + 1

    def next_micro_batch(self) -> Callable[[], Loss]:
        """Draw a micro-batch; its closure. It is the one that :meth:`capture` captures."""
        self.batch = to_device(next(self._batches), self.stepper.region.device)
        closure = partial(self.workload.loss, self.stepper.model, self.batch)
        self._last = (self._state(), closure)
        self._scale = self.stepper.scale.value.item()
        return closure

    def run_window(self, step: Callable[[Callable[[], Loss]], StepReport | None] | None = None) -> StepReport:
        """Train one window, each micro-batch through ``step``, the stepper's own if None.

        What it raises leaves the micro-batch at fault to :meth:`capture`.
        """
        report = None
        while report is None:
            report = (step or self.stepper.step)(self.next_micro_batch())
        return report

    def capture(self, step: int | None = None, scale: float | None = None) -> Capture:
        """The last micro-batch as it began, with the weights of now."""
        state, closure = self._last
        now = self._state()
        state.put()
        try:
            capture = self.stepper.capture(closure)
            capture.scale = self._scale if scale is None else scale
            capture.step = self.step if step is None else step
            return capture
        finally:
            now.put()

    def run_to(self, step: int) -> tuple[Capture, str]:
        """Train up to window number ``step``; its first micro-batch, and a sentence on how it came.

        A run that stops before gives the micro-batch at which it stopped.
        """
        if step < 1:
            raise HalfstepError(f"step {step}", "steps count from 1", "Use --step 1 or more.")
        while self.step < step:
            try:
                report = self.run_window()
            except ScaleExhausted:
                return self.capture(), f"step {self.step}, where the loss scale was exhausted"
            if not report.applied and not (report.scale > 1.0 and math.isfinite(report.loss)):
                return self.capture(step=report.step), f"step {report.step}, which was not finite"
        self.next_micro_batch()
        return self.capture(), f"step {step}"

    def _state(self) -> ForwardState:
        return ForwardState(self.stepper.model, self.stepper.region.device)


def capture_at(
    source: Source, policy: Policy, step: int, seed: int = 0, device: str | None = None
) -> tuple[Capture, str]:
    """The micro-batch that :meth:`Rehearsal.run_to` gives, and its sentence."""
    return Rehearsal(source, policy, seed, device).run_to(step)
