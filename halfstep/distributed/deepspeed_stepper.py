"""The step over a DeepSpeed engine: DeepSpeed shards, reduces, clips and moves the weights; the reports are ours.

for each micro-batch        region: forward and loss        engine.backward of loss x scale / unit
at the window's end         one collective adds up losses, counts and faults
                            engine.step() divides by scale x count / unit, judges, clips and steps
                            scale.update(verdict); a StepReport to the sinks
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from halfstep.diagnosis.exhaustion import exhausted
from halfstep.distributed.deepspeed_settings import policy_of
from halfstep.distributed.zero import ZeroOptimizer, ZeroRanks, check_engine
from halfstep.dtypes import LOW_DTYPES
from halfstep.errors import HalfstepError
from halfstep.events import Alert, RunInfo, StepReport
from halfstep.formats import FORMATS, SIXTEEN_BIT
from halfstep.hardware import Hardware
from halfstep.policy import Policy
from halfstep.ranks.contract import DEFAULT, Comparison, Contract
from halfstep.ranks.facts import (
    facts_of_machine,
    facts_of_model,
    facts_of_optimizer,
    facts_of_progress,
    facts_of_run,
    facts_of_weights,
)
from halfstep.region import Region
from halfstep.scale import make_scale
from halfstep.snapshot import RunningStatistics
from halfstep.watch.settings import Watch
from halfstep.watcher import make_watcher
from halfstep.window import Loss, Verdict, Window, read_loss, unit_of, why_skipped


class DeepSpeedStepper:
    """Training steps of a DeepSpeed engine, reported as those of :class:`halfstep.Stepper`.

    engine:     what ``deepspeed.initialize()`` returns first, ZeRO stage 1, 2 or 3. Its configuration says the policy,
                the number of micro-batches in a window and the norm that gradients are clipped to; see
                :func:`deepspeed_config`. Its own scheduler advances when a step was applied, and only then.
    on_applied: called with the StepReport after each applied step, and only then.
    sinks:      called with every StepReport, and with the guard's alerts.
    log, watch: as for a Stepper, on all ranks alike.
    contract:   when ranks compare what they have to agree on, and what they may differ in; see docs/contract.md.

    Call the engine in the closure, ``engine(x)``, and leave ``engine.backward`` and ``engine.step`` to the stepper.
    DeepSpeed reads its verdict on the host, once a window; that is where the report comes from.
    """

    def __init__(
        self,
        engine: Any,
        *,
        on_applied: Callable[[StepReport], None] | None = None,
        sinks: Sequence[Callable[[StepReport | Alert], None]] = (),
        log: str | os.PathLike[str] | None = None,
        watch: Watch | str | os.PathLike[str] | bool = True,
        contract: Contract = DEFAULT,
        hardware: Hardware | None = None,
    ) -> None:
        check_engine(engine)
        self._zero = ZeroOptimizer(engine)
        self.engine, self.on_applied, self.sinks = engine, on_applied, tuple(sinks)
        self.accumulate: int = engine.gradient_accumulation_steps()
        self.region = Region(engine.module, policy_of(engine.config), hardware)
        if self.policy.compute in SIXTEEN_BIT:
            # The engine's forward closes an autocast region around it, unless it has one of its own.
            engine._config.torch_autocast_enabled = True
            engine._config.torch_autocast_dtype = FORMATS[self.policy.compute].dtype
        self.ranks = ZeroRanks(engine)
        self._comparison = Comparison(self.ranks, contract, self.region.hardware.name, is_auto=False)
        self.scale = make_scale(self.policy.scale, engine.device)
        self.num_steps = 0
        self._unit: float | None = None
        self._window, self._at_scale = Window(), self.scale.value.item()
        self._statistics = RunningStatistics(engine.module)
        self._settle()
        self._watcher = make_watcher(self.ranks, self.scale, self.policy, self.info, log, watch, self._tell)

    @property
    def policy(self) -> Policy:
        """The policy in effect."""
        return self.region.policy

    @property
    def info(self) -> RunInfo:
        """The policy asked for, the one in effect, why they differ, and the device."""
        return self.region.info

    def step(self, closure: Callable[[], Loss]) -> StepReport | None:
        """One micro-batch: ``closure`` runs the engine's forward pass and returns the loss, or (sum, count).

        Returns None inside a window and the StepReport at its end.
        """
        with self.ranks.during(self.num_steps + 1):
            with self.forward():
                loss = closure()
            return self._differentiate(loss)

    def forward(self) -> Region:
        """The region for a forward pass, where a loop cannot pass a closure; :meth:`backward` takes its loss."""
        if self._window.num_micro_batches == 0:
            if self._comparison.is_due:
                self._compare()
            self._statistics.save()
        return self.region

    def backward(self, loss: Loss) -> StepReport | None:
        """The second half of a micro-batch that began with ``with stepper.forward():``."""
        with self.ranks.during(self.num_steps + 1):
            return self._differentiate(loss)

    def flush(self) -> None:
        """Refuse a window that is shorter than ``accumulate``; nothing where none was begun."""
        if self._window.num_micro_batches:
            raise HalfstepError(
                f"flush() after {self._window.num_micro_batches} of {self.accumulate} micro-batches",
                "DeepSpeed brings gradients together in the backward pass of a window's last micro-batch, and there "
                "was none",
                "Fill the window with micro-batches that weigh nothing: return (0 * loss, 0).",
            )

    def close(self) -> None:
        """End the log: write what is left of it. At the end of a process this happens by itself."""
        if self._watcher:
            self._watcher.close()

    def _differentiate(self, loss: Loss) -> StepReport | None:
        loss, count = read_loss(loss, self.scale.value)
        if self._unit is None:
            unit = torch.tensor(unit_of(count, self.scale.kind), device=self.ranks.device)
            self._unit = self.ranks.highest(unit).item()
        if loss.dtype in LOW_DTYPES:
            loss = loss.float()  # 2^16 is beyond fp16
        with self.region.backward():
            self._zero.backward(loss, self._at_scale / self._unit)
        self._window.add(loss, count)
        if self.engine.is_gradient_accumulation_boundary():
            return self._end_window()
        self.engine.step()
        return None

    def _end_window(self) -> StepReport:
        window, unit = self._window, self._unit or 1.0
        assert window.loss_sum is not None, "a window holds something"
        zero = self.scale.value.new_zeros(())
        total = self.ranks.total({}, zero[None][:0], zero, window.loss_sum, window.count)
        assert total.faults is not None, "a group counts its faults"
        sums = [total.loss_sum[None], torch.as_tensor(total.count)[None], total.faults]
        loss_sum, count, *faults = torch.cat(sums).tolist()
        divisor = self._at_scale * count / unit
        applied, norm = self._zero.step(divisor, skips=count == 0)
        if not applied:
            self._statistics.restore()
        found = 0.0 if applied else 1.0
        loss = loss_sum / count if count else float("nan")
        # A count of 0 says nothing about the scale.
        overflow = found if count else 0.0
        is_exhausted = bool(overflow) and self.scale.is_exhausted()
        self.num_steps += 1
        self._comparison.end_window({})
        self._window = Window()
        numbers = torch.tensor([loss, norm, self._at_scale, found, *faults])
        self.scale.update(self.scale.value.new_tensor(overflow))
        self._settle()
        report = StepReport(self.num_steps, numbers.tolist, partial(why_skipped, count))
        if applied and self.on_applied is not None:
            self.on_applied(report)
        if self._watcher:
            scalar, no_norms = numbers.new_tensor(found), numbers[:0]
            verdict = Verdict(divisor, scalar, scalar.new_tensor(overflow), numbers, count, no_norms, (), unit)
            self._watcher.step(report, verdict, None)
            self._settle()  # the guard may have lowered it
        self._tell(report)
        if is_exhausted:
            error = exhausted(self.policy, self.num_steps, ["the model"], None)
            if self._watcher:
                self._watcher.alert("scale-exhausted", self.num_steps, error)
            raise error
        return report

    def _compare(self) -> None:
        """Compare with the other ranks, before a window begins; a difference ends the run on each of them."""
        every, allow = self._comparison.contract.every, self._comparison.contract.allow
        clipping = self.engine.gradient_clipping()
        settings = {"accumulate": self.accumulate, "max_norm": clipping, "contract": (every, *allow)}
        self._comparison.check(
            [
                *facts_of_run(self.policy, self.info.requested, **settings),
                *facts_of_machine(self.region.hardware),
                *facts_of_model(self.ranks),
                *facts_of_optimizer(self.engine.basic_optimizer, {}),
                *facts_of_progress(self.num_steps, 0, self._unit, self.scale, {}),
                *facts_of_weights(self.ranks, {}),
            ]
        )
        self._comparison.is_due = False

    def _settle(self) -> None:
        """The scale of the next window, which DeepSpeed's logs and checkpoints show too."""
        if self.scale.kind == "dynamic":
            self._at_scale = self.scale.value.item()
        self._zero.show_scale(self._at_scale)

    def _tell(self, event: StepReport | Alert) -> None:
        for sink in self.sinks:
            sink(event)

    def state_dict(self) -> dict[str, Any]:
        """Counters and loss scale, at a window's end: what ``engine.save_checkpoint(client_state=...)`` lacks."""
        if self._window.num_micro_batches:
            raise HalfstepError(
                f"the state after {self._window.num_micro_batches} of {self.accumulate} micro-batches",
                "DeepSpeed's checkpoint holds no gradients of a window",
                "Save after a StepReport.",
            )
        return {
            "policy": str(self.policy),
            "num_steps": self.num_steps,
            "unit": self._unit,
            "scale": self.scale.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, after ``engine.load_checkpoint``."""
        missing = {"num_steps", "unit", "scale"} - state.keys()
        if missing:
            raise HalfstepError(
                "a state without the keys of DeepSpeedStepper.state_dict()",
                f"it lacks {', '.join(sorted(missing))}",
                "Pass what was given to engine.save_checkpoint as client_state.",
            )
        self.scale.load_state_dict(state["scale"])
        self.num_steps, self._unit = state["num_steps"], state["unit"]
        self._window = Window()
        self._settle()
        if self._watcher:
            self._watcher.resume(self.num_steps)
