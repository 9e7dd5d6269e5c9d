"""What a plan found: memory and speed of each policy, combinations that fit, advice."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.plan.step_trace import StepTrace


@dataclass(frozen=True)
class Outside:
    """Memory of the device that no tensor of the step holds.

    name: such as ``CUDA context``. nbytes: how much. how: ``stated``, ``simulated`` or ``assumed``, and by whom.
    """

    name: str
    nbytes: int
    how: str


@dataclass(frozen=True)
class PolicyPlan:
    """One policy of a plan.

    policy:  as asked for. refused: why it cannot run on the target, None if it can; then the rest is None.
    trace:   its step. reserved: peak bytes that the caching allocator holds for it, rounding and fragments included.
    outside: what the device holds besides.
    """

    policy: str
    trace: StepTrace | None = None
    reserved: int | None = None
    outside: tuple[Outside, ...] = ()
    refused: str | None = None
