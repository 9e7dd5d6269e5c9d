"""What operators and comparisons make of values."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from halfstep.lint.formats import answer, devices_among, imposed, widest
from halfstep.lint.values import (
    NONE,
    UNKNOWN,
    Choice,
    Const,
    Items,
    Method,
    Name,
    Object,
    Scale,
    Tensor,
    Unknown,
    Value,
    is_lowest,
    is_number,
)

OPERATORS: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("add", operator.add),
    ast.Sub: ("sub", operator.sub),
    ast.Mult: ("mul", operator.mul),
    ast.Div: ("div", operator.truediv),
    ast.FloorDiv: ("floor_divide", operator.floordiv),
    ast.Mod: ("remainder", operator.mod),
    ast.Pow: ("pow", operator.pow),
    ast.MatMult: ("matmul", operator.matmul),
    ast.BitOr: ("or", operator.or_),
    ast.BitAnd: ("and", operator.and_),
}
_PASSED_ON = frozenset(
    "forward divided scaled gradient loss detached assumed rebuilt number weighted log_probability".split()
)
"""What a result inherits from the tensors it was computed from."""

_FOLDED = {"add", "sub", "mul", "div", "floor_divide", "remainder", "pow"}
_COMPARED: dict[str, Callable[[Const, Any], bool]] = {
    "Eq": lambda left, right: bool(left.value == right.value),
    "NotEq": lambda left, right: bool(left.value != right.value),
    "Lt": lambda left, right: bool(left.value < right.value),
    "Gt": lambda left, right: bool(left.value > right.value),
    "LtE": lambda left, right: bool(left.value <= right.value),
    "GtE": lambda left, right: bool(left.value >= right.value),
    "In": lambda left, right: _contains(right, left),
    "NotIn": lambda left, right: not _contains(right, left),
}


def operated(name: str, left: Value, right: Value, node: ast.AST, region: Object | None) -> Value:
    """What ``left name right`` gives inside ``region``."""
    if name == "div" and isinstance(left, Const) and isinstance(right, Scale):
        return replace(right, inverse=not right.inverse)
    if not isinstance(left, Tensor) and not isinstance(right, Tensor):
        formats = answer(name, (left, right), region) if region is not None and name == "matmul" else frozenset()
        if is_number(left) and is_number(right):
            return Unknown(is_number=True)
        low = name == "mul" and (is_lowest(left) or is_lowest(right))  # a mask, from wherever it comes
        return Tensor(formats, frozenset({"lowest"} if low else ()), node=node) if formats or low else UNKNOWN
    tensors = [value for value in (left, right) if isinstance(value, Tensor)]
    tags = frozenset(tag for tensor in tensors for tag in tensor.tags & _PASSED_ON)
    if imposed(name, region):
        tags -= {"assumed"}
    tags |= _of_values(name, left, right)
    if not all("number" in tensor.tags for tensor in tensors):
        tags -= {"number"}
    if name in {"add", "sub"} and not all(tensor.tags & {"divided", "weighted"} for tensor in tensors):
        tags -= {"divided", "weighted"}  # a term of a loss that is divided does not divide the loss
    tags -= with_a_graph(tensors)
    other = right if isinstance(left, Tensor) else left
    scaled = next((tensor for tensor in tensors if "scaled" in tensor.tags), None)
    if name in {"add", "sub", "floor_divide"} or (name == "mul" and not is_small(left) and not is_small(right)):
        tags |= frozenset(tag for tensor in tensors for tag in tensor.tags & {"grid", "long grid"})
    if unscales(name, right) or unscales(name, left):
        tags -= {"scaled"}
    elif name == "div" and isinstance(left, Tensor):
        tags |= {"divided"}
    elif name == "mul" and not isinstance(other, Tensor):
        tags |= {"divided"} if is_small(other) else set() if isinstance(other, Const) else {"weighted"}
    scaler, updates = (scaled.scaler, scaled.updates) if scaled is not None and "scaled" in tags else (None, 0)
    of = frozenset(ident for tensor in tensors for ident in tensor.of)
    return Tensor(_promoted(name, left, right, region), tags, scaler, updates, of, node, devices_among((left, right)))


def _promoted(name: str, left: Value, right: Value, region: Object | None) -> frozenset[str]:
    if name == "div" and is_number(left):
        return answer("reciprocal", (right,), region)  # what torch makes of 1 / x
    if name in {"matmul", "pow"}:
        return answer(name, (left, right), region)
    formats = widest((left, right))
    return frozenset({"fp32"}) if name == "div" and formats and formats <= {"int", "bool"} else formats


def compared(names: str, left: Value, right: Value) -> bool | None:
    """Whether ``left names right`` holds (``names`` as ast calls the operator: Is, Lt ...), None when that is open."""
    if names in {"Is", "IsNot"} and right == NONE:
        if isinstance(left, Tensor) and "gradient" in left.tags:
            return names == "IsNot"  # one that exists: the other branch does nothing to it
        return None if isinstance(left, Unknown | Choice | Method) else (left == NONE) == (names == "Is")
    if isinstance(left, Const) and isinstance(right, Const | Items) and names in _COMPARED:
        try:
            return _COMPARED[names](left, right)
        except (TypeError, AttributeError):
            return None
    if isinstance(left, Name) and isinstance(right, Name) and names in {"Is", "Eq", "IsNot", "NotEq"}:
        return (left == right) == (names in {"Is", "Eq"})
    return None


def _of_values(operation: str, left: Value, right: Value) -> frozenset[str]:
    """The tags that tell of the values of ``left operation right``."""
    tags = [value.tags for value in (left, right) if isinstance(value, Tensor)]
    found = set()
    if operation == "sub" and isinstance(left, Const) and "probability" in tags[0]:
        found.add("probability")  # 1 - p
    if operation in {"mul", "pow"} and all(tag & {"probability", "bounded"} for tag in tags):
        found.add("bounded")
    if (operation == "mul" and (is_lowest(left) or is_lowest(right))) or (
        operation == "add" and any("lowest" in tag for tag in tags)
    ):
        found.add("lowest")
    return frozenset(found)


def is_small(value: Value) -> bool:
    """Whether it is a number that makes a product smaller, as the inverse of a count does."""
    return isinstance(value, Const) and isinstance(value.value, int | float) and abs(value.value) < 1


def folded(name: str, function: Callable[[Any, Any], Any], left: Any, right: Any) -> Value:
    """An operation on constants, computed where that is sure to be small."""
    if name == "add" and isinstance(left, str) and isinstance(right, str) and len(left) + len(right) <= 1000:
        return Const(left + right)
    if name not in _FOLDED or not (_is_plain(left) and _is_plain(right)) or (name == "pow" and abs(right) > 64):
        return UNKNOWN
    try:
        return Const(function(left, right))
    except (ValueError, ArithmeticError):
        return UNKNOWN


def _is_plain(value: object) -> bool:
    """Whether it is a number of a size that computing with it cannot make large."""
    return isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= 256)


def _contains(container: Const | Items, element: Const) -> bool:
    return element in container.items if isinstance(container, Items) else element.value in container.value


def unscales(operation: str, operand: Value) -> bool:
    """Whether a division by ``operand``, or a product with it, takes the loss scale out."""
    if not isinstance(operand, Scale):
        return False
    return operation == ("mul" if operand.inverse else "div")


def with_a_graph(tensors: list[Tensor]) -> frozenset[str]:
    """The tags that a result loses because one of its operands may have a graph."""
    without = {"detached", "rebuilt", "literal", "number"}
    return frozenset() if all(tensor.tags & without for tensor in tensors) else frozenset({"detached", "rebuilt"})
