"""What mends the operations that an audit names, the cheapest first, each tried by auditing the step again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from halfstep.diagnosis.advice import DOES_NOT, MENDS, NOT_TRIED, Advice, try_policies
from halfstep.diagnosis.capture import Capture, Outcome, largest_scale
from halfstep.diagnosis.intervention import in_fp32
from halfstep.explain.audited import AuditedOp, audit_ops, place_of
from halfstep.explain.replay import INEXACT, OVERFLOW, PRODUCTS, UNDERFLOW
from halfstep.formats import SIXTEEN_BIT
from halfstep.policy import Policy
from halfstep.record.walk import user_line

_MOST_MODULES = 4
_MOST_LINES = 4
"""How many are proposed one by one, or together."""

Line = tuple[str, int]
"""File and line."""


def remedies(capture: Capture, failed: Sequence[AuditedOp]) -> tuple[Advice, ...]:
    """What to do about operations that fail. ``mends it``: with it, every operation of the captured step passes."""
    places = [(op.file, op.line) for op in failed]
    places += [(file, line) for op in failed if op.kind != OVERFLOW for _, file, line in op.sources]
    lines = frozenset((file, line) for file, line in places if file is not None and line is not None)
    advice = list(_rewrites(failed))
    limit = 1
    if lines and len(lines) <= _MOST_LINES and capture.policy.compute in SIXTEEN_BIT:
        text = "compute in fp32, with .float() on what it takes: " + ", ".join(
            place_of(*line) for line in sorted(lines)
        )
        mends = _passes(capture, capture.policy, lines)
        advice.append(Advice(text, None, MENDS if mends else DOES_NOT))
        limit = 0 if mends and not any(op.module for op in failed) else 1
    return (*advice, *try_policies(_policies(capture, failed), lambda policy: _passes(capture, policy), limit))


def finite_scale(capture: Capture, policy: Policy, lines: frozenset[Line] = frozenset()) -> float:
    """The scale of the capture, or the next power of two below it at which the gradient is finite, if there is one."""

    def run(scale: float) -> Outcome:
        return capture.run(policy, scale, under=[_InFp32(lines, capture.device.type)])

    outcome = run(capture.scale)
    # The forward pass has no scale.
    if outcome.is_finite or not math.isfinite(outcome.loss) or capture.scale <= 1.0 or not run(1.0).is_finite:
        return capture.scale
    return largest_scale(lambda scale: run(scale).is_finite, 1.0, capture.scale)


def _passes(capture: Capture, policy: Policy, lines: frozenset[Line] = frozenset()) -> bool:
    scale = finite_scale(capture, policy, lines)
    ops = audit_ops(capture, policy, scale, under=[_InFp32(lines, capture.device.type)])
    return all(op.passed is not False for op in ops)


def _rewrites(failed: Sequence[AuditedOp]) -> Iterator[Advice]:
    """What no policy can mend, since the formula or the kernel is wrong."""
    ops = {op.op for op in failed if op.kind in (OVERFLOW, UNDERFLOW)}
    names = {name for op in failed for name, _, _ in op.sources} | ops
    if "exp" in ops or ("log" in ops and "exp" in names):
        yield Advice("subtract the largest number before exp, as torch.logsumexp does", None, NOT_TRIED)
    for op in failed:
        if op.kind == INEXACT and op.op in PRODUCTS:
            yield Advice(f"mend the kernel of {op.op} at {op.place}: it must add up in fp32", None, NOT_TRIED)


def _policies(capture: Capture, failed: Sequence[AuditedOp]) -> Iterator[tuple[str, Policy]]:
    policy = capture.policy
    modules = list(dict.fromkeys(op.module for op in failed if op.module))
    if len(modules) <= _MOST_MODULES:
        for module in modules:
            yield f"keep {module} in fp32", policy.in_fp32([module])
    if len(modules) > 1:
        yield f"keep the {len(modules)} modules that fail in fp32", policy.in_fp32(modules)
    for format in sorted(SIXTEEN_BIT - {policy.compute}):
        yield f"use {format}", Policy(format)
    if policy.compute != "fp32":
        yield "compute in fp32", Policy("fp32")


class _InFp32(TorchFunctionMode):
    """What is called from these lines of the user's code computes in fp32."""

    def __init__(self, lines: frozenset[Line], device_type: str) -> None:
        super().__init__()
        self._lines, self._change = lines, in_fp32(device_type)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_meant = bool(self._lines) and func.__name__ not in ("__get__", "__set__") and user_line() in self._lines
        return self._change(func, args, kwargs or {}) if is_meant else func(*args, **(kwargs or {}))
