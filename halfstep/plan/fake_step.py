"""One training step on a device that is not here: what it holds, from the first operation to the last.

The very Stepper that trains runs it, on fake tensors: forward under the policy, loss, backward, clipping, optimizer.
The optimizer's states are made before, and a window counts once it leaves nothing new behind, as every window but the
first ones of a run does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from halfstep.closure import needs_closure
from halfstep.errors import HalfstepError
from halfstep.gradients import gradients_of, take_gradients
from halfstep.loop import make_stepper
from halfstep.plan.build import build, resized, tensors_of
from halfstep.plan.failure import naming_failures
from halfstep.plan.fake import FakeDevice
from halfstep.plan.ledger import Ledger, LedgerWalk, Unplaced
from halfstep.plan.step_trace import StepTrace
from halfstep.plan.subject import Subject
from halfstep.plan.target import Target
from halfstep.plan.technique import technique_of
from halfstep.policy import Policy
from halfstep.stepper import Stepper
from halfstep.window import Loss
from halfstep.workload import Workload, num_samples, stream

MAX_WINDOWS = 4
"""A model that still leaves something new behind after so many windows has no steady state to plan for."""

Make = Callable[[Subject, list[str]], Workload]
"""Makes a workload, and appends what it assumes to the list."""


@dataclass
class FakeRun:
    """A workload behind a Stepper on a fake device.

    batch_size: samples of a micro-batch, None until one is drawn; it may be changed between windows.
    num_parameters: of the model as it was built; 4-bit weights are packed, and would count half.
    assumed:    what was assumed to make a workload of a bare model, in sentences.
    tokens_per_sample: length of the batch's sequences of whole numbers, None where it has none.
    """

    device: FakeDevice
    workload: Workload
    stepper: Stepper
    batch_size: int | None
    num_parameters: int
    assumed: Sequence[str] = ()
    tokens_per_sample: int | None = None

    def __post_init__(self) -> None:
        self._batches = stream(self.workload)

    def window(
        self,
        watching: Callable[[], AbstractContextManager[object]],
        around: Callable[[Callable[[], Loss]], Loss] = lambda loss: loss(),
        held: Callable[[Any], None] = lambda batch: None,
    ) -> None:
        """Train one window. Each micro-batch's step runs under ``watching()``.

        Each loss is computed by ``around``, and each batch is shown to ``held`` before.
        """
        report = None
        while report is None:
            batch = next(self._batches)
            drawn = num_samples(batch)
            self.batch_size = self.batch_size or drawn
            batch = self.device.batch(resized(batch, drawn, self.batch_size))
            self.tokens_per_sample = _tokens_of(batch)
            held(batch)
            with self.device.running(), watching(), naming_failures(self.stepper.model):
                report = self.stepper.step(lambda batch=batch: around(lambda: self._loss(batch)))  # type: ignore[misc]
            del batch

    def make_states(self) -> None:
        """Let the optimizer make its states, by a step with gradients of zero; one that evaluates the loss waits."""
        optimizer = self.stepper.optimizer
        if needs_closure(optimizer):
            return
        with self.device.running(), torch.no_grad():
            for parameter in self.stepper.model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            self.stepper.masters.step(gradients_of(optimizer), 1.0)
            take_gradients(optimizer)

    def _loss(self, batch: Any) -> Loss:
        return self.workload.loss(self.stepper.model, batch)


def start(
    subject: Subject, policy: str | Policy, target: Target, techniques: Sequence[str] = (), make: Make = build
) -> FakeRun:
    """Build ``subject`` on ``target`` without memory, changed by ``techniques``, behind a Stepper with its states."""
    device = FakeDevice(target)
    policy = Policy.parse(policy)
    assumed: list[str] = []
    with device.building():
        workload = make(subject, assumed)
        num_parameters = sum(parameter.numel() for parameter in workload.model.parameters())
        for name in techniques:
            workload, policy = technique_of(name).apply(workload, policy)
    model = workload.model
    with device.running(), naming_failures(model):
        stepper = make_stepper(workload, policy, "cpu", target.hardware)
    if isinstance(stepper.optimizer, torch.optim.LBFGS):
        raise HalfstepError(
            f"{subject.spec} with LBFGS",
            "what it keeps of earlier steps depends on values, which a plan does not have",
            "Measure it on a device: halfstep measure.",
        )
    run = FakeRun(device, workload, stepper, subject.batch_size, num_parameters, assumed)
    with naming_failures(model):
        run.make_states()
    return run


def fake_step(
    subject: Subject,
    policy: str | Policy,
    target: Target,
    techniques: Sequence[str] = (),
    *,
    finds_growth: bool = False,
    make: Make = build,
) -> StepTrace:
    """The trace of one step of ``subject`` under ``policy`` on ``target``, with ``techniques`` by their names.

    finds_growth: run a window of twice the batch as well, so that the trace tells the peak of any batch.
    make:         builds the workload, where the text of ``subject`` does not say all of it.
    """
    run = start(subject, policy, target, techniques, make)
    stepper, ledger = run.stepper, Ledger()
    model, optimizer = stepper.model, stepper.optimizer
    ledger.hold(model.buffers(), "buffers")
    ledger.hold(model.parameters(), "weights")
    ledger.hold(stepper.masters.rests(), "master weights")
    # Whatever the model, the Stepper and the workload hold besides: a scale, copies of buffers, tables.
    named = [*model.buffers(), *model.parameters(), *stepper.masters.rests()]
    ledger.hold(run.device.others([*named, *_tensors(list(optimizer.state.values()))]), "buffers")
    got_gradient: set[torch.Tensor] = set()

    def keep(parameter: torch.Tensor) -> None:
        got_gradient.add(parameter)
        assert parameter.grad is not None
        ledger.hold([parameter.grad], "gradients")

    def forward(loss: Callable[[], Loss]) -> Loss:
        ledger.in_forward = True
        try:
            return loss()
        finally:
            ledger.in_forward = False

    def walk() -> LedgerWalk:
        walk = LedgerWalk(model, ledger)
        if run.device.cuda_ops is not None:
            run.device.cuda_ops.module_now = lambda: walk.module
        return walk

    def window(watching: Callable[[], AbstractContextManager[object]]) -> None:
        gc.collect()
        ledger.hold(_tensors(list(optimizer.state.values())), "optimizer states")
        ledger.restart()
        run.window(watching, forward, lambda batch: ledger.hold(tensors_of(batch), "inputs"))

    collects = gc.isenabled()
    gc.disable()  # else the moment at which a cycle of Python objects frees its tensors would depend on the machine

    def again(trace: StepTrace, times: int) -> StepTrace:
        """The step of ``times`` the batch, without places."""
        run.batch_size = times * trace.batch_size
        window(lambda: Unplaced(ledger))
        return replace(
            trace,
            storages=ledger.storages(),
            num_events=ledger.time,
            phases=tuple(ledger.phases),
            batch_size=run.batch_size,
            num_samples=times * trace.num_samples,
        )

    handles = [p.register_post_accumulate_grad_hook(keep) for p in model.parameters() if p.requires_grad]
    try:
        for _ in range(MAX_WINDOWS):
            window(walk)
            unused = [p for p in optimizer.state if p not in got_gradient]
            for parameter in unused:
                del optimizer.state[parameter]
            if not unused and ledger.is_steady():
                break
        else:
            raise HalfstepError(
                f"{subject.spec}",
                f"each of {MAX_WINDOWS} windows left something new in memory, as a list of losses with graphs does",
                "Keep numbers between steps (loss.detach()), or clear what the model collects.",
            )
        trace = StepTrace(
            storages=ledger.storages(),
            num_events=ledger.time,
            phases=tuple(ledger.phases),
            batch_size=run.batch_size or 0,
            num_samples=(run.batch_size or 0) * run.workload.accumulate,
            num_parameters=run.num_parameters,
            num_trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            policy=str(stepper.policy),
            techniques=tuple(techniques),
            attention=run.device.cuda_ops.attention if run.device.cuda_ops else None,
            tokens_per_sample=run.tokens_per_sample,
            notes=(*run.assumed, *run.device.notes()),
        )
        if finds_growth:
            double = again(trace, 2)
            trace = replace(trace, growth=trace.growth_to(double))
            if trace.growth is None and trace.batch_size == 1:
                trace = replace(trace, pair=replace(double, growth=double.growth_to(again(double, 2))))
    finally:
        for handle in handles:
            handle.remove()
        if collects:
            gc.enable()
    return trace


def _tokens_of(batch: Any) -> int | None:
    """The length of the first tensor of whole numbers that has two dimensions, samples and a sequence."""
    whole = (t for t in tensors_of(batch) if t.dim() == 2 and not t.is_floating_point() and t.dtype is not torch.bool)
    first = next(whole, None)
    return None if first is None else first.shape[1]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
