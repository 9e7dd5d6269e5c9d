"""One operation on tensors, however it is spelled: ``x.clamp(min=eps)``, ``torch.clamp(x, eps)``, ``x.clamp_(eps)``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from halfstep.lint.event import Event
from halfstep.lint.finding import Edit
from halfstep.lint.script import Script
from halfstep.lint.values import Items, Tensor, Value


@dataclass(frozen=True)
class Operation:
    """name: without its module, and without the underscore of an operation in place: ``add`` for ``+`` and ``x.add_``.

    operands: the tensor it is called on, then the positional arguments. nodes: their expressions, empty where a
    ``*args`` hides which is which. is_call: it is a function of torch, so that the first operand need not be a tensor.
    """

    name: str
    event: Event
    operands: tuple[Value, ...]
    nodes: tuple[ast.expr, ...] = field(repr=False)
    is_call: bool = False

    @property
    def node(self) -> ast.AST:
        return self.event.node

    @property
    def is_in_place(self) -> bool:
        return self.event.name.endswith("_") or isinstance(self.node, ast.AugAssign)

    def tensor(self, position: int = 0) -> Tensor | None:
        """The operand at ``position`` if it is a tensor, and not a number read from one."""
        operand = self.operands[position] if position < len(self.operands) else None
        return operand if isinstance(operand, Tensor) and "number" not in operand.tags else None

    def argument(self, name: str, position: int) -> Value | None:
        """The argument passed by name, or as the operand at ``position``; None when it was left out."""
        for keyword, value in self.event.keywords:
            if keyword == name:
                return value
        return self.operands[position] if position < len(self.operands) else None

    def argument_node(self, name: str, position: int) -> ast.expr | None:
        """The expression of :meth:`argument`; None where it cannot be told."""
        for keyword in getattr(self.node, "keywords", ()):
            if keyword.arg == name:
                value: ast.expr = keyword.value
                return value
        return self.nodes[position] if position < len(self.nodes) else None


def operations(script: Script, names: frozenset[str]) -> Iterator[Operation]:
    """Every operation of ``script`` with one of ``names``, once for each kind of operands that it meets."""
    for event in script.sites:
        operation = _operation(event, names)
        if operation is not None:
            yield operation


def _operation(event: Event, names: frozenset[str]) -> Operation | None:
    node = event.node
    if event.what == "operator" and event.name in names:
        nodes: tuple[ast.expr, ...] = ()
        if isinstance(node, ast.BinOp):
            nodes = (node.left, node.right)
        elif isinstance(node, ast.AugAssign):
            nodes = (node.target, node.value)
        return Operation(event.name, event, event.args, nodes)
    if event.what == "call" and event.name.startswith("torch."):
        name = event.name.rpartition(".")[2].removesuffix("_")
        if name in names:
            return Operation(name, event, _flat(event.args), _arguments(node), True)
    elif event.what.startswith("tensor.") and event.receiver is not None:
        name = event.name.removesuffix("_")
        if name in names:
            nodes = ()
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                nodes = (node.func.value, *_arguments(node))
            return Operation(name, event, (event.receiver, *event.args), nodes)
    return None


def _flat(args: tuple[Value, ...]) -> tuple[Value, ...]:
    """``torch.cat([a, b])`` works on ``a``."""
    if args and isinstance(args[0], Items) and args[0].items and isinstance(args[0].items[0], Tensor):
        return (args[0].items[0], *args[1:])
    return args


def _arguments(node: ast.AST) -> tuple[ast.expr, ...]:
    args = node.args if isinstance(node, ast.Call) else []
    return () if any(isinstance(arg, ast.Starred) for arg in args) else tuple(args)


def in_float(script: Script, node: ast.expr) -> Edit:
    """The edit that takes an expression to float32: ``x`` becomes ``x.float()``."""
    return Edit("replace", script.span(node), f"{as_operand(script, node)}.float()")


def as_operand(script: Script, node: ast.expr) -> str:
    """The text of an expression, in parentheses where it needs them beside an operator or a dot."""
    text = script.source(node)
    return text if isinstance(node, _TIGHT) else f"({text})"


_TIGHT = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)


def is_plain(node: ast.AST) -> bool:
    """Whether an expression can be written twice: names and attributes alone."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)
