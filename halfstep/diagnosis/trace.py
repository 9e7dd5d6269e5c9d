"""The trace of a bad step: who made the first non-finite value, from what, and what mends it.

It runs a captured micro-batch once with every operation recorded, and once more in FP32 to see what the producer's
result would have been. See docs/trace.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from halfstep.diagnosis.advice import Advice, advice_table, advise
from halfstep.diagnosis.capture import Capture
from halfstep.diagnosis.examination import Examination, examine, in_fp32
from halfstep.diagnosis.headroom import Growth, Headroom, growth_of, headroom_of
from halfstep.record.mask import kind_of
from halfstep.record.producer import BATCH, LOSS, Producer
from halfstep.record.recorder import Operation
from halfstep.record.values import Values
from halfstep.record.walk import Site
from halfstep.report import Cell, Report, Sheet, Table, count_text, json_number

NUM_BEFORE = 20
NUM_CARRIERS = 10
"""How many operations before the producer, and how many of the carriers after it, a report lists."""

History = Callable[[Site, str], Sequence[tuple[int, float]]]
"""(step, largest magnitude) of an operation, by its place and name, in order of steps."""


@dataclass(frozen=True)
class Trace(Report):
    """What :func:`trace_of` found in step ``step``.

    producer: None if nothing was found, or if no operation made what is not finite. operation: of the producer.
    before:   the operations that ran before it, the last one last. carriers: the first ones of ``num_carriers``.
    origin:   the operation that wrote what the producer was handed, such as a mask. notes: further sentences.
    reason:   why the step was not applied, where no operation is at fault.
    fp32_step: the step at which FP32 fails as well, None if it does not or was not tried.
    rank, ranks: of several ranks, the one whose micro-batch this is (None where that is all of them), and what each one
              found, by its number.
    """

    step: int
    policy: str
    is_bad: bool
    scale: float = 1.0
    loss: float | None = None
    grad_norm: float | None = None
    producer: Producer | None = None
    operation: Operation | None = None
    origin: Operation | None = None
    before: tuple[Operation, ...] = ()
    carriers: tuple[Operation, ...] = ()
    num_carriers: int = 0
    headroom: Headroom | None = None
    growth: Growth | None = None
    micro_batch: int | None = None
    reason: str | None = None
    fp32_step: int | None = None
    advice: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)
    rank: int | None = None
    ranks: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        return self.is_bad

    def sheet(self) -> Sheet:
        if not self.is_bad:
            return Sheet(
                f"nothing found in {count_text(self.step, 'step')}: no overflow that counts, and every value finite",
                f"policy {self.policy}",
                closing=self.notes,
            )
        where = "" if self.micro_batch is None else f", micro-batch {self.micro_batch + 1} of its window"
        facts = f"policy {self.policy}, loss scale {self.scale:g}{where}"
        if self.loss is not None and self.grad_norm is not None:
            facts += f", loss {self.loss:.6g}, gradient norm {self.grad_norm:.4g}"
        when = f"step {self.step}" if self.rank is None else f"step {self.step}, rank {self.rank}"
        return Sheet(f"{when}: {self.finding}", facts, tuple(self._tables()), tuple(self._closing()))

    @property
    def finding(self) -> str:
        """What was found in the step, in one line."""
        producer = self.producer
        if producer is None:
            reason = self.reason or "the gradient is not finite"
            return f"{reason}; no operation of the pass made a value that is not finite"
        place = _place(producer.file, producer.line)
        if producer.phase == "update":
            return f"the update of {producer.op} makes {producer.holds} {_word(producer.kind)}"
        if producer.holds is not None:
            return f"{producer.holds} holds {_word(producer.kind)} before the step; read{place}"
        call = f"{_called(producer.op or '', producer.function)}{place}"
        if producer.module == BATCH:
            return f"the batch holds {_word(producer.kind)}; the first to meet it is {call}"
        module, kind = _module(producer.module), _word(producer.kind)
        verb = "is the first to have" if self.operation is None else "makes"
        return f"{module} {verb} {kind} in the {producer.phase} pass, in {call}"

    def _tables(self) -> list[Table]:
        tables = []
        if self.ranks:
            said = [(str(rank), finding) for rank, finding in enumerate(self.ranks)]
            tables.append(Table((">rank", "what it found"), said, title="Ranks"))
        if self.operation is not None:
            rows: list[list[str | Cell]] = [_row(operation) for operation in self.before]
            rows.append([Cell(str(cell), "bad") for cell in _row(self.operation)])
            title = f"The {count_text(len(self.before), 'operation')} before it, and the producer"
            tables.append(Table(_COLUMNS, rows, title=title))
        if self.carriers:
            rest = self.num_carriers - len(self.carriers)
            note = f"and {rest} more" if rest else ""
            title = "Carriers, which only pass it on"
            tables.append(Table(_COLUMNS, [_row(carrier) for carrier in self.carriers], title=title, note=note))
        if self.advice:
            tables.append(advice_table(self.advice))
        return tables

    def _closing(self) -> list[str]:
        parts = []
        if self.operation is not None and self.loss is not None and math.isfinite(self.loss + (self.grad_norm or 0.0)):
            parts.append("Loss and gradient are finite all the same: it is lost on the way, with what it stood for.")
        if self.origin is not None:
            site, kind = self.origin.site, _word(kind_of(self.origin) or "inf")
            call = f"{_called(self.origin.op, site.function)}{_place(site.file, site.line)}"
            parts.append(f"It was handed {kind} from {call}, where it did no harm; here it does.")
        parts += [str(part) for part in (self.headroom, self.growth) if part is not None]
        return [*parts, *self.notes]

    def to_dict(self) -> dict[str, Any]:
        producer = None if self.producer is None else asdict(self.producer)
        return {
            "step": self.step,
            "policy": self.policy,
            "found": self.found,
            "micro_batch": self.micro_batch,
            "reason": self.reason,
            "scale": json_number(self.scale),
            "loss": json_number(self.loss),
            "grad_norm": json_number(self.grad_norm),
            "producer": producer,
            "origin": None if self.origin is None else _brief(self.origin),
            "headroom": None if self.headroom is None else self.headroom.to_dict(),
            "growth": None if self.growth is None else asdict(self.growth),
            "before": [_full(operation) for operation in self.before],
            "carriers": [_brief(operation) for operation in self.carriers],
            "num_carriers": self.num_carriers,
            "fp32_step": self.fp32_step,
            "advice": [advice.to_dict() for advice in self.advice],
            "notes": list(self.notes),
            "rank": self.rank,
            "ranks": list(self.ranks),
        }


def trace_of(capture: Capture, history: History | None = None, examination: Examination | None = None) -> Trace:
    """Trace a captured micro-batch, whose loss or gradient is not finite or in which a 16-bit operation overflows.

    history:     what the operation made in the steps before, to say since when it grew.
    examination: of this capture, where it has been done already.
    """
    seen = examination or examine(capture)
    trace = Trace(
        capture.step, str(capture.policy), seen.is_bad, capture.scale, seen.outcome.loss, seen.outcome.grad_norm
    )
    fault = seen.fault
    if fault is None:
        return trace
    operation = fault.operation
    twin = seen.twin or in_fp32(capture)
    series = history(operation.site, operation.op) if history is not None else ()
    return replace(
        trace,
        producer=fault.producer,
        operation=operation,
        origin=fault.origin,
        before=seen.record.operations[max(0, fault.index - NUM_BEFORE) : fault.index],
        carriers=fault.carriers[:NUM_CARRIERS],
        num_carriers=len(fault.carriers),
        headroom=headroom_of(seen.record, fault.index, twin),
        growth=growth_of([(step, largest) for step, largest in series if step < capture.step]),
        advice=advise(capture, fault.producer),
    )


# --- words ---------------------------------------------------------------------------------------------------------

_COLUMNS = ("module", "operation", "pass", "formats", ">largest in", ">largest out", "where")


def _row(operation: Operation) -> list[str | Cell]:
    site = operation.site
    return [
        _module(LOSS if site.module is None else site.module),
        _called(operation.op, site.function),
        site.phase,
        f"{_formats(operation.inputs)} > {_formats(operation.outputs)}",
        _largest(operation.inputs),
        _largest(operation.outputs),
        _place(site.file, site.line).removeprefix(" at "),
    ]


def _formats(values: Sequence[Values]) -> str:
    return ",".join(dict.fromkeys(value.format for value in values)) or "-"


def _largest(values: Sequence[Values]) -> str:
    kinds = sorted({value.kind for value in values if value.kind})
    return "/".join([*kinds, f"{max((value.largest for value in values), default=0.0):.4g}"])


def _called(op: str, function: str | None) -> str:
    return op if function in (None, op) else f"{function} ({op})"


def _module(name: str) -> str:
    return name or "the outermost module"


def _place(file: str | None, line: int | None) -> str:
    return "" if file is None else f" at {_short(file)}:{line}"


def _short(file: str) -> str:
    """Relative to where we are, if it is below."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file


def _word(kind: str) -> str:
    return "NaN" if kind == "nan" else kind


def _brief(operation: Operation) -> dict[str, Any]:
    site = operation.site
    module = LOSS if site.module is None else site.module
    kind = kind_of(operation)
    place = {"file": site.file, "line": site.line}
    return {"module": module, "op": operation.op, "phase": site.phase, "function": site.function, "kind": kind} | place


def _full(operation: Operation) -> dict[str, Any]:
    def values(of: Sequence[Values]) -> list[dict[str, Any]]:
        return [{"format": v.format, "shape": list(v.shape), "largest": v.largest, "kind": v.kind} for v in of]

    return _brief(operation) | {"inputs": values(operation.inputs), "outputs": values(operation.outputs)}
