"""The report of ``halfstep plan``: its sentence, its tables, its JSON and its picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfstep.formats import SIXTEEN_BIT
from halfstep.plan.holders import holders_table, maker_text, module_patterns, peak_phase, phase_text, phases_table
from halfstep.plan.picture import memory_figure
from halfstep.plan.policy_plan import PolicyPlan
from halfstep.plan.sharding import ShardedPeak
from halfstep.plan.size import mib, size_text
from halfstep.plan.stacks import Stack, stacks_table
from halfstep.plan.step_trace import StepTrace
from halfstep.plan.target import Target
from halfstep.policy import Policy
from halfstep.report import Cell, Figure, Report, Sheet, Table

NUM_SHARES = 8
"""Groups of modules in the table of time."""


@dataclass(frozen=True)
class PlanReport(Report):
    """What ``halfstep plan`` returns.

    workload, target, torch: what was planned, for which device, by which torch.
    plans:       one for each policy; the first is what the others are compared with.
    stacks:      combinations with what else saves memory, in the order of their price; empty where no memory is known.
    sharded:     for each policy and stage of ZeRO the peak of a rank, or why there is none; empty where nobody asked.
    advice:      sentences that hold for this model on this target.
    assumptions: what the figures rest on, and how it was come by.
    """

    workload: str
    target: Target
    torch: str
    plans: tuple[PolicyPlan, ...]
    stacks: tuple[Stack, ...] = ()
    sharded: tuple[tuple[str, ShardedPeak | str], ...] = ()
    advice: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def traces(self) -> list[StepTrace]:
        """The steps of the policies that the target can run."""
        return [plan.trace for plan in self.plans if plan.trace is not None]

    @property
    def found(self) -> bool:
        """Whether the memory is known and no policy fits into it as it is: exit status 1."""
        known = [plan.fits for plan in self.plans if plan.fits is not None]
        return bool(known) and not any(known)

    def to_dict(self) -> dict[str, Any]:
        trace = self.traces[0]
        return {
            "workload": self.workload,
            "card": self.target.name,
            "memory_gib": self.target.memory_gib,
            "torch": self.torch,
            "batch_size": trace.batch_size,
            "parameters": trace.num_parameters,
            "trained_parameters": trace.num_trained,
            "found": self.found,
            "policies": [plan.to_dict() for plan in self.plans],
            "stacks": [stack.to_dict() for stack in self.stacks],
            "sharded": [{"policy": policy} | _rank_dict(peak) for policy, peak in self.sharded],
            "advice": list(self.advice),
            "assumptions": list(self.assumptions),
        }

    def figures(self) -> Mapping[str, Figure]:
        return {"memory": memory_figure(self.traces)}

    # The sheet.

    def sheet(self) -> Sheet:
        tables = [self._policy_table(), phases_table(self.traces), holders_table(self._shown)]
        if attention := _attention_table(self.traces):
            tables.append(attention)
        if any(plan.bound for plan in self.plans):
            tables.append(self._speed_table())
            tables.append(self._share_table())
        if self.stacks:
            tables.append(stacks_table(self.stacks))
        if self.sharded:
            tables.append(self._rank_table())
        trace = self.traces[0]
        trained = "" if trace.num_trained == trace.num_parameters else f", {trace.num_trained:,} of them trained"
        windows = trace.num_samples // trace.batch_size
        batch = f"a batch of {trace.batch_size}" + (f", {windows} of them a step" if windows > 1 else "")
        facts = f"{trace.num_parameters:,} parameters{trained}; {batch}; torch {self.torch}."
        closing = [*self.advice, *(f"{plan.policy}: {plan.refused}" for plan in self.plans if plan.refused)]
        return Sheet(self.headline, facts, tables, [*closing, *self.assumptions])

    @property
    def headline(self) -> str:
        first = self._first
        others = [plan for plan in self.plans if plan.trace and plan is not first]
        said = [f"{plan.policy} {size_text(plan.peak)} ({_change(plan.peak, first.peak)})" for plan in others]
        peaks = ", ".join([f"{first.policy} peaks at {size_text(first.peak)}", *said])
        return f"{self.workload} on {self.target.name}: {peaks}{self._fit_clause()}."

    def _fit_clause(self) -> str:
        known = {plan.policy: plan.fits for plan in self.plans if plan.fits is not None}
        if not known:
            return ""
        memory = f"{self.target.memory_gib:.4g} GiB"
        if all(known.values()):
            return f"; {'each fits' if len(known) > 1 else 'it fits'} into {memory}"
        if not any(known.values()):
            return f"; {'none fits' if len(known) > 1 else 'it does not fit'} into {memory}"
        return f"; of them {', '.join(name for name, fits in known.items() if fits)} fit into {memory}"

    @property
    def _shown(self) -> StepTrace:
        """The step whose holders are listed: of the first 16-bit policy, else of the first."""
        low = [t for t in self.traces if Policy.parse(t.policy).compute in SIXTEEN_BIT]
        return (low or self.traces)[0]

    @property
    def _first(self) -> PolicyPlan:
        """What the others are compared with: the first policy that runs."""
        return next(plan for plan in self.plans if plan.trace is not None)

    def _policy_table(self) -> Table:
        has_memory = any(plan.capacity is not None for plan in self.plans)
        first = self._first
        rows: list[list[str | Cell]] = []
        for plan in self.plans:
            if plan.trace is None:
                rows.append([plan.policy, Cell("cannot run", "bad"), *[""] * (5 + 2 * has_memory)])
                continue
            reserved = "-" if plan.reserved is None else size_text(plan.reserved)
            made = maker_text(plan.maker)
            change = _change(plan.peak, first.peak)
            row: list[str | Cell] = [plan.policy, size_text(plan.peak), change, reserved, size_text(plan.need)]
            if has_memory:
                row.append(Cell("yes", "good") if plan.fits else Cell("no", "bad"))
                row.append("-" if plan.largest_batch is None else f"{plan.largest_batch:,}")
            row.append("" if plan is first else _from_text(plan))
            row.append(f"{phase_text(peak_phase(plan.trace))}{', ' if made else ''}{made}")
            rows.append(row)
        fits = [">fits", ">largest batch"] if has_memory else []
        columns = ["policy", ">peak", f">to {first.policy}", ">reserved", ">needs", *fits, ">saves from", "peak in"]
        note = (
            "peak: bytes that tensors hold. reserved: with the allocator's rounding and fragments. needs: with the "
            f"context of the device. saves from: samples in a batch from which on it peaks below {first.policy}."
        )
        return Table(columns, rows, title="Memory", note=note)

    def _speed_table(self) -> Table:
        rows = []
        first = self._first.bound
        for plan in self.plans:
            if (bound := plan.bound) is None:
                continue
            gain = "" if first is None or bound is first else f"{bound.gain_over(first):.2f}x"
            level = "-" if bound.level_batch_size is None else f"{bound.level_batch_size:,}"
            shares = f"{bound.compute_share:.0%} products, {1 - bound.compute_share:.0%} memory"
            off = f"{bound.off_share:.0%}" if bound.off_sizes else "-"
            rows.append((plan.policy, f"{bound.samples_per_s:,.4g}", gain, shares, level, off))
        measured = any(plan.bound.is_measured for plan in self.plans if plan.bound)
        what = "by the rates measured here" if measured else "at most"
        columns = ("policy", f">samples/s, {what}", ">gain", "bound by", ">level from", ">off multiples")
        note = (
            "An upper bound, never a promise: each kernel at the device's own rate or bandwidth, whichever takes "
            "longer, and nothing between them. gain: of the bounds; a step far from its bound can gain more. level "
            "from: the batch from which on it is within 5 % of what larger ones can reach. off multiples: time in "
            "layers whose sizes tensor cores do not like, see halfstep.align."
        )
        return Table(columns, rows, title="Speed", note=note)

    def _rank_table(self) -> Table:
        rows: list[tuple[str, ...]] = []
        for policy, peak in self.sharded:
            if isinstance(peak, str):
                rows.append((policy, "-", "-", "-", peak))
            else:
                name = f"ZeRO {peak.stage}" + (", FSDP2" if peak.stage == 3 else "")
                rows.append((policy, name, size_text(peak.nbytes), phase_text(peak.phase), _parts_text(peak)))
        num_ranks = next((peak.num_ranks for _, peak in self.sharded if isinstance(peak, ShardedPeak)), 0)
        title = f"A rank of {num_ranks}, each with the whole micro-batch" if num_ranks else "Over several ranks"
        return Table(
            ("policy", "divided by", ">peak", "peak in", "of it"),
            rows,
            title=title,
            note="Derived by division of the step of one device, not run.",
        )

    def _share_table(self) -> Table:
        bounds = {plan.policy: plan.bound for plan in self.plans if plan.bound}
        names = dict.fromkeys(share.name for bound in bounds.values() for share in bound.modules[:NUM_SHARES])
        rows = []
        for name in names:
            cells = []
            for bound in bounds.values():
                share = next((each for each in bound.modules if each.name == name), None)
                kind = "" if share is None else "products" if share.compute_share >= 0.5 else "memory"
                cells.append("-" if share is None else f"{share.share:.0%} {kind}")
            rows.append((name, *cells))
        return Table(["module", *bounds], rows, title="Where the time goes at the bound")


def _attention_table(traces: Sequence[StepTrace]) -> Table | None:
    rows = []
    for trace in traces:
        for kernel, modules in (trace.attention or {}).items():
            groups = Counter(module_patterns(modules).values())
            shown = [f"{name or 'the model itself'}{f' ({n})' if n > 1 else ''}" for name, n in groups.items()]
            rows.append((trace.policy, kernel, ", ".join(shown) or "outside the model"))
    return Table(("policy", "kernel, and why", "modules"), rows, title="Attention") if rows else None


def _change(value: float, reference: float) -> str:
    change = 100 * (value / reference - 1) if reference else 0.0
    return f"{change:+.0f} %" if abs(change) >= 0.5 else "0 %"


def _rank_dict(peak: ShardedPeak | str) -> dict[str, Any]:
    if isinstance(peak, str):
        return {"refused": peak}
    components = {name: mib(nbytes) for name, nbytes in peak.components.items()}
    return {
        "num_ranks": peak.num_ranks,
        "stage": peak.stage,
        "peak_mib": mib(peak.nbytes),
        "phase": peak.phase,
        "components": components,
        "how": peak.how,
        "refused": None,
    }


def _parts_text(peak: ShardedPeak) -> str:
    largest = sorted(peak.components.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in largest)


def _from_text(plan: PolicyPlan) -> str:
    if plan.saves_from is None:
        return "-" if plan.trace is None or not plan.trace.law.growth else "never"
    tokens = plan.trace.tokens_per_sample if plan.trace else None
    return f"{plan.saves_from:,}" + (f" ({plan.saves_from * tokens:,} tokens)" if tokens else "")
