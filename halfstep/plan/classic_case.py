"""The classic case with its arithmetic: what weights, gradients and states cost, and what AMP and LoRA change of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from halfstep.plan.policy_plan import PolicyPlan
from halfstep.plan.size import size_text
from halfstep.plan.stacks import Stack
from halfstep.plan.step_trace import StepTrace

FIXED = ("weights", "gradients", "optimizer states")
"""What a step with fp32 weights and Adam costs before any activation."""

GB = 10**9


def arithmetic(num_parameters: int, num_trained: int | None = None) -> tuple[str, ...]:
    """The sentences for a model of ``num_parameters`` in fp32 with Adam's two moments, of which some train (all)."""
    num_trained = num_parameters if num_trained is None else num_trained
    weights, gradients, states = (
        f"{nbytes / GB:.3g}" for nbytes in (4 * num_parameters, 4 * num_trained, 8 * num_trained)
    )
    total = (4 * num_parameters + 12 * num_trained) / GB
    trained = "" if num_trained == num_parameters else f", {_billions(num_trained)} of them trained"
    return (
        f"{_billions(num_parameters)} parameters{trained}, in FP32 with AdamW: weights 4 bytes each, {weights} GB; "
        f"gradients 4 bytes for each that trains, {gradients} GB; two moments 8 bytes, {states} GB. That is "
        f"{total:.3g} GB before activations.",
        "AMP alone leaves that untouched: it keeps fp32 weights, and with them fp32 gradients and states. It adds 2 "
        "bytes for each weight that is cast, and halves most activations.",
        f"AdamW's default form (foreach) takes 4 bytes more for each parameter that trains, {4 * num_trained / GB:.3g} "
        "GB, for a moment of the step; fused=True does not.",
    )


def classic_case(plans: Sequence[PolicyPlan], stacks: Sequence[Stack] = ()) -> tuple[str, ...]:
    """The sentences for a plan whose fp32 step is the classic case: its arithmetic, and what AMP and LoRA leave of it.

    It is where Adam's two moments are the states, and more than half of the peak is there before any activation.
    """
    trace = next((plan.trace for plan in plans if plan.trace is not None and plan.trace.policy == "fp32"), None)
    if trace is None or trace.techniques:
        return ()
    fixed = {name: largest(trace, name) for name in FIXED}
    has_moments = math.isclose(fixed["optimizer states"], 8 * trace.num_trained, rel_tol=0.01)
    if not has_moments or 2 * sum(fixed.values()) < trace.peak.nbytes:
        return ()
    low = [plan.trace for plan in plans if plan.trace is not None and plan.trace is not trace]
    adapted = [stack.trace for stack in stacks if stack.trace is not None and "4bit" in stack.names]
    shown = [*low[:1], *sorted(adapted, key=lambda each: each.peak.nbytes)[:1]]
    return (*arithmetic(trace.num_parameters, trace.num_trained), *(of_trace(each) for each in shown))


def of_trace(trace: StepTrace) -> str:
    """One sentence: what is fixed in a traced step, and how much of its peak the rest is."""
    peak = trace.peak
    fixed = {name: largest(trace, name) for name in FIXED}
    parts = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in fixed.items())
    activations = peak.components.get("activations", 0)
    return (
        f"{trace.policy}{''.join(f' + {name}' for name in trace.techniques)}: {parts}, together "
        f"{size_text(sum(fixed.values()))}; of the peak of {size_text(peak.nbytes)} activations are "
        f"{activations / peak.nbytes:.0%}."
    )


def largest(trace: StepTrace, component: str) -> int:
    """The most bytes that a component holds at one time of the step."""
    changes: dict[int, int] = {}
    for storage in trace.storages:
        if storage.component == component:
            changes[storage.born] = changes.get(storage.born, 0) + storage.nbytes
            if storage.died is not None:
                changes[storage.died] = changes.get(storage.died, 0) - storage.nbytes
    held = most = 0
    for time in sorted(changes):
        held += changes[time]
        most = max(most, held)
    return most


def _billions(count: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}"
