"""One policy of a plan: its step on the target, and what the device needs for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halfstep.plan.holders import peak_phase
from halfstep.plan.size import mib
from halfstep.plan.step_trace import StepTrace, Storage

if TYPE_CHECKING:
    from halfstep.plan.roofline import Bound


@dataclass(frozen=True)
class Outside:
    """Memory of the device that no tensor of the step holds.

    name: such as ``CUDA context``. nbytes: how much. how: how that is known: stated, simulated or assumed, and by whom.
    """

    name: str
    nbytes: int
    how: str


@dataclass(frozen=True)
class PolicyPlan:
    """One policy of a plan.

    policy:   as asked for. refused: why it cannot run on the target, None if it can; else the rest is None.
    trace:    its step. reserved: peak bytes that the caching allocator holds for it, rounding and fragments included;
              None on a CPU, which has no such allocator. outside: what the device holds besides.
    need:     bytes that the device needs: ``reserved``, or the tensors where there is no such allocator, and what is
              outside. Where that is more than there is and the step runs all the same, since the allocator gives back
              what it has cached, it is all of the capacity.
    capacity: bytes of memory of the target, None where that is not known.
    largest_batch: samples of the largest micro-batch that fits, 0 if not one does; None where nobody knows.
    saves_from: samples of a micro-batch from which on it needs less than the first policy; None if it never does.
    bound:    the shortest possible time of the step; None where the target's rates are not known.
    """

    policy: str
    trace: StepTrace | None = None
    reserved: int | None = None
    outside: tuple[Outside, ...] = ()
    need: int = 0
    capacity: int | None = None
    largest_batch: int | None = None
    saves_from: int | None = None
    bound: Bound | None = None
    refused: str | None = None

    @property
    def peak(self) -> int:
        """Bytes that tensors hold at the peak."""
        return self.trace.peak.nbytes if self.trace else 0

    @property
    def fits(self) -> bool | None:
        """Whether it fits into the target's memory; None where that is not known."""
        return None if self.capacity is None or self.trace is None else self.need <= self.capacity

    @property
    def maker(self) -> Storage | None:
        """The storage whose birth makes the peak."""
        return self.trace.born_at(self.trace.peak.time) if self.trace else None

    def to_dict(self) -> dict[str, Any]:
        """Sizes in MiB; what is not known is null."""
        trace, maker = self.trace, self.maker
        attention = (trace.attention if trace else None) or {}
        return {
            "policy": self.policy,
            "effective": trace.policy if trace else None,
            "peak_mib": mib(self.peak) if trace else None,
            "reserved_mib": None if self.reserved is None else mib(self.reserved),
            "outside_mib": mib(sum(each.nbytes for each in self.outside)) if trace else None,
            "outside": [{"name": o.name, "mib": mib(o.nbytes), "how": o.how} for o in self.outside],
            "phase": peak_phase(trace) if trace else None,
            "op": maker.op if maker else None,
            "module": maker.module if maker else None,
            "components": {name: mib(n) for name, n in trace.peak.components.items()} if trace else {},
            "attention": {kernel: list(modules) for kernel, modules in attention.items()},
            "fits": self.fits,
            "largest_batch": self.largest_batch,
            "saves_from": self.saves_from,
            "samples_per_s_bound": self.bound.samples_per_s if self.bound else None,
            "bound": self.bound.to_dict() if self.bound else None,
            "refused": self.refused,
        }
