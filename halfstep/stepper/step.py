"""The step: accumulate, unscale, clip, step, update, in that order and in one place.

    for each micro-batch        region: forward and loss        backward of loss x scale, into fp32 gradients
    at the window's end         verdict: is the global gradient norm finite
                                one factor = clip / (scale x count); the optimizer moves the weights
                                scale.update(verdict); a StepReport to the sinks

The true gradient of a window is the sum over its micro-batches divided by its true count, which is known only at its
end; the division costs nothing, since it goes into the one factor. With an optimizer that takes ``grad_scale`` and
``found_inf`` tensors (torch's fused ones) that factor goes into its kernel: no pass over the gradients but the one for
their norm, and nothing is read back to the host.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.closure import NonFiniteEvaluation, needs_closure, step_by_closure
from halfstep.diagnosis.capture import Capture, as_before
from halfstep.diagnosis.explainer import Explainer
from halfstep.dtypes import LOW_DTYPES
from halfstep.errors import HalfstepError
from halfstep.events import Alert, Overflow, Promotion, RunInfo, StepReport
from halfstep.gradients import (
    Gradients,
    clear_gradients,
    dropping_gradients,
    gradients_of,
    multiply,
    nonfinite,
    nonfinite_share,
    take_gradients,
)
from halfstep.hardware import Hardware, detect
from halfstep.kernels import untraced
from halfstep.master import Masters
from halfstep.optimizer import apply, check_optimizer, check_step, unscale
from halfstep.policy import LossScale, Policy
from halfstep.ranks.agreement import agree, together
from halfstep.ranks.contract import DEFAULT, Comparison, Contract
from halfstep.ranks.engine import check_ranks, ranks_of
from halfstep.region import Region, device_of
from halfstep.replay import Replay
from halfstep.report import Report
from halfstep.scale import CHECK_EVERY, NoScale, make_scale
from halfstep.snapshot import RandomState, RunningStatistics
from halfstep.stepper.checks import check_closure, check_settings
from halfstep.stepper.facts import compare, facts_of
from halfstep.stepper.mending import find_makers, mend, names_of, promote_or_stop
from halfstep.stepper.state import load_state, state_of
from halfstep.updates import UpdateMeter, UpdateReport
from halfstep.watch.settings import Watch
from halfstep.watcher import make_watcher
from halfstep.window import Loss, Verdict, Window, judge, over, read_loss, unit_of, why_skipped

Event = StepReport | Overflow | Promotion | Alert | Report
"""What the sinks are called with."""


class Stepper:
    """Mixed-precision training steps for one model and one optimizer.

    model:      its trainable parameters are fp32, and the policy's region casts them where it computes in 16 bit; a
                layout of master weights (docs/master-weights.md) makes them 16 bit here, in place.
    optimizer:  any torch optimizer over parameters of ``model``. The stepper calls ``step`` and clears gradients, those
                too that something else has left in them when a window begins.
    policy:     text or Policy; ``auto`` picks by the device and says why in ``stepper.info``.
    accumulate: number of micro-batches in a window, which is one optimizer step. None: the caller ends each window with
                :meth:`end_window`, as the loop of a framework does.
    max_norm:   clips the true gradient's global 2-norm to it.
    scheduler:  its ``step()`` is called after each applied step, and only then.
    on_applied: called with the StepReport after each applied step, and only then (an EMA belongs here).
    sinks:      called with every StepReport, with an Overflow each time a micro-batch is about to run again, with a
                Promotion for each module that goes on in fp32, with the explanation, and with the guard's alerts.
    keep_casts: keep the 16-bit copies of the weights over a whole window instead of casting them in each micro-batch;
                it costs 2 bytes at the peak for each parameter that meets a 16-bit operation, see docs/region.md.
    on_exhausted: ``stop`` or ``promote``, as the policy's setting, which it overrides; see docs/self-healing.md.
    explain:    trace the first bad step that replay cannot mend, once, into ``stepper.explanation``. Until then a run
                without replay reads its verdict once a window and keeps the closures of the window, and so their
                batches, alive; see docs/self-healing.md.
    passes_closure: the optimizer evaluates the loss itself, several times a step, so that it is handed a closure; see
                halfstep/closure.py. None finds out: LBFGS and sharpness-aware optimizers do.
    log:        folder that keeps what the run does, for ``halfstep watch``; appended to, also by a run that goes on.
    watch:      how the guard judges the run: a :class:`halfstep.Watch`, the name of its TOML file, or False for no
                guard and no log; see docs/watch.md.
    contract:   when several ranks compare what they hold, and what they may differ in; see docs/contract.md.
    beside:     a Stepper over the same model and another optimizer, where a loop does not say which of the two a loss
                is for. They share policy and loss scale, :meth:`forward` and :meth:`backward` of one are those of both,
                and each ends its own windows; both with accumulate=None.

    A scheduler, an ``on_applied`` hook, BatchNorm statistics and an optimizer without ``found_inf`` need the verdict on
    the host, one read a window; so does the first step of an SGD with momentum. Replay needs it once a micro-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        policy: str | Policy = "auto",
        *,
        accumulate: int | None = 1,
        max_norm: float | None = None,
        scheduler: Any = None,
        on_applied: Callable[[StepReport], None] | None = None,
        sinks: Sequence[Callable[[Event], None]] = (),
        keep_casts: bool = False,
        on_exhausted: str | None = None,
        explain: bool = False,
        passes_closure: bool | None = None,
        log: str | os.PathLike[str] | None = None,
        watch: Watch | str | os.PathLike[str] | bool = True,
        contract: Contract = DEFAULT,
        beside: Stepper | None = None,
        hardware: Hardware | None = None,
    ) -> None:
        self.ranks = ranks_of(model)
        module = self.ranks.module
        with together(self.ranks):
            check_settings(accumulate, max_norm, contract, beside)
            if on_exhausted is not None:
                policy = replace(Policy.parse(policy), on_exhausted=on_exhausted)
            requested = beside.policy if beside else Policy.parse(policy)
            hardware = hardware or detect(str(device_of(module)))
        agreed = agree(self.ranks, requested, hardware)
        with together(self.ranks):
            self.region: Region = beside.region if beside else Region(module, requested, hardware, agreed)
            check_optimizer(module, optimizer, self.policy.master)
            check_ranks(self.ranks, self.policy, explain)
            self._passes_closure = needs_closure(optimizer) if passes_closure is None else passes_closure
            if self._passes_closure:
                check_closure(optimizer, accumulate, self.policy)
            if scheduler is not None:
                check_step("scheduler", scheduler, "Call it yourself, after a report whose 'applied' is True.")
            self.model, self.optimizer = model, optimizer
            self.accumulate: int | None = accumulate
            self.max_norm = max_norm
            self.scheduler, self.on_applied, self.sinks = scheduler, on_applied, tuple(sinks)
            self.masters = Masters(module, optimizer, self.policy)
            self.scale: NoScale = beside.scale if beside else make_scale(self.policy.scale, self.region.device)
            self.num_steps = 0
            self._others: list[Stepper] = [beside, *beside._others] if beside else []
            for other in self._others:
                other._others.append(self)
            self._keeps_casts = keep_casts and accumulate != 1
            self._statistics = RunningStatistics(module)
            self._replay = Replay(module, optimizer, self.scale, self.ranks)
            self._can_replay = self.policy.on_overflow == "replay" and self.policy.scale.kind == "dynamic"
            self._unit: float | None = None
            self._explainer = Explainer(self.policy.scale, self.region.device) if explain else None
            self._promoted: list[str] = []
            self._had_hopeless = False  # whether the micro-batch before was one that no scale mends
        self._comparison = Comparison(self.ranks, contract, hardware.name, requested.compute == "auto")
        if self._comparison.is_due:
            self._comparison.check(facts_of(self))
        # Of several ranks one may have a hook that the others lack, or explain something earlier than they do; who
        # reads the verdict, reads it on all.
        gates = scheduler is not None or on_applied is not None or (explain and self.ranks.num > 1)
        self._gates = bool(self.ranks.highest(torch.tensor(float(gates), device=self.region.device)))
        self._window = Window()
        if beside and beside._window.num_micro_batches:
            # What it holds by now counts for this one too.
            self._window, self._unit = replace(beside._window), beside._unit
            self._statistics.load_state_dict(beside._statistics.state_dict())
        self._has_begun = self._is_said_last = False
        self._judged: tuple[Gradients, Verdict] | None = None
        self._last_closure: Callable[[], Loss] | None = None
        with together(self.ranks):  # what ranks ask each other in it comes first
            self._watcher = make_watcher(self.ranks, self.scale, self.policy, self.info, log, watch, self._tell)

    @property
    def policy(self) -> Policy:
        """The policy in effect, promotions included."""
        return self.region.policy

    @property
    def info(self) -> RunInfo:
        """The policy asked for, the one in effect, why they differ, and the device."""
        return self.region.info

    @property
    def explanation(self) -> Report | None:
        """With ``explain=True``: why the first bad step was bad, and what mends it. None while there was none."""
        return self._explainer.explanation if self._explainer else None

    # A micro-batch.

    @untraced
    def step(self, closure: Callable[[], Loss], *, is_last: bool = False) -> StepReport | None:
        """One micro-batch: ``closure`` runs the forward pass and returns the loss, or (sum, count).

        Returns None inside a window and the StepReport at its end. Under a policy that replays, ``closure`` runs again
        with the same random state when its gradient overflowed, so it has to use a batch that was drawn before the
        call.

        is_last: with accumulate=None, whether :meth:`end_window` comes next: ranks bring their gradients together now.
        """
        if self._others:
            raise HalfstepError(
                "step() of a Stepper beside another",
                "both windows hold what it differentiates",
                "Use stepper.forward(), backward() and end_window().",
            )
        with self.ranks.during(self.num_steps + 1):
            self._begin_micro_batch(is_last)
            loss, count = self._differentiate(closure)
            return self._end_micro_batch(loss, count, closure)

    def forward(self, *, is_last: bool = False) -> Region:
        """The region for a forward pass, where a loop cannot pass a closure; :meth:`backward` takes its loss.

        A micro-batch may have several: the first one begins it. is_last: as in :meth:`step`.
        """
        if self._passes_closure:
            raise HalfstepError(
                f"a loop without a closure and with {type(self.optimizer).__name__}",
                "this optimizer evaluates the loss several times a step",
                "Use stepper.step(closure).",
            )
        if self._explainer:
            raise HalfstepError(
                "a loop without a closure and with explain=True",
                "a bad step is explained by running it again",
                "Use stepper.step(closure), or leave explain out.",
            )
        for stepper in (self, *self._others):
            # One that began for a pass that nobody differentiated, as an evaluation, may have begun as another.
            if not stepper._has_begun or stepper._is_said_last != is_last:
                stepper._begin_micro_batch(is_last)
        return self.region

    @untraced
    def backward(
        self, loss: Loss, *, retain_graph: bool = False, again: Callable[[], Loss] | None = None
    ) -> StepReport | None:
        """The second half of a micro-batch that began with ``with stepper.forward():``.

        As :meth:`step`, without replay. retain_graph: whether another loss is to be differentiated through the graph.
        again: gives this loss once more, for the diagnosis of a scale that is exhausted; never called else.
        """
        if any(stepper._window.unscaled for stepper in (self, *self._others)):
            raise HalfstepError(
                "a loss after unscale() and before end_window()",
                "its gradient is a scaled one, and would be added to true ones",
                "End the window first, or unscale after its last loss.",
            )
        with self.ranks.during(self.num_steps + 1):
            loss, count = self._read_loss(loss)
            if self._can_replay:
                self._replay.come_together(self._window, self._is_last)
            self._accumulate(loss, retain_graph)
            for other in self._others:
                other._unit = self._unit
                other._end_micro_batch(loss, count, None)
            return self._end_micro_batch(loss, count, again)

    def gradient_norm(self, max_norm: float | None = None, *, count: float | None = None) -> torch.Tensor:
        """The true 2-norm of the window's gradient as it is now, before clipping, as a tensor that nobody has read.

        For a loop that ends its windows itself. max_norm: what :meth:`end_window` is then to clip to. count: as there.
        """
        if max_norm is not None and not max_norm > 0:
            raise HalfstepError(f"max_norm={max_norm}", "a norm is clipped to a positive number", "Use None.")
        self.max_norm = max_norm if max_norm is not None and max_norm < math.inf else None
        with torch.no_grad(), self.ranks.during(self.num_steps + 1):
            self._weigh(count)
            self._judged = None
            _, verdict = self._judge_window(self._window)
        return verdict.numbers[1]

    @torch.no_grad()
    def unscale(self, *, count: float | None = None) -> bool:
        """Make every ``.grad`` of the window its true gradient, for who looks at it or changes it before the end.

        That costs one read and one pass. Returns whether it is finite. One that is not stays as it is, and so does the
        verdict on it, whatever clipping makes of it: :meth:`end_window` skips. The report has the norm of now. count:
        as there.
        """
        with self.ranks.during(self.num_steps + 1):
            self._weigh(count)
            if self._window.unscaled is None:
                self.masters.sum_in_fp32()
                max_norm, self.max_norm = self.max_norm, None  # the clip is still the end's
                try:
                    gradients, verdict = self._judge_window(self._window)
                finally:
                    self.max_norm, self._judged = max_norm, None
                unscale(gradients.values(), verdict.divisor, verdict.found)
                self._window.unscaled = verdict
            return self._window.unscaled.found.item() == 0.0

    @untraced
    def end_window(self, *, count: float | None = None) -> StepReport:
        """End a window of a Stepper with accumulate=None: the optimizer steps, if the gradient is finite.

        The window's loss is the sum of its losses over the sum of their counts, or over ``count``, where the loop has
        divided by itself: 1 for a loop that was right, r / n for one that divided by n where the window holds only r.
        """
        if not self._window.num_micro_batches:
            raise HalfstepError(
                "end_window() of a window that holds nothing",
                "no loss was differentiated since the last step",
                "Call it after backward(), or use flush(), which may hold nothing.",
            )
        with self.ranks.during(self.num_steps + 1):
            self._weigh(count)
            if not self._others or self.scale.kind != "dynamic":
                report = self._end_window(self._last_closure)
            else:
                # Gradients that the others hold were scaled as those of this one.
                before = self.scale.value.item()
                report = self._end_window(None)
                if (factor := self.scale.value.item() / before) != 1.0:
                    held: Gradients = {}
                    for other in self._others:
                        other._judged = None
                        if other._window.unscaled is None:
                            held |= gradients_of(other.optimizer)  # a parameter may be that of several
                    multiply(held.values(), factor)
        for other in self._others:
            other._window.is_claimed = True
        return report

    def _weigh(self, count: float | None) -> None:
        if count is not None and count != self._window.count:
            self._window.count, self._window.total, self._judged = float(count), None, None

    def drop(self) -> None:
        """Forget what the window holds, as ``zero_grad()`` before its end means it. Nothing moves."""
        if self._window.num_micro_batches:
            self.region.release()
            self._clear_window()

    @untraced
    def flush(self) -> StepReport | None:
        """End a window that is shorter than ``accumulate``, weighted by what it holds. None if it holds nothing.

        Of several ranks all call it, at the same place; a rank that holds nothing takes part in what the others hold.
        """
        window = self._window
        held = torch.tensor(float(window.num_micro_batches), device=self.region.device)
        with self.ranks.during(self.num_steps + 1):
            if self._comparison.is_due:
                compare(self)
            if not window.num_micro_batches:
                if self._unit is None and self.ranks.num > 1:
                    self._fix_unit(0.0)  # others may have done so in the first micro-batch of the run
                if self.ranks.num == 1 or not self.ranks.highest(held).item():
                    return None
                self._begin_micro_batch(True)
                window.add(torch.zeros((), device=self.region.device), 0.0)
            elif self.ranks.num > 1:
                self.ranks.highest(held)
            return self._end_window(None)

    def inference(self) -> AbstractContextManager[None]:
        """The policy's formats for evaluation: no gradients, no loss scale; see :meth:`Region.inference`."""
        return self.region.inference()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The exact weight of each parameter in fp32, by name and one at a time; see :meth:`Masters.weights`."""
        return self.masters.weights()

    def capture(self, closure: Callable[[], Loss]) -> Capture:
        """A micro-batch as it would run now, for the tools of ``halfstep.explain``; see docs/explain.md.

        They run it in any format and at any scale, and nothing of this run changes.
        """
        scale, step, hardware = self.scale.value.item(), self.num_steps + 1, self.region.hardware
        module, closure = self.ranks.module, self.ranks.quietly(closure)
        return Capture(module, closure, self.policy, scale=scale, unit=self._unit, step=step, hardware=hardware)

    def update_meter(self, every: int = 100) -> UpdateMeter:
        """A meter of lost updates for the weights of this run, master weights included; see docs/lost-updates.md."""
        is_drawn = self.policy.master == "stochastic"
        exact = self.masters.values_at if self.masters else None
        return UpdateMeter(self.ranks.module, self.optimizer, every=every, exact=exact, stochastic=is_drawn)

    def record(self, report: UpdateReport | Report) -> None:
        """Keep a report of ``update_meter()`` or of ``halfstep.explain.ranges_of`` in the log; rules look at it too."""
        kind = {"UpdateReport": "updates", "RangesReport": "ranges"}.get(type(report).__name__)
        if kind is None:
            raise HalfstepError(
                f"record({type(report).__name__})", "no rule and no page reads it", "Record an UpdateReport or ranges."
            )
        if self._watcher:
            self._watcher.event(kind, {**report.to_dict(), "step": self.num_steps})

    def close(self, error: BaseException | None = None) -> None:
        """End the log: write what is left of it, and the ``error`` that ended the run.

        At the end of a process this happens by itself; an error that somebody has caught by then is not known there.
        """
        if self._watcher:
            self._watcher.close(error)

    def fp32_state_dict(self) -> dict[str, Any]:
        """``model.state_dict()`` with the exact weights, on the CPU; see :meth:`Masters.fp32_state_dict`."""
        return self.masters.fp32_state_dict()

    def _begin_micro_batch(self, is_last: bool) -> None:
        if self._is_said_last and self._window.num_micro_batches:
            self.masters.sum_in_fp32()  # the one before was not the last after all
        self._has_begun, self._is_said_last = True, is_last
        if self._comparison.is_due:
            compare(self)
        if self._window.num_micro_batches == 0:
            # Drop what a backward pass of somebody else left there, as a GAN's other half does.
            clear_gradients(self.optimizer)
            self.masters.settle(self.policy)
            if self._statistics:
                self._statistics.save()
        self.ranks.begin(self._is_last)
        if self._keeps_casts:
            self.region.hold()

    @property
    def _is_last(self) -> bool:
        """Whether the micro-batch that runs next, or now, is the last of its window."""
        if self.accumulate is None:
            return self._is_said_last
        return self._window.num_micro_batches + 1 >= self.accumulate

    def _read_loss(self, result: Loss) -> tuple[torch.Tensor, float | torch.Tensor]:
        """The loss to differentiate and its count; the unit of scaled sums is fixed by the first count."""
        loss, count = read_loss(result, self.scale.value)
        if self._unit is None:
            self._fix_unit(unit_of(count, self.scale.kind))
        return loss, count

    def _fix_unit(self, unit: float) -> None:
        """Fix the unit of scaled sums: one for all ranks, since what they hold is added up. 0 has no say in it."""
        if self.scale.kind != "none" and self.ranks.num > 1:
            unit = self.ranks.highest(torch.tensor(unit, device=self.region.device)).item()
        self._unit = unit or None

    def _differentiate(self, closure: Callable[[], Loss]) -> tuple[torch.Tensor, float | torch.Tensor]:
        """Loss and count of one micro-batch. Its gradient is added to the sums."""
        if self._can_replay:
            window = self._window
            loss, count, is_finite = self._replay.run(
                window,
                self._is_last,
                partial(self._run, closure),
                partial(mend, self, closure),
                self._report_overflow,
                is_current=lambda: self._window is window,
            )
            self._had_hopeless &= not is_finite
            return loss, count
        if self._explainer:
            self._explainer.keep(closure)
        with self.region:
            loss, count = self._read_loss(closure())
        self._accumulate(loss)
        return loss, count

    def _run(
        self, closure: Callable[[], Loss], kept: Iterable[torch.Tensor]
    ) -> tuple[torch.Tensor, float | torch.Tensor]:
        """One pass of a micro-batch, which keeps no gradient of the parameters ``kept``."""
        with self.region:
            loss, count = self._read_loss(closure())
        with dropping_gradients(kept):
            self._run_backward(loss)
        return loss, count

    def _run_backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Backward of loss x scale / unit: the factor is where the gradient starts, which costs no operation."""
        if loss.dtype in LOW_DTYPES:
            loss = loss.float()  # 2^16 is beyond fp16
        start = None  # torch's own 1: of any other it compares the shape
        if self.scale.kind != "none":
            start = over(self.scale.value, self._unit or 1.0).to(loss.dtype)
        with self.region.backward():
            loss.backward(start, retain_graph=retain_graph)

    def _accumulate(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Backward into the sums in ``.grad``. One that fails midway leaves them mixed, so the window begins anew."""
        try:
            self._run_backward(loss, retain_graph)
        except BaseException:
            self._drop_window()
            raise

    def _end_micro_batch(
        self, loss: torch.Tensor, count: float | torch.Tensor, closure: Callable[[], Loss] | None
    ) -> StepReport | None:
        self._has_begun = False
        if self._others:
            self._window.share(loss, count)
        else:
            self._window.add(loss, count)
        if self.accumulate is None:
            self._last_closure = closure
        elif self._window.num_micro_batches >= self.accumulate:
            return self._end_window(closure)
        if self.accumulate is not None or not self._is_said_last:  # else nothing is added, and 16-bit ones stay small
            self.masters.sum_in_fp32()
        return None

    def _capture(self, closure: Callable[[], Loss], start: RandomState | None = None) -> Capture:
        """A micro-batch of this window as it began: with ``start``, or as the last one that could be replayed."""
        start = start or (self._replay.start if self._can_replay else None)
        statistics = self._replay.statistics if self._can_replay else self._statistics
        with as_before(self.ranks.module, self.region.device, start, statistics):
            return self.capture(closure)

    def _report_overflow(self, bad: Sequence[torch.Tensor], factor: float) -> None:
        if self.sinks or self._watcher:
            scale = self.scale.value.item()
            names = tuple(names_of(self.ranks.module, bad))
            window = self._window
            share = window.nonfinite_share or 0.0
            at = scale / factor
            self._tell(Overflow(self.num_steps + 1, window.num_micro_batches, scale, names, share, at))

    def _tell(self, event: Event | None) -> None:
        if event is None:
            return
        if self._watcher and not isinstance(event, StepReport | Alert):
            kind = {Overflow: "overflow", Promotion: "promotion"}.get(type(event), "explanation")
            self._watcher.event(kind, event.to_dict())
        for sink in self.sinks:
            sink(event)

    # The window's end.

    @torch.no_grad()
    def _end_window(self, closure: Callable[[], Loss] | None) -> StepReport:
        window = self._window
        gradients, verdict = self._judged or self._judge_window(window)
        self._comparison.end_window(gradients)
        self.region.release()
        is_replayed = self._can_replay and closure is not None and not window.is_left
        needs_verdict = self._needs_verdict(is_replayed)
        # Step.
        applied: bool | None
        try:
            if self._passes_closure and closure is not None:
                applied, gradients, verdict = self._apply_by_closure(closure, window, gradients, verdict)
            else:
                applied = apply(self.masters, gradients, verdict.divisor, verdict.found, needs_verdict)
        except BaseException:
            self._drop_window()
            raise
        if applied is None and needs_verdict:
            applied = verdict.found.item() == 0.0
        may_stop = is_to_mend = False
        if applied is False:
            self._statistics.restore()
            window.nonfinite_share = nonfinite_share(gradients.values())
            if self._explainer and not self._can_replay and verdict.overflow:
                self._tell(self._explainer.explain_window(self._capture, verdict, self.scale))
            # In a replay an exhausted scale is noticed where it happens, in the micro-batch, but not by a rank alone.
            if not is_replayed and verdict.overflow:
                may_stop = self.scale.is_exhausted() or (window.is_exhausted and self._had_hopeless)
                is_to_mend = may_stop or window.is_left
                self._had_hopeless |= window.is_exhausted
        # Update.
        self.num_steps += 1
        self.scale.update(verdict.overflow)
        self._clear_window()
        why = partial(why_skipped, verdict.count)
        report = StepReport(self.num_steps, verdict.numbers.tolist, why, window.num_replays, window.nonfinite_share)
        if applied:
            if self._explainer:
                self._explainer.applied()
            if self.scheduler is not None:
                self.scheduler.step()
            if self.on_applied is not None:
                self.on_applied(report)
        if self._watcher:
            self._watcher.step(report, verdict, window.nonfinite_share)
        self._tell(report)
        if is_to_mend:
            with torch.enable_grad():
                makers = window.makers if window.is_left else find_makers(self, closure)
                bad = nonfinite(verdict.parameters, verdict.norms)
                promote_or_stop(self, closure, makers, bad, self.num_steps, may_stop)
        return report

    def _judge_window(self, window: Window) -> tuple[Gradients, Verdict]:
        """As :meth:`_judge`, over gradients that have come together; once a window, however often it is asked."""
        if self.ranks.is_pending:
            if self._can_replay:
                self._replay.agree(window)
                self._had_hopeless &= window.is_left
            self.ranks.bring_together([p for group in self.optimizer.param_groups for p in group["params"]])
        self._judged = self._judge(window)
        return self._judged

    def _judge(self, window: Window) -> tuple[Gradients, Verdict]:
        """The gradients of a window, sums of loss x scale / unit, and what is to be done with them."""
        gradients = gradients_of(self.optimizer)
        if not gradients or window.loss_sum is None:
            self._drop_window()
            raise HalfstepError(
                "a window without gradients",
                "no parameter of the optimizer got one",
                "Build the optimizer over the parameters that the loss depends on.",
            )
        if (before := window.unscaled) is None:
            return gradients, judge(window, gradients, self.scale, self._unit or 1.0, self.max_norm, self.ranks)
        now, no_scale = replace(window, count=1.0, total=None), NoScale(LossScale(), self.region.device)
        return gradients, before.after(judge(now, gradients, no_scale, 1.0, self.max_norm, self.ranks))

    def _apply_by_closure(
        self, closure: Callable[[], Loss], window: Window, gradients: Gradients, verdict: Verdict
    ) -> tuple[bool, Gradients, Verdict]:
        """Let the optimizer evaluate the loss itself; the window is the first evaluation.

        One that is not finite undoes the step, and it is what the report and the scale then go by.
        """
        if not unscale(gradients.values(), verdict.divisor, verdict.found):
            return False, gradients, verdict

        def evaluate() -> torch.Tensor:
            take_gradients(self.optimizer)
            window.num_micro_batches, window.loss_sum, window.count, window.total = 0, None, 0.0, None
            window.add(*self._differentiate(closure))
            with torch.no_grad():
                gradients, verdict = self._judge(window)
                if not unscale(gradients.values(), verdict.divisor, verdict.found):
                    raise NonFiniteEvaluation(verdict)
            return verdict.numbers[0]

        failure = step_by_closure(self.optimizer, verdict.numbers[0], evaluate)
        return failure is None, gradients_of(self.optimizer), verdict if failure is None else failure.verdict

    def _needs_verdict(self, is_replayed: bool) -> bool:
        looks_at_scale = self.scale.kind == "dynamic" and (self.num_steps + 1) % CHECK_EVERY == 0 and not is_replayed
        gates = self._gates or self.scheduler is not None or self.on_applied is not None
        gates |= self._explainer is not None and self._explainer.is_waiting and not self._can_replay
        return gates or looks_at_scale or bool(self._statistics) or self._window.nonfinite_share is not None

    def _clear_window(self) -> None:
        clear_gradients(self.optimizer)
        self._window = Window()
        self._judged = self._last_closure = None
        self._has_begun = False
        if self._explainer:
            self._explainer.clear()

    def _drop_window(self) -> None:
        """Go back to where the window began."""
        self._statistics.restore()
        self.region.release()
        self._clear_window()

    # State.

    def state_dict(self, *, numbers_only: bool = False) -> dict[str, Any]:
        """The state of the loop, in the middle of a window too: counters, scale, rests of master weights, gradients.

        The model, the optimizer and the scheduler keep their own. Loading it gives the same next step to the bit. Of
        several ranks each has a state of its own.

        numbers_only: without what is as large as the model, rests and gradients, for who keeps them in another way; see
                      :mod:`halfstep.distributed.checkpoint`.
        """
        return state_of(self, numbers_only)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, after the model has loaded its own.

        The layout of master weights may be another one. A loss scale of another kind, gradients of other parameters,
        and rests that do not belong to the model's weights are refused.
        """
        load_state(self, state)
