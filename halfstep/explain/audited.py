"""The row of an audit: one operation of one line, the worst of its calls."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from halfstep.diagnosis.capture import Capture
from halfstep.explain.auditor import Auditor, Key
from halfstep.explain.replay import Call, Source
from halfstep.policy import Policy


@dataclass(frozen=True)
class AuditedOp:
    """One operation of one line: the worst of its ``count`` calls.

    module:  None outside of the model, as in a loss function; "" is the model's own forward.
    error:   in ``unit``; None where there is nothing wider to hold it against.
    unit:    ``u |A||B|`` of a product or a sum, ``u max|x|`` of anything else, against float64 on the same inputs;
             ``u max|x|, whole step`` against a step that is float64 throughout. u is that of the output's format, in
             the whole step that of the policy's: 2^-8 in bf16, 2^-11 in fp16, 2^-24 in fp32.
    limit:   what ``error`` may be.
    kind:    why it fails: ``inexact``, ``overflow``, ``underflow``, ``cancellation`` or ``accumulation``; None where it
             does not.
    drift:   distance of its output from the float64 step, in u of the policy's format at the scale of the output.
    growth:  drift of the output over that of the inputs, or over 1 if that is less.
    sources: where the drift of its inputs came about, the worst first: operation, file and line.
    """

    module: str | None
    op: str
    phase: str
    error: float | None
    unit: str
    passed: bool | None
    file: str | None
    line: int | None
    count: int
    limit: float | None
    kind: str | None
    drift: float
    growth: float
    sources: tuple[Source, ...]
    note: str | None

    @property
    def excess(self) -> float:
        """The error as a multiple of its limit, by which the most suspicious operation comes first; 0 if not known."""
        return self.error / self.limit if self.error is not None and self.limit else 0.0

    @property
    def place(self) -> str:
        """``model.py:12`` where that is known."""
        return place_of(self.file, self.line)


def place_of(file: str | None, line: int | None) -> str:
    """``model.py:12``, or a dash."""
    return f"{Path(file).name}:{line}" if file else "-"


def audit_ops(
    capture: Capture, policy: Policy, scale: float, under: Sequence[AbstractContextManager[object]] = ()
) -> tuple[AuditedOp, ...]:
    """The rows of a captured micro-batch in order of execution, run in ``policy`` at ``scale`` inside ``under``."""
    auditor = Auditor(capture.model, policy)
    outcome = capture.run(policy, scale, under=[auditor, *under])
    return tuple(_row(key, calls, outcome.is_finite) for key, calls in auditor.calls.items())


def _row(key: Key, calls: list[Call], is_finite: bool) -> AuditedOp:
    module, op, phase, file, line = key
    call = max((call.settled(is_finite) for call in calls), key=lambda call: call.rank)
    passed = None if call.error is None else call.kind is None
    return AuditedOp(
        module,
        op,
        phase,
        call.error,
        call.unit,
        passed,
        file,
        line,
        len(calls),
        call.limit,
        call.kind,
        call.drift,
        call.growth,
        call.sources,
        call.note,
    )
