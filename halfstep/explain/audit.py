"""Audit: is each operation of a step as right as its format allows, and is what the step makes of them?

Two questions, two measures. Each operation runs again in float64 on the inputs that it had: one whose error is beyond
what rounding costs (``explain.error``) is at fault itself, as a product that accumulates in fp16. And the whole step
runs beside itself in float64 (``explain.shadow``): an operation whose output is far from its shadow although its inputs
are near to theirs loses the digits that its inputs had, as the subtraction in E[x^2] - E[x]^2 does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from halfstep.diagnosis.advice import DOES_NOT, Advice, advice_table
from halfstep.diagnosis.capture import Capture
from halfstep.errors import HalfstepError
from halfstep.explain.audited import AuditedOp, audit_ops, place_of
from halfstep.explain.rehearsal import capture_at
from halfstep.explain.remedy import finite_scale, remedies
from halfstep.formats import FORMATS
from halfstep.hardware import detect
from halfstep.policy import Policy
from halfstep.record import LOSS
from halfstep.report import Cell, Report, Sheet, Table, json_number
from halfstep.source import Source

_NUM_SHOWN = 10


@dataclass(frozen=True)
class AuditReport(Report):
    """The operations of one captured micro-batch, in order of execution, and what mends the ones that fail.

    scale: the loss scale that it ran at, the largest one up to that of the run at which the gradient is finite.
    """

    policy: str
    step: int
    how: str
    scale: float
    ops: tuple[AuditedOp, ...]
    advice: tuple[Advice, ...]

    @property
    def failed(self) -> tuple[AuditedOp, ...]:
        """Those that fail, the worst first, and of equal ones the one that ran first."""
        return tuple(sorted((op for op in self.ops if op.passed is False), key=lambda op: -op.excess))

    @property
    def found(self) -> bool:
        return bool(self.failed)

    def to_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "step": self.step,
            "scale": json_number(self.scale),
            "ops": [{key: json_number(value) for key, value in asdict(op).items()} for op in self.ops],
            "advice": [advice.to_dict() for advice in self.advice],
        }

    def sheet(self) -> Sheet:
        failed = self.failed
        headline = "every operation is as right as it can be"
        if failed:
            first = f"the worst is {failed[0].op} ({failed[0].kind}) of {_module(failed[0])} at {failed[0].place}"
            headline = f"{len(failed)} of {len(self.ops)} operations fail; {first}"
        facts = f"{self.how}; scale {self.scale:g}; an operation is one of a line, forward or backward"
        tables = [table for table in (self._failures(), self._passes(), self._unknown()) if table.rows]
        if self.advice:
            tables.append(advice_table(self.advice))
        fails_in_fp32 = any(a.policy == "fp32" and a.result == DOES_NOT for a in self.advice)
        closing = ["Not the precision: fp32 fails as well."] if fails_in_fp32 else []
        return Sheet(f"{self.policy}: {headline}", facts, tables, closing)

    def _failures(self) -> Table:
        columns = ("why", "operation", "module", "phase", ">error", ">limit", "unit", "line", "what is known")
        rows = [_failed_row(op) for op in self.failed]
        return Table(columns, rows, title="Fails")

    def _passes(self) -> Table:
        passed = sorted((op for op in self.ops if op.passed), key=lambda op: -op.excess)
        columns = ("operation", "module", "phase", ">error", ">limit", "unit", ">drift", "line")
        rows = [[*_columns(op), _number(op.drift), op.place] for op in passed[:_NUM_SHOWN]]
        nearest = ", the nearest to their limit" if len(passed) > _NUM_SHOWN else ""
        return Table(columns, rows, title=f"Passes: {len(passed)} operations{nearest}")

    def _unknown(self) -> Table:
        names = dict.fromkeys(f"{op.op} ({op.note})" for op in self.ops if op.passed is None)
        return Table(("operation",), [[name] for name in names], title="Not judged")


def audit(source: Source, policy: Policy, step: int = 1, seed: int = 0, device: str | None = None) -> AuditReport:
    """Audit the first micro-batch of window ``step`` of a workload, trained under ``policy`` up to there."""
    return audit_of(*capture_at(source, policy, step, seed, device))


def audit_of(capture: Capture, how: str = "a captured micro-batch") -> AuditReport:
    """Audit a captured micro-batch.

    A loss scale at which the gradient overflows is lowered first, as a Stepper would: how large it may be is not what
    is asked here.
    """
    scale = finite_scale(capture, capture.policy)
    ops = audit_ops(capture, capture.policy, scale)
    failed = [op for op in ops if op.passed is False]
    advice = remedies(capture, failed) if failed else ()
    return AuditReport(str(capture.policy), capture.step, how, scale, ops, advice)


def audit_loss(
    loss: Callable[..., torch.Tensor], *inputs: Any, policy: str | Policy = "fp16", device: str | None = None
) -> AuditReport:
    """Audit a loss function alone, forward and backward: ``audit_loss(focal_loss, logits, labels)``.

    inputs: what it is called with. Floating tensors that require a gradient are its predictions, or, if none does, the
            first one is; they are rounded to the policy's format, as a layer in that policy gives them. Others stay as
            they are.
    """
    policy = Policy.parse(policy)
    predictions = _Predictions(inputs, FORMATS[policy.compute].dtype).to(device or detect(device).kind)
    return audit_of(Capture(predictions, lambda: loss(*predictions()), policy), "a loss function alone")


class _Predictions(nn.Module):
    """The inputs of a loss function, with the predictions among them as parameters, rounded to ``dtype``."""

    def __init__(self, inputs: tuple[Any, ...], dtype: torch.dtype) -> None:
        super().__init__()
        floating = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        self._places = [i for i in floating if inputs[i].requires_grad] or floating[:1]
        if not self._places:
            raise HalfstepError(
                "a loss function without a floating tensor among its inputs",
                "there is nothing to take a gradient of",
                "Give what it is called with: audit_loss(loss, logits, labels).",
            )
        self._inputs = list(inputs)
        rounded = [inputs[i].detach().to(dtype).float() for i in self._places]
        self.predictions = nn.ParameterList([nn.Parameter(x) for x in rounded])

    def forward(self) -> list[Any]:
        device = self.predictions[0].device
        given = [x.to(device) if isinstance(x, torch.Tensor) else x for x in self._inputs]
        for place, prediction in zip(self._places, self.predictions, strict=True):
            is_low = torch.is_autocast_enabled(device.type)
            given[place] = prediction.to(torch.get_autocast_dtype(device.type)) if is_low else prediction
        return given


def _module(op: AuditedOp) -> str:
    return LOSS if op.module is None else op.module or "the model's forward"


def _columns(op: AuditedOp) -> list[str]:
    return [op.op, _module(op), op.phase, _number(op.error), _number(op.limit), op.unit]


def _failed_row(op: AuditedOp) -> list[str | Cell]:
    return [Cell(op.kind or "", "bad"), *_columns(op), op.place, _evidence(op)]


def _evidence(op: AuditedOp) -> str:
    known = [op.note] if op.note else []
    if op.kind in ("cancellation", "underflow"):
        known += [f"its inputs were rounded by {name} at {place_of(file, line)}" for name, file, line in op.sources[:1]]
    if op.kind == "cancellation":
        known.append(f"{_number(op.growth)} times the drift of its inputs")
    return "; ".join(known)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2g}" if value < 100 or value >= 1e6 else f"{value:.0f}"
