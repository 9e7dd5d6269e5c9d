"""What may have to compute in fp32: modules, and operations outside of any; the order to try them in; their rules.

A suspect is the qualified name of a module whose own operations meet 16 bit, or ``op:NAME`` for an operation of the
model's outermost forward or of the loss function, which no module rule reaches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from halfstep.errors import HalfstepError
from halfstep.explain.audited import AuditedOp
from halfstep.explain.module_range import UPDATE, ModuleRange
from halfstep.formats import SIXTEEN_BIT
from halfstep.oplist import check_rules
from halfstep.policy import Policy, pattern_of
from halfstep.record import Operation, Record

OP = "op:"


def suspects_of(record: Record) -> list[str]:
    """The suspects among what ran, in the order in which they first did; operations outside of modules come last."""
    names = {name: None for operation in record.operations for name in _suspects(operation)}
    return sorted(names, key=lambda name: name.startswith(OP))


def errors_of(rows: Iterable[AuditedOp]) -> dict[str, float]:
    """By module, or ``op:NAME`` outside of any: the largest error that failed an audit, in multiples of its limit."""
    return largest((row.module or OP + row.op, row.excess) for row in rows if row.passed is False)


def ends_of(rows: Iterable[ModuleRange]) -> dict[str, float]:
    """By module: how close values that meet 16 bit come to the ends of their format.

    2^-headroom, so 1 at the largest number and more beyond it, or the share that becomes zero.
    """
    pairs = []
    for row in rows:
        if row.meets and row.kind != UPDATE:
            headroom = row.loss.headroom_bits
            flushed = row.histogram.share(row.loss.flushed) / 100
            pairs.append((row.module, max(flushed, 0.0 if headroom is None else 2.0**-headroom)))
    return largest(pairs)


def zeros_of(record: Record) -> dict[str, float]:
    """By suspect: the largest share of its values, 0 to 1, that one of its operations made zero of non-zero ones.

    Only where subnormal values or nothing but zeros came out: a mask, or a ReLU, makes zeros as well.
    """
    return largest(
        (name, _zeros_made(operation))
        for operation in record.operations
        for name in ([operation.site.module] if operation.site.module else map(OP.__add__, rule_names(operation)))
    )


def in_order(
    suspects: Sequence[str], makers: Sequence[str], errors: Mapping[str, float], ends: Mapping[str, float]
) -> list[str]:
    """``suspects``, the likeliest first: the makers of non-finite values, then what failed its audit, the largest error
    first, then what comes closest to the ends of its format, then what runs first.
    """
    return sorted(
        suspects,
        key=lambda name: (
            makers.index(name) if name in makers else len(makers),
            -errors.get(name, 0.0),
            -ends.get(name, 0.0),
        ),
    )


def makers_of_nonfinite(record: Record) -> list[str]:
    """The suspects that made a non-finite value of finite ones, in order of execution."""
    return list(dict.fromkeys(name for o in record.operations if _makes_nonfinite(o) for name in _suspects(o)))


def with_fp32(policy: Policy, modules: Sequence[str], chosen: Iterable[str], suspects: Iterable[str]) -> Policy:
    """``policy`` with ``chosen`` in fp32 and everything else as it was; ``modules``: all names of the model, in order.

    A rule covers all inside a module, so that suspects inside a chosen container get a rule of their own.
    """
    chosen = list(chosen)
    others = [name for name in suspects if name not in chosen]
    tuned = replace(policy, ops=(*policy.ops, *((name[len(OP) :], "fp32") for name in chosen if name.startswith(OP))))
    for name in filter(None, modules):
        wanted = "fp32" if name in chosen else policy.format_of(name)
        matters = name in chosen or any(_is_in(other, name) for other in others)
        if matters and tuned.format_of(name) != wanted:
            tuned = tuned.with_module(pattern_of(name), wanted)
    return tuned


def producer_of(record: Record) -> Operation | None:
    """The first operation that made a non-finite value of finite ones."""
    return next((operation for operation in record.operations if _makes_nonfinite(operation)), None)


def is_low(operation: Operation) -> bool:
    """Whether an operation computes in 16 bit, or takes or gives it."""
    formats = {values.format for values in (*operation.inputs, *operation.outputs)}
    return not operation.is_cast and bool(formats & SIXTEEN_BIT)


@functools.cache
def _is_rule(name: str) -> bool:
    try:
        check_rules(((name, "fp32"),))
    except HalfstepError:
        return False
    return True


_ALIASES = {"truediv": "div", "cross_entropy": "cross_entropy_loss"}


def rule_names(operation: Operation) -> tuple[str, ...]:
    """The names of op rules that may reach an operation: of what the user called, and of the aten operation."""
    called = operation.site.function or operation.op
    names = (_ALIASES.get(called, called), operation.op)
    return tuple(name for name in dict.fromkeys(names) if _is_rule(name))


def work_of(operation: Operation) -> int:
    """Multiply-adds of a product or convolution, of any other operation the number of values in its largest tensor."""
    shapes = [values.shape for values in operation.inputs]
    num_given = max((values.size for values in operation.outputs), default=0)
    at = {"mm": 0, "bmm": 0, "mv": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}.get(operation.op)
    if at is not None and len(shapes) > at:
        return num_given * shapes[at][-1]
    if operation.op == "convolution" and len(shapes) > 1:
        return num_given * math.prod(shapes[1][1:])
    if operation.op.startswith("_scaled_dot_product") and len(shapes) > 1:
        return num_given * shapes[1][-2] * 2
    return max([num_given, *(values.size for values in operation.inputs)])


def share_in_fp32(record: Record, chosen: Iterable[str]) -> float:
    """The share, 0 to 1, of the 16-bit work of a forward pass that ``chosen`` take to fp32."""
    names = set(chosen)
    forward = [operation for operation in record.operations if operation.site.phase == "forward" and is_low(operation)]
    total = sum(map(work_of, forward))
    taken = sum(work_of(o) for o in forward if o.site.module in names or names & {OP + n for n in rule_names(o)})
    return taken / total if total else 0.0


def blamed_in(record: Record, module: str, audit: Iterable[AuditedOp] = ()) -> list[str]:
    """``op:NAME`` for the 16-bit operations that ``module`` itself runs and that made a non-finite value of finite
    ones, or failed their audit, in this order.
    """
    failed = {row.op for row in audit if row.module == module and row.passed is False}
    own = [operation for operation in record.operations if operation.site.module == module and is_low(operation)]
    made = [operation for operation in own if _makes_nonfinite(operation)]
    blamed = (*made, *(operation for operation in own if operation.op in failed))
    return list(dict.fromkeys(OP + name for operation in blamed for name in rule_names(operation)))


def largest(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The largest value of each name."""
    found: dict[str, float] = {}
    for name, value in pairs:
        found[name] = max(found.get(name, 0.0), value)
    return found


def _suspects(operation: Operation) -> tuple[str, ...]:
    if not is_low(operation):
        return ()
    return (operation.site.module,) if operation.site.module else tuple(OP + name for name in rule_names(operation))


def _makes_nonfinite(operation: Operation) -> bool:
    came_in = any(values.kind for values in operation.inputs)
    return not came_in and not operation.fills_inf and any(values.kind for values in operation.outputs)


def _zeros_made(operation: Operation) -> float:
    """The share of its values that an operation made zero, where they look rounded; 0 if no input has their shape."""
    peers = [values for values in operation.inputs if values.shape == operation.outputs[0].shape]
    given = operation.outputs[0]
    if not peers or not given.size or given.format not in SIXTEEN_BIT:
        return 0.0
    is_rounded = given.num_subnormal > 0 or given.num_zeros == given.size
    return max(0, given.num_zeros - max(values.num_zeros for values in peers)) / given.size if is_rounded else 0.0


def _is_in(module: str, container: str) -> bool:
    return module == container or module.startswith(f"{container}.")
