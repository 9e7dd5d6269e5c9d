"""Diff: one step under two policies, operation by operation; where they part by more than their formats cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.diagnosis.advice import Advice, advice_table
from halfstep.diagnosis.capture import Capture
from halfstep.errors import HalfstepError
from halfstep.explain.divergence import Compared
from halfstep.explain.error import unit_of
from halfstep.explain.rehearsal import capture_at
from halfstep.explain.stream import Ran
from halfstep.explain.two_runs import TwoRuns
from halfstep.formats import Format
from halfstep.policy import Policy
from halfstep.report import Report, Sheet, Table, json_number
from halfstep.source import Source

_NUM_ROWS = 40
_NUM_PARTING = 5


@dataclass(frozen=True)
class DiffRow:
    """One operation of both runs, a cast that loses too much in one, or an operation without a partner.

    module:  None outside of the model, as in a loss function; "" is the model's own forward.
    formats: of what goes in and comes out in each run, as ``fp16 -> fp16``; None in a run that does not have it.
    error:   largest difference of the two results, in units of u at the scale of the tensor; inf where one alone is
             not finite. expected: the same of what its inputs carry, at least 1. limit: what it may be.
    kind:    ``arithmetic``; ``cast`` of one run alone, with what it loses as error; ``random`` draws; ``decision``, a
             step function or what it picks; ``unpaired``. Of random draws and decisions only inf counts.
    parts:   whether the runs part here: error > limit.
    is_finite: of the results in each run.
    """

    module: str | None
    op: str
    phase: str
    function: str | None
    file: str | None
    line: int | None
    formats: tuple[str | None, str | None]
    error: float | None
    expected: float | None
    limit: float | None
    kind: str
    parts: bool = False
    is_finite: tuple[bool, bool] = (True, True)

    @classmethod
    def of(cls, compared: Compared) -> DiffRow:
        both = (compared.a, compared.b)
        return cls(
            *_place(compared.ran),
            (both[0].arrow if both[0] else None, both[1].arrow if both[1] else None),
            compared.error,
            compared.expected,
            compared.limit,
            compared.kind,
            compared.parts,
            (_is_finite(both[0]), _is_finite(both[1])) if math.isinf(compared.error) else (True, True),
        )

    @classmethod
    def without_partner(cls, ran: Ran, side: int) -> DiffRow:
        return cls(*_place(ran), (None, ran.arrow) if side else (ran.arrow, None), None, None, None, "unpaired")

    @property
    def where(self) -> str:
        """``block.0, mul, forward, net.py line 12``"""
        return ", ".join((_module(self.module), self.op, self.phase, self.at))

    @property
    def at(self) -> str:
        return "no line" if self.file is None else f"{Path(self.file).name} line {self.line}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "op": self.op,
            "phase": self.phase,
            "function": self.function,
            "file": self.file,
            "line": self.line,
            "formats": list(self.formats),
            "error": json_number(self.error),
            "expected": json_number(self.expected),
            "limit": json_number(self.limit),
            "kind": self.kind,
            "parts": self.parts,
        }


@dataclass(frozen=True)
class DiffReport(Report):
    """What ``halfstep diff`` returns.

    policies: their texts, the first is the reference. step: number of the window. how: the step in words.
    scales, losses, grad_norms: loss scale, true loss and true gradient norm of each run.
    unit:     the format whose unit roundoff u the errors are counted in, the coarsest that either policy computes in.
    paired_pct: share of the operations of both runs that have a partner. num_operations: of each run, without casts,
              copies and constants.
    rows:     in order of execution. unpaired: operations without a partner.
    """

    policies: tuple[str, str]
    step: int
    how: str
    scales: tuple[float, float]
    losses: tuple[float, float]
    grad_norms: tuple[float, float]
    unit: Format
    paired_pct: float
    num_operations: int
    rows: tuple[DiffRow, ...]
    unpaired: tuple[DiffRow, ...]
    advice: tuple[Advice, ...]

    @property
    def parting(self) -> tuple[DiffRow, ...]:
        """Where the runs part, in order of execution; of one operation of one line the first."""
        places: dict[tuple[object, ...], DiffRow] = {}
        for row in self.rows:
            if row.parts:
                places.setdefault((row.module, row.op, row.phase, row.file, row.line), row)
        return tuple(places.values())

    @property
    def first(self) -> DiffRow | None:
        """The first divergence in order of execution; None if no operation costs more than its formats do."""
        return next(iter(self.parting), None)

    @property
    def found(self) -> bool:
        return self.first is not None

    def to_dict(self) -> dict[str, Any]:
        return {
            "policies": list(self.policies),
            "step": self.step,
            "scales": list(self.scales),
            "losses": [json_number(loss) for loss in self.losses],
            "grad_norms": [json_number(norm) for norm in self.grad_norms],
            "unit": {"format": self.unit.name, "value": unit_of(self.unit)},
            "paired_pct": self.paired_pct,
            "num_operations": self.num_operations,
            "first": None if self.first is None else self.first.to_dict() | {"what": self.what(self.first)},
            "operations": [row.to_dict() for row in self.rows],
            "unpaired": [row.to_dict() for row in self.unpaired],
            "advice": [advice.to_dict() for advice in self.advice],
        }

    def what(self, row: DiffRow) -> str:
        """What happens where the runs part, in words."""
        assert row.error is not None
        assert row.expected is not None
        share = min(1.0, row.error * unit_of(self.unit))
        if row.kind == "cast":
            made = f"the cast {row.formats[0] or row.formats[1]}"
            if math.isinf(row.error):
                return f"{made} makes inf or NaN of what it can not hold"
            return f"{made} is off by {share:.0%} of the largest value"
        if math.isinf(row.error):
            sides = [policy for policy, is_finite in zip(self.policies, row.is_finite, strict=True) if not is_finite]
            return f"{' and '.join(sides)} {'gives' if len(sides) == 1 else 'give'} inf or NaN"
        return f"off by {share:.0%} of the largest value, {row.error / row.expected:.0f} times what goes in"

    def sheet(self) -> Sheet:
        a, b = self.policies
        if self.first is None:
            headline = f"{a} and {b} stay together: no operation costs more than its formats do"
        else:
            headline = f"{a} and {b} part at {self.first.where}: {self.what(self.first)}"
        facts = (
            f"{self.how}; {self.paired_pct:.4g}% of {self.num_operations} operations have a partner; "
            f"loss {self.losses[0]:.6g} and {self.losses[1]:.6g}, gradient norm {self.grad_norms[0]:.4g} and "
            f"{self.grad_norms[1]:.4g}, at loss scale {self.scales[0]:g} and {self.scales[1]:g}; "
            f"u = {unit_of(self.unit):.3g}, the unit roundoff of {self.unit.name}"
        )
        return Sheet(headline, facts, list(self._tables()), list(self._closing()))

    def _tables(self) -> Iterator[Table]:
        if self.parting:
            rows = [
                (_module(row.module), row.op, row.phase, row.at, f"{row.error:.4g}", f"{row.expected:.3g}")
                for row in self.parting[:_NUM_PARTING]
            ]
            yield Table(
                ("module", "operation", "phase", "line", ">error (u)", ">expected (u)"),
                rows,
                title="Where they part, in order of execution",
                note=_more(len(self.parting), _NUM_PARTING, "what follows may be only a consequence"),
            )
        yield self._trace()
        if self.unpaired:
            lines = [(_module(r.module), r.op, r.phase, r.at, *(f or "-" for f in r.formats)) for r in self.unpaired]
            yield Table(
                ("module", "operation", "phase", "line", *self.policies),
                lines[:_NUM_PARTING],
                title="Without a partner",
                note=_more(len(lines), _NUM_PARTING),
            )
        if self.advice:
            yield advice_table(self.advice)

    def _trace(self) -> Table:
        different = [row for row in self.rows if row.kind != "cast" and row.formats[0] != row.formats[1]]
        groups = Counter(
            (_module(row.module), row.op, row.phase, *(f or "-" for f in row.formats)) for row in different
        )
        lines = [(*group[:3], str(count), *group[3:]) for group, count in groups.items()]
        return Table(
            ("module", "operation", "phase", ">times", *self.policies),
            lines[:_NUM_ROWS],
            title="Operations whose formats differ",
            note=_more(len(lines), _NUM_ROWS, "all are in the JSON") if lines else "None.",
        )

    def _closing(self) -> Iterator[str]:
        draws = [row for row in self.rows if row.kind == "random" and (row.error or 0) > (row.limit or 0)]
        if draws:
            who = "1 random operation draws" if len(draws) == 1 else f"{len(draws)} random operations draw"
            yield (
                f"{who} other numbers in another format, the first at {draws[0].where}: what follows differs by that, "
                "and is not counted as a divergence."
            )


def diff(
    source: Source, policies: Sequence[str | Policy], step: int = 5, seed: int = 0, device: str | None = None
) -> DiffReport:
    """Train ``source`` under the first policy up to ``step``, and run that step under both. HalfstepError: not two."""
    if len(policies) != 2:
        raise HalfstepError(
            f"{len(policies)} {'policy' if len(policies) == 1 else 'policies'}",
            "diff lays two runs side by side",
            "Name two, as in --policies fp32,fp16.",
        )
    a, b = (Policy.parse(policy) for policy in policies)
    capture, how = capture_at(source, a, step, seed, device)
    return diff_of(capture, a, b, f"{source.spec}, seed {seed}, {how}")


def diff_of(capture: Capture, policy_a: Policy, policy_b: Policy, how: str = "") -> DiffReport:
    """A captured micro-batch under two policies. how: in words, how it came about."""
    runs = TwoRuns(capture, (policy_a, policy_b))
    comparison = runs.comparison
    outcomes = runs.outcomes
    return DiffReport(
        policies=(str(policy_a), str(policy_b)),
        step=capture.step,
        how=how or f"step {capture.step}",
        scales=runs.scales,
        losses=(outcomes[0].loss, outcomes[1].loss),
        grad_norms=(outcomes[0].grad_norm, outcomes[1].grad_norm),
        unit=runs.unit,
        paired_pct=comparison.paired_pct,
        num_operations=comparison.num_operations,
        rows=tuple(map(DiffRow.of, comparison.compared)),
        unpaired=tuple(DiffRow.without_partner(ran, side) for side in (0, 1) for ran in comparison.unpaired[side]),
        advice=runs.advise(),
    )


def _place(ran: Ran) -> tuple[str | None, str, str, str | None, str | None, int | None]:
    site = ran.site
    return site.module, ran.op, site.phase, site.function, site.file, site.line


def _is_finite(ran: Ran | None) -> bool:
    return ran is None or not any(kept.extremes[1] > 0 for kept in ran.outputs if not kept.is_discrete)


def _module(name: str | None) -> str:
    return "outside of the model" if name is None else name or "the model itself"


def _more(count: int, shown: int, note: str = "") -> str:
    return f"{count - shown} more{'; ' if note else ''}{note}" if count > shown else ""
