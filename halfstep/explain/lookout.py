"""A rehearsal that looks at every operation of every step, and stops at the first bad one, on all ranks at once.

What a rank finds in its own micro-batch it only notes. Whether there is something is asked of all ranks together: after
each micro-batch, before the weights move. So no rank leaves a step alone, and none waits for one that has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from halfstep.diagnosis.calibration import Calibration
from halfstep.diagnosis.capture import Capture
from halfstep.diagnosis.examination import Examination, examine
from halfstep.errors import ScaleExhausted
from halfstep.events import Overflow, StepReport
from halfstep.explain.history import History, Place
from halfstep.explain.rehearsal import Rehearsal
from halfstep.policy import Policy
from halfstep.ranks.one import Ranks
from halfstep.record.walk import Walk
from halfstep.source import Source
from halfstep.window import Loss
from halfstep.workload import tensors


class Met(NamedTuple):
    """A value that is not finite as a rank came across it: where, ``nan`` or ``inf``, and after how many operations.

    micro_batch: from 1. is_given: whether the batch holds such a value itself.
    """

    place: Place
    kind: str
    number: int
    micro_batch: int
    is_given: bool


class Found(Exception):
    """Raised inside a step, before the weights move, on every rank.

    capture: the micro-batch at fault; None where that is one of another rank. seen: its examination, if it had one.
    weight, kind: a parameter that an update made ``inf`` or ``nan``, on all ranks alike.
    reason:  why the step was not applied, where no value is at fault.
    met:     where no rank can run a micro-batch alone, this one's first value that is not finite.
    """

    def __init__(
        self,
        capture: Capture | None = None,
        seen: Examination | None = None,
        weight: tuple[str, str] | None = None,
        reason: str | None = None,
        met: Met | None = None,
    ) -> None:
        self.capture, self.seen, self.weight, self.reason, self.met = capture, seen, weight, reason, met


class Lookout:
    """Trains ``source`` from ``seed`` under ``policy``, one window at a time, until one is bad.

    again: a new rehearsal of the same run. step, num_micro_batches, scale: of the micro-batch that was run last.
    """

    def __init__(self, source: Source, policy: Policy, seed: int, device: str | None) -> None:
        self.policy = policy
        # It stops, rather than promote, so that the first fault is the one that is seen.
        self.again = partial(Rehearsal, source, replace(policy, on_exhausted="stop"), seed, device)
        self.rehearsal = self.again()
        stepper = self.rehearsal.stepper
        stepper.sinks = (*stepper.sinks, self._at_overflow)
        stepper.optimizer.register_step_pre_hook(self._before_update)
        self.history, self._calibration = History(), Calibration(policy.scale)
        self._harmless: set[Any] = set()
        self.step, self.num_micro_batches, self.scale = 1, 0, 1.0
        self._loss: torch.Tensor | None = None
        self._found: Found | None = None
        self._met: Met | None = None
        self._has_calibrated = False
        self._calibrated_before = self._calibrated

    @property
    def ranks(self) -> Ranks:
        return self.rehearsal.stepper.ranks

    @property
    def runs_alone(self) -> bool:
        """Whether this rank can run a micro-batch again without the others: not where its weights are shards."""
        return self.ranks.num == 1 or (self.ranks.is_alone(is_last=False) and not self.history.has_talked)

    def run_window(self) -> StepReport:
        """Train one window. Found if it is bad."""
        self.step, self.num_micro_batches, self._has_calibrated = self.rehearsal.step, 0, False
        self._calibrated_before, self._met = self._calibrated, None
        try:
            report = self.rehearsal.run_window(self._run_micro_batch)
        except ScaleExhausted:
            self._note(self.history.read(self.step))
            raise self._found or Found(self.capture(), met=self._met) from None
        if report.applied:
            self._calibration.applied()
            if weight := spoiled(self.ranks):
                raise Found(weight=weight)
        elif not self._decide(report):
            # Every value is finite, and a sum or the norm of the gradient is not.
            raise Found(self.capture(), reason=report.reason)
        return report

    def _run_micro_batch(self, closure: Callable[[], Loss]) -> StepReport | None:
        stepper = self.rehearsal.stepper
        watched, met_before = self.history.watched(closure), self._met

        def run() -> Loss:
            self.scale, self._met = stepper.scale.value.item(), met_before
            result = watched()
            self._loss = (result[0] if isinstance(result, tuple) else result).detach()
            return result

        self.num_micro_batches += 1
        with Walk(self.ranks.module, self.history):
            report = stepper.step(run)
        if report is None:
            self._decide()
        return report

    def capture(self) -> Capture:
        return self.rehearsal.capture(scale=self.scale, step=self.step)

    def _at_overflow(self, event: object) -> None:
        """A micro-batch is about to run again."""
        if isinstance(event, Overflow) and self._found is None:
            if self._calibration.takes():
                self._has_calibrated = True
            else:
                self._note(self.history.read(self.step))
                self._found = Found(self.capture(), met=self._met)

    def _before_update(self, *_: Any) -> None:
        self._decide()

    def _decide(self, report: StepReport | None = None) -> bool:
        """Look at the last micro-batch; Found on every rank if one has found something. All ranks call it together.

        Before an update, so that the weights are those that it ran with. report: of a window that was not applied.
        Returns whether the loss scale is finding its place on any of them.
        """
        self._look(report)
        has_found = float(self._found is not None)
        numbers = torch.tensor([has_found, float(self._has_calibrated)], device=self.rehearsal.stepper.region.device)
        has_found, has_calibrated = self.ranks.highest(numbers).tolist()
        if has_found:
            raise self._found or Found()
        return bool(has_calibrated)

    def _look(self, report: StepReport | None) -> None:
        """Examine the last micro-batch if something in it is not finite that has not been before."""
        bad = self.history.read(self.step)
        if self._found is not None:
            return
        if not self.runs_alone:
            self._note(bad)
            if report is not None:
                # An overflow makes inf before it makes NaN.
                is_overflow = self._may_calibrate(report) and (self._met is None or self._met.kind == "inf")
                self._has_calibrated = is_overflow and self._calibration.takes()
                if not self._has_calibrated:
                    self._found = Found(self.capture(), reason=report.reason, met=self._met)
            return
        new = bad.keys() - self._harmless
        if not new:
            return
        with self.history.paused():
            capture = self.capture()
            seen = examine(capture)
            if not seen.is_bad:
                self._harmless |= new
            elif self._is_mended_by_scale(capture, seen) and self._calibration.takes():
                self._has_calibrated = True
            else:
                self._found = Found(capture, seen)

    def _note(self, bad: Mapping[tuple[Place, str], int]) -> None:
        """Keep the first place where this rank's pass was not finite, but for -inf alone, which is what a mask is.

        While its loss is finite, that is one of the backward pass.
        """
        phase = "forward" if self._loss is None or not self._loss.isfinite().all() else "backward"
        for (place, kind), number in bad.items():
            if self._met is None and place[0].phase == phase and kind != "-inf":
                is_given = not all(tensor.isfinite().all() for tensor in tensors(self.rehearsal.batch))
                self._met = Met(place, kind, number, self.num_micro_batches, is_given)

    def _is_mended_by_scale(self, capture: Capture, seen: Examination) -> bool:
        scale = self.policy.scale
        is_overflow = math.isfinite(seen.outcome.loss) and not seen.outcome.is_finite
        return is_overflow and scale.kind == "dynamic" and capture.run(scale=scale.floor).is_finite

    def _may_calibrate(self, report: StepReport) -> bool:
        """Whether a lower scale may mend it, which nobody can try. Where there is replay, that has tried."""
        is_overflow = math.isfinite(report.loss) and report.scale > self.policy.scale.floor
        return is_overflow and self.policy.scale.kind == "dynamic" and self.policy.on_overflow == "skip"

    @property
    def _calibrated(self) -> tuple[int, float]:
        """Overflows so far that were calibration, and the scale that they led to."""
        return self._calibration.num_overflows, self.rehearsal.stepper.scale.value.item()

    def notes(self, is_before: bool = False) -> tuple[str, ...]:
        """What there was besides a fault, up to now or up to before this step. All ranks call it together."""
        own, scale = self._calibrated_before if is_before else self._calibrated
        num = int(self.ranks.highest(torch.tensor(float(own), device=self.rehearsal.stepper.region.device)))
        if not num:
            return ()
        were = "overflow was" if num == 1 else "overflows were"
        first = self.policy.scale.init
        return (f"{num} {were} the loss scale finding its place, from {first:g} to {scale:g}; that is no fault.",)


def spoiled(ranks: Ranks) -> tuple[str, str] | None:
    """The first parameter that is not finite on any rank, and whether that is ``nan`` or ``inf``; None if all are.

    All ranks call it together.
    """
    named = [(name, _local(p)) for name, p in ranks.module.named_parameters() if p.numel()]
    flags = [torch.stack([~value.isfinite().all(), value.isnan().any()]) for _, value in named]
    is_bad, is_nan = ranks.highest(torch.stack(flags).float()).T.tolist()
    for (name, _), bad, nan in zip(named, is_bad, is_nan, strict=True):
        if bad:
            return name, "nan" if nan else "inf"
    return None


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """The part of a parameter that this rank holds."""
    to_local: Callable[[], torch.Tensor] | None = getattr(parameter, "to_local", None)
    return parameter.detach() if to_local is None else to_local().detach()
