"""Train until the first non-finite value or overflow, and trace the step that it happens in.

What counts is in docs/trace.md: a loss or gradient that no lower scale mends, an overflow after the scale has found its
place, a 16-bit operation inside that overflows although the loss is finite, and an update that spoils a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from halfstep.diagnosis.advice import DOES_NOT, MENDS, NOT_TRIED, Advice, advise
from halfstep.diagnosis.calibration import Calibration
from halfstep.diagnosis.capture import Capture
from halfstep.diagnosis.examination import Examination, examine
from halfstep.diagnosis.trace import Trace, trace_of
from halfstep.errors import HalfstepError, ScaleExhausted
from halfstep.events import Overflow, StepReport
from halfstep.explain.history import History
from halfstep.explain.rehearsal import Rehearsal
from halfstep.formats import SIXTEEN_BIT
from halfstep.policy import Policy
from halfstep.record.producer import Producer
from halfstep.record.walk import Walk
from halfstep.source import Source
from halfstep.window import Loss


def trace(
    source: Source,
    policy: Policy,
    steps: int,
    seed: int = 0,
    device: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Trace:
    """Train ``source`` from ``seed`` under ``policy`` for at most ``steps`` steps, and trace the first bad one.

    progress: called with a text after each step.
    """
    if steps < 1:
        raise HalfstepError(f"steps={steps}", "there is nothing to look at", "Use 1 or more.")
    search = _Search(source, policy, seed, device)
    try:
        for _ in range(steps):
            report = search.run_window()
            if progress:
                progress(f"step {report.step}, loss {report.loss:.4g}")
    except _Found as found:
        return _with_fp32(search.explain(found), source, steps, seed, device)
    return Trace(steps, str(policy), is_bad=False, notes=search.notes())


class _Found(Exception):
    """Raised inside a step, before the weights move. Without a capture it is a fault of the update, in ``weight``."""

    def __init__(
        self,
        capture: Capture | None = None,
        seen: Examination | None = None,
        weight: str = "",
        reason: str | None = None,
    ) -> None:
        self.capture, self.seen, self.weight, self.reason = capture, seen, weight, reason


class _Search:
    """A rehearsal that looks at every operation of every step, and stops at the first step that is bad."""

    def __init__(self, source: Source, policy: Policy, seed: int, device: str | None) -> None:
        self.policy = policy
        # It stops, rather than promote, so that the first fault is the one that is seen.
        self._again = partial(Rehearsal, source, replace(policy, on_exhausted="stop"), seed, device)
        self.rehearsal = self._again()
        stepper = self.rehearsal.stepper
        stepper.sinks = (*stepper.sinks, self._at_overflow)
        stepper.optimizer.register_step_pre_hook(lambda *_: self._look())
        self._history, self._calibration = History(), Calibration(policy.scale)
        self._harmless: set[Any] = set()
        self._step, self._num_micro_batches, self._scale = 1, 0, 1.0
        self._has_calibrated = False
        self._calibrated_before = self._calibrated

    def run_window(self) -> StepReport:
        """Train one window. _Found if it is bad."""
        self._step, self._num_micro_batches, self._has_calibrated = self.rehearsal.step, 0, False
        self._calibrated_before = self._calibrated
        try:
            report = self.rehearsal.run_window(self._run_micro_batch)
        except ScaleExhausted:
            raise _Found(self._capture()) from None
        if report.applied:
            self._calibration.applied()
            if weight := _spoiled(self.rehearsal.stepper.model):
                raise _Found(weight=weight)
        else:
            self._look()
            if not self._has_calibrated:  # every value is finite, and a sum or the norm of the gradient is not
                raise _Found(self._capture(), reason=report.reason)
        return report

    def _run_micro_batch(self, closure: Callable[[], Loss]) -> StepReport | None:
        stepper = self.rehearsal.stepper
        watched = self._history.watched(closure)

        def run() -> Loss:
            self._scale = stepper.scale.value.item()
            return watched()

        self._num_micro_batches += 1
        with Walk(stepper.model, self._history):
            report = stepper.step(run)
        if report is None:
            self._look()
        return report

    def _capture(self) -> Capture:
        return self.rehearsal.capture(scale=self._scale, step=self._step)

    def _at_overflow(self, event: object) -> None:
        """A micro-batch is about to run again."""
        if isinstance(event, Overflow):
            if not self._calibration.takes():
                raise _Found(self._capture())
            self._has_calibrated = True

    def _look(self) -> None:
        """Examine the last micro-batch if something in it is not finite that has not been before. _Found if it is bad.

        Before an update, so that the weights are those that it ran with.
        """
        new = self._history.read(self._step) - self._harmless
        if not new:
            return
        with self._history.paused():
            capture = self._capture()
            seen = examine(capture)
            if not seen.is_bad:
                self._harmless |= new
            elif self._is_mended_by_scale(capture, seen) and self._calibration.takes():
                self._has_calibrated = True
            else:
                raise _Found(capture, seen)

    def _is_mended_by_scale(self, capture: Capture, seen: Examination) -> bool:
        scale = self.policy.scale
        is_overflow = math.isfinite(seen.outcome.loss) and not seen.outcome.is_finite
        return is_overflow and scale.kind == "dynamic" and capture.run(scale=scale.floor).is_finite

    def explain(self, found: _Found) -> Trace:
        notes = self.notes(*self._calibrated_before)
        if found.capture is None:
            return replace(self._update_trace(found.weight), notes=notes)
        result = trace_of(found.capture, self._history.of, found.seen)
        several = self.rehearsal.stepper.accumulate > 1
        return replace(
            result,
            policy=str(self.policy),
            is_bad=True,
            reason=found.reason,
            micro_batch=self._num_micro_batches - 1 if several else None,
            notes=notes,
        )

    def _update_trace(self, weight: str) -> Trace:
        stepper = self.rehearsal.stepper
        kind = "nan" if torch.isnan(stepper.model.get_parameter(weight)).any() else "inf"
        optimizer = type(stepper.optimizer).__name__
        producer = Producer(weight.rpartition(".")[0], "update", kind, optimizer, holds=weight)
        found = Trace(self._step, str(self.policy), is_bad=True, scale=self._scale, producer=producer)
        return replace(found, advice=_update_advice(found, self._capture(), self._again))

    @property
    def _calibrated(self) -> tuple[int, float]:
        """Overflows so far that were calibration, and the scale that they led to."""
        return self._calibration.num_overflows, self.rehearsal.stepper.scale.value.item()

    def notes(self, num: int | None = None, scale: float | None = None) -> tuple[str, ...]:
        """What there was besides a fault, up to now or up to then."""
        if num is None:
            num, scale = self._calibrated
        if not num:
            return ()
        were = "overflow was" if num == 1 else "overflows were"
        first = self.policy.scale.init
        return (f"{num} {were} the loss scale finding its place, from {first:g} to {scale:g}; that is no fault.",)


def _spoiled(model: nn.Module) -> str:
    """The first parameter that is not finite, ``""`` if all are."""
    named = [(name, p.detach()) for name, p in model.named_parameters() if p.numel()]
    finite = torch.stack([torch.isfinite(value).all() for _, value in named]).tolist()
    return next((name for (name, _), good in zip(named, finite, strict=True) if not good), "")


# --- what else is tried --------------------------------------------------------------------------------------------


def _with_fp32(found: Trace, source: Source, steps: int, seed: int, device: str | None) -> Trace:
    """The trace, told whether FP32 fails as well: within the steps asked for, and not much later."""
    if not Policy.parse(found.policy).formats & SIXTEEN_BIT:
        return found
    limit = min(steps, 2 * found.step + 10)
    rehearsal = Rehearsal(source, Policy("fp32"), seed, device)
    for step in range(1, limit + 1):
        if not rehearsal.run_window().applied or _spoiled(rehearsal.stepper.model):
            advice = found.advice
            if not any(a.text.startswith(_NOT_THE_PRECISION) for a in advice):
                text = f"{_NOT_THE_PRECISION}: fp32 fails as well at step {step}: lower the learning rate or look at "
                advice = (Advice(f"{text}the data", None, NOT_TRIED), *advice)
            return replace(found, fp32_step=step, advice=advice)
    return replace(found, notes=(*found.notes, f"In fp32 the same run is finite for {limit} steps."))


_NOT_THE_PRECISION = "Not the precision"


def _update_advice(found: Trace, capture: Capture, again: Callable[[], Rehearsal]) -> tuple[Advice, ...]:
    """A larger eps and a lower learning rate, each tried by running up to the step again and changing the optimizer."""

    def mends(setting: str, value: float) -> bool:
        rehearsal = again()
        for _ in range(found.step - 1):
            rehearsal.run_window()
        for group in rehearsal.stepper.optimizer.param_groups:
            group[setting] = value
        return rehearsal.run_window().applied and not _spoiled(rehearsal.stepper.model)

    groups = again().stepper.optimizer.param_groups
    advice: tuple[Advice, ...] = ()
    if "eps" in groups[0]:
        advice = advise(capture, found.producer, lambda eps: mends("eps", eps))
    lower = groups[0]["lr"] / 10
    text = f"lower the learning rate, to {lower:g} instead of {groups[0]['lr']:g}"
    return (*advice, Advice(text, None, MENDS if mends("lr", lower) else DOES_NOT))
