"""``halfstep plan``: what a training step needs on a device that is not here, policy by policy.

Nothing here imports torch: the steps run in workers, and what is made of their traces is arithmetic.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.plan.advice import advise
from halfstep.plan.allocator import Simulation, simulate
from halfstep.plan.batch import largest_batch, saves_from
from halfstep.plan.calibrate import Calibration
from halfstep.plan.classic_case import classic_case
from halfstep.plan.outside import not_counted, outside_of, workspaces_of
from halfstep.plan.plan_report import PlanReport
from halfstep.plan.policy_plan import PolicyPlan
from halfstep.plan.roofline import Ceilings, Operations, bound_of, ceilings_of
from halfstep.plan.sharding import DIVIDED, ShardedPeak, check_ranks, sharded
from halfstep.plan.size import GIB, size_text
from halfstep.plan.stacks import Stack, answer, larger_batch, stacks_of
from halfstep.plan.step_trace import StepTrace
from halfstep.plan.subject import Subject
from halfstep.plan.target import Target, target_of
from halfstep.plan.viewer import write_snapshot
from halfstep.plan.worker import Call, Workers
from halfstep.policy import Policy

Progress = Callable[[str], None]
"""Told what runs next."""


def plan(
    spec: str,
    policies: Sequence[str] = ("fp32", "bf16", "fp16"),
    *,
    card: str | None = None,
    memory_gib: float | None = None,
    batch_size: int | None = None,
    inputs: str | None = None,
    num_ranks: int | None = None,
    calibrates: bool = False,
    snapshot: str | None = None,
    progress: Progress = lambda text: None,
) -> PlanReport:
    """Plan one training step of the workload or model ``spec`` in each of ``policies``.

    card:       a name of the catalogue or ``cpu``; None is a CUDA card of capability 8.0.
    memory_gib: memory in GiB in place of the card's own. Where memory is known, combinations that fit are searched.
    batch_size: samples of a micro-batch, None for the workload's own. inputs: as for Subject.
    num_ranks:  how many ranks divide the step between them, each with the whole micro-batch; None for one.
    calibrates: measure the rates of the device that is here, and use them for the speed.
    snapshot:   file for PyTorch's memory viewer, of the last policy that runs.
    """
    target, subject = target_of(card, memory_gib), Subject(spec, batch_size, inputs)
    if not policies:
        raise HalfstepError("a plan without a policy", "there is nothing to plan", "Use --policies fp32,bf16,fp16.")
    for policy in policies:
        Policy.parse(policy)
    if num_ranks is not None:
        check_ranks(num_ranks)
    if importlib.util.find_spec("torch") is None:
        raise HalfstepError(
            "halfstep without torch", "a plan runs a step, and torch is not installed", "pip install 'halfstep[torch]'"
        )
    with Workers() as workers:
        calibration = None
        if calibrates:
            progress("measuring a matrix product and a copy")
            (calibration,) = workers.run([Call("halfstep.plan.calibrate:calibrate", (), about="--calibrate")])
            if isinstance(calibration, HalfstepError):
                raise calibration
        planner = Planner(target, calibration)
        progress(f"{spec} in {', '.join(policies)}")
        plans = planner.plans_of(workers, subject, policies)
        stacks: Sequence[Stack] = ()
        if planner.capacity is not None and target.is_cuda:
            progress(f"{spec} with what saves memory")
            stacks = stacks_of(workers, subject, target, plans, planner.need_of, planner.capacity)
    if snapshot is not None:
        trace = next(plan.trace for plan in reversed(plans) if plan.trace is not None)
        write_snapshot(trace, planner.simulated(trace), snapshot)
    return PlanReport(
        workload=spec,
        target=target,
        torch=importlib.metadata.version("torch"),
        plans=tuple(plans),
        stacks=tuple(stacks),
        sharded=() if num_ranks is None else _sharded(plans, num_ranks),
        advice=(*classic_case(plans, stacks), *advise(plans, _tokens(plans)), *_answers(stacks, spec)),
        assumptions=planner.assumptions(plans),
    )


class Planner:
    """What follows from a trace on one target."""

    def __init__(self, target: Target, calibration: Calibration | None) -> None:
        self.target = target
        self.outside = outside_of(target, _context(calibration))
        self.capacity = None if target.memory_gib is None else round(target.memory_gib * GIB)
        self.ceilings: Ceilings | None = None
        self.why_no_bound = ""
        try:
            self.ceilings = calibration.ceilings(target) if calibration else ceilings_of(target)
        except HalfstepError as error:
            self.why_no_bound = str(error)

    def plans_of(self, workers: Workers, subject: Subject, policies: Sequence[str]) -> list[PolicyPlan]:
        """A plan for each policy; one that the target refuses says why. If none runs, the first reason is raised."""
        traces = workers.run([self._call("fake_step:fake_step", subject, p, finds_growth=True) for p in policies])
        if all(isinstance(trace, HalfstepError) for trace in traces):
            raise traces[0]
        counts: list[Any] = [None] * len(policies)
        if self.ceilings:
            counts = workers.run([self._call("operations:count_operations", subject, p) for p in policies])
        reference = next(trace for trace in traces if isinstance(trace, StepTrace))
        return [
            PolicyPlan(policy, refused=str(trace))
            if isinstance(trace, HalfstepError)
            else self._plan(policy, trace, reference, count)
            for policy, trace, count in zip(policies, traces, counts, strict=True)
        ]

    def _plan(self, policy: str, trace: StepTrace, reference: StepTrace, count: Any) -> PolicyPlan:
        return PolicyPlan(
            policy,
            trace,
            self.simulated(trace).peak_reserved if self.target.is_cuda else None,
            self.outside,
            self.need_of(trace),
            self.capacity,
            None if self.capacity is None else largest_batch(trace.law, self.need_of, self.capacity),
            saves_from(reference.law, trace.law) if trace is not reference else None,
            bound_of(count, self.ceilings) if self.ceilings and isinstance(count, Operations) else None,
        )

    def _call(self, function: str, subject: Subject, policy: str, **settings: Any) -> Call:
        return Call(
            f"halfstep.plan.{function}", (subject, policy, self.target), settings, f"{subject.spec} in {policy}"
        )

    def simulated(self, trace: StepTrace, capacity: int | None = None) -> Simulation:
        """The step in the caching allocator, beside the blocks of the libraries; ``capacity`` as for ``simulate``."""
        return simulate(trace, capacity, [each.nbytes for each in workspaces_of(self.target, trace)])

    def need_of(self, trace: StepTrace) -> int:
        """Bytes that the device needs for a step, as ``PolicyPlan.need``: at most the capacity if it runs."""
        if not self.target.is_cuda:
            return trace.peak.nbytes
        outside = sum(each.nbytes for each in self.outside)
        need = self.simulated(trace).peak_reserved + outside
        if self.capacity is None or not trace.peak.nbytes + outside <= self.capacity < need:
            return need
        return need if self.simulated(trace, self.capacity - outside).out_of_memory else self.capacity

    def assumptions(self, plans: Sequence[PolicyPlan]) -> tuple[str, ...]:
        """What the figures rest on, each sentence once."""
        traces = [plan.trace for plan in plans if plan.trace is not None]
        sentences = [
            "Exact: the tensors of the step, as torch's own operations make them on shapes, under the true Stepper.",
        ]
        if self.target.is_cuda:
            sentences.append("Simulated: what the caching allocator reserves, by its rules, in a running job.")
            sentences += [f"{each.name}: {each.how}." for trace in traces for each in workspaces_of(self.target, trace)]
            sentences += [f"{each.name}, {size_text(each.nbytes)}: {each.how}." for each in self.outside]
        if not self.target.is_named:
            sentences.append(f"Assumed: {self.target.name} of compute capability 8.0, since no card was named.")
        for trace in traces:
            sentences += trace.notes
            sentences += not_counted(self.target, trace)
        if self.why_no_bound:
            sentences.append(f"No bound on the speed: {self.why_no_bound}")
        return tuple(dict.fromkeys(sentences))


def _tokens(plans: Sequence[PolicyPlan]) -> int | None:
    return next((plan.trace.tokens_per_sample for plan in plans if plan.trace is not None), None)


def _sharded(plans: Sequence[PolicyPlan], num_ranks: int) -> tuple[tuple[str, ShardedPeak | str], ...]:
    """For each policy and stage of ZeRO the peak of a rank, or why there is none."""
    found: list[tuple[str, ShardedPeak | str]] = []
    for plan in plans:
        for stage in DIVIDED if plan.trace is not None else ():
            assert plan.trace is not None
            try:
                found.append((plan.policy, sharded(plan.trace, num_ranks, stage)))
            except HalfstepError as error:
                found.append((plan.policy, str(error)))
    return tuple(dict.fromkeys(found))  # what a policy refuses at every stage, once


def _answers(stacks: Sequence[Stack], spec: str) -> tuple[str, ...]:
    return (answer(stacks), *larger_batch(stacks, spec)) if stacks else ()


def _context(calibration: Calibration | None) -> dict[str, int] | None:
    """The measured bytes of a CUDA context by the name of the card, as ``outside_of`` takes them."""
    if calibration is None or calibration.context_bytes is None:
        return None
    return {calibration.card or calibration.device: calibration.context_bytes}
