"""What the expressions of a source are worth."""

from __future__ import annotations

import ast
import builtins
import math
import operator
import re
from dataclasses import replace
from typing import Any

from halfstep.lint.arithmetic import OPERATORS, compared, folded, operated
from halfstep.lint.names import canonical
from halfstep.lint.state import State
from halfstep.lint.values import (
    MAX_WEIGHT,
    NONE,
    UNKNOWN,
    Choice,
    Class,
    Const,
    Function,
    Instance,
    Items,
    Method,
    Name,
    Object,
    Parameters,
    Table,
    Tensor,
    Unknown,
    Value,
    finfo_bound,
    is_number,
    join,
)

_ATTRIBUTES_OF_SAME = frozenset({"T", "mT", "H", "mH", "real", "data"})


class Expressions(State):
    """Evaluates expressions; calls are in :mod:`halfstep.lint.calls`."""

    def call(self, node: ast.Call) -> Value:
        raise NotImplementedError

    def value(self, node: ast.expr | None) -> Value:
        """What ``node`` is worth. Its events are emitted on the way."""
        if node is None:
            return NONE
        self.spend()
        method = getattr(self, _METHODS.get(type(node), ""), None)
        if method is not None:
            result: Value = method(node)
            return UNKNOWN if isinstance(result, Items | Table) and result.weight > MAX_WEIGHT else result
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
        return UNKNOWN

    # -- names --

    def _Constant(self, node: ast.Constant) -> Value:
        return Const(node.value)

    def _Name(self, node: ast.Name) -> Value:
        known = self.lookup(node.id)
        if known is not None:
            return known
        qualified = self.names.qualified(node)
        if qualified is not None:
            return self._library(qualified)
        return Name(f"builtins.{node.id}") if hasattr(builtins, node.id) else Unknown(node.id)

    def _Attribute(self, node: ast.Attribute) -> Value:
        return self.attribute(self.value(node.value), node.attr, node)

    @staticmethod
    def _library(qualified: str) -> Value:
        if qualified in {"torch.inf", "numpy.inf"}:
            return Const(math.inf)
        constant = getattr(math, qualified[5:], None) if qualified.startswith("math.") else None
        return Const(constant) if isinstance(constant, float) else Name(qualified)

    def attribute(self, base: Value, name: str, node: ast.AST) -> Value:
        """``base.name``."""
        if isinstance(base, Name):
            return self._library(canonical(f"{base.qualified}.{name}"))
        if isinstance(base, Instance):
            return self._instance_attribute(base, name)
        if isinstance(base, Object):
            known = self.heap.get((base.ident, name))
            if known is not None:
                return known
            if base.kind == "device" and name == "type":
                return base.argument("type", 0) or UNKNOWN
            if base.kind == "accelerator" and name == "scaler":
                return Object("scaler", "accelerate.scaler", base.ident, base.node)
            if base.kind == "scaler":
                self.emit("read", node, name, base)
            return base if name == "module" and base.kind == "module" else Method(base, name)
        if isinstance(base, Tensor):
            if name == "grad":
                return Tensor(base.formats, frozenset({"gradient"}), of=base.of, node=node)
            if name == "loss" and "forward" in base.tags:
                return replace(base.tagged("loss"), formats=frozenset(), node=node)
            if name in _ATTRIBUTES_OF_SAME:
                return base.tagged("detached") if name == "data" and "gradient" not in base.tags else base
            if name == "dtype":
                names = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
                known_formats = [names[f] for f in sorted(base.formats) if f in names]
                if known_formats and len(known_formats) == len(base.formats):
                    found = frozenset(Name(f"torch.{f}") for f in known_formats)
                    return next(iter(found)) if len(found) == 1 else Choice(frozenset(found))
                return Unknown("dtype")
            if name in {"device", "requires_grad", "is_cuda"}:
                return Unknown(name)
        if name == "shape" and isinstance(base, Tensor | Unknown | Method):
            return Items((Unknown(is_number=True),), repeats=True)
        if name == "ndim" and isinstance(base, Tensor):
            return Unknown(name, is_number=True)
        if isinstance(base, Class):
            return self._class_attribute(base.node, name, None) or Unknown(name)
        if isinstance(base, Unknown):
            if name == "grad":
                return Tensor(tags=frozenset({"gradient"}), node=node)
            return Method(base, name)
        return Method(base, name)

    def _instance_attribute(self, base: Instance, name: str) -> Value:
        known = self.heap.get((base.ident, name))
        if known is not None:
            return known
        found = self._class_attribute(base.node, name, base)
        if found is not None:
            if not isinstance(found, Function):
                self.heap[(base.ident, name)] = found
            return found
        return Method(base, name)

    def _class_attribute(self, cls: ast.ClassDef, name: str, owner: Instance | None) -> Value | None:
        """A method, a class-level value, or what another method assigns to ``self.name``."""
        for ancestor in self.mro(cls):
            statement = self.relevance.members(ancestor).get(name)
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                function = Function(statement, owner)
                words = {getattr(d, "id", getattr(d, "attr", "")) for d in statement.decorator_list}
                if words & {"property", "cached_property"} and owner is not None:
                    return self.call_function(function, (), (), statement)
                return Function(statement, None) if "staticmethod" in words else function
            if isinstance(statement, ast.Assign):
                return self.value(statement.value)
            if isinstance(statement, ast.AnnAssign):
                # A field that its caller sets; its default is what a call without it takes.
                default = self.value(statement.value) if statement.value is not None else UNKNOWN
                return Unknown(name) if isinstance(default, Const) else default
        return self._assigned_elsewhere(cls, name, owner)

    def _assigned_elsewhere(self, cls: ast.ClassDef, name: str, owner: Instance | None) -> Value | None:
        if owner is None or (owner.ident, "?" + name) in self.heap:
            return None
        self.heap[(owner.ident, "?" + name)] = NONE  # looked for once
        for ancestor in self.mro(cls):
            for value in self.relevance.self_assignments(ancestor).get(name, ()):
                if isinstance(value, ast.Call) and self.names.qualified(value.func) is not None:
                    self.quiet += 1
                    try:
                        found = self.value(value)
                    finally:
                        self.quiet -= 1
                    if isinstance(found, Object):
                        return found
        return None

    def mro(self, cls: ast.ClassDef) -> list[ast.ClassDef]:
        """The class and its ancestors in this source, nearest first."""
        order: list[ast.ClassDef] = []
        pending = [cls]
        while pending:
            cls = pending.pop(0)
            if cls in order:
                continue
            order.append(cls)
            for base in cls.bases:
                found = self.frames[0].values.get(base.id) if isinstance(base, ast.Name) else None
                if isinstance(found, Class):
                    pending.append(found.node)
        return order

    def call_function(
        self,
        function: Function,
        args: tuple[Value, ...],
        keywords: tuple[tuple[str, Value], ...],
        node: ast.AST,
    ) -> Value:
        raise NotImplementedError

    # -- containers --

    def _Tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Value:
        items: list[Value] = []
        repeats = False
        for element in node.elts:
            value = self.value(element)
            if isinstance(element, ast.Starred):
                if isinstance(value, Items):
                    items.extend(value.items)
                    repeats |= value.repeats
                elif isinstance(value, Parameters):
                    items.append(value)
                else:
                    items.append(UNKNOWN)
                    repeats = True
            else:
                items.append(value)
        return Items(tuple(items), repeats)

    _List = _Tuple
    _Set = _Tuple

    def _Starred(self, node: ast.Starred) -> Value:
        return self.value(node.value)

    def _Dict(self, node: ast.Dict) -> Value:
        pairs: list[tuple[Any, Value]] = []
        partial = False
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.value(item)
            known = self.value(key) if key is not None else None
            if isinstance(known, Const):
                pairs.append((known.value, value))
            elif key is None and isinstance(value, Table):
                pairs.extend(value.pairs)
                partial |= value.partial
            else:
                pairs.append((None, value))
                partial = True
        return Table(tuple(pairs), partial)

    def _Subscript(self, node: ast.Subscript) -> Value:
        base, index = self.value(node.value), self.value(node.slice)
        if isinstance(base, Items) and isinstance(index, Const) and isinstance(index.value, int):
            if base.repeats:
                return base if isinstance(node.slice, ast.Slice) else element_of(base)
            if -len(base.items) <= index.value < len(base.items):
                return base.items[index.value]
            return UNKNOWN
        if isinstance(base, Table):
            if isinstance(index, Const):
                return base.get(index.value) or UNKNOWN
            found = [value for _, value in base.pairs]
            if found and (not base.partial or all(key is None for key, _ in base.pairs)):
                result = found[0]
                for value in found[1:]:
                    result = join(result, value)
                several = isinstance(result, Object) and result.kind in {"optimizer", "scaler"} and len(set(found)) > 1
                return UNKNOWN if several else result
            return UNKNOWN
        if isinstance(base, Object):
            if base.kind in {"checkpoint", "checkpoint entry"}:
                return Object("checkpoint entry", "", base.ident, node, (*base.args, index))
            if base.kind == "module":
                children = base.args[0].items if base.args and isinstance(base.args[0], Items) else base.args
                if (
                    isinstance(index, Const)
                    and isinstance(index.value, int)
                    and -len(children) <= index.value < len(children)
                ):
                    return children[index.value]
                return Object("module", "", (*base.ident, node.lineno, node.col_offset), node)
        return base if isinstance(base, Tensor) else UNKNOWN

    def _ListComp(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Value:
        self._comprehend(node.generators)
        element = self.value(node.elt)
        if isinstance(element, Tensor) and "parameter" in element.tags:
            text = " ".join(ast.unparse(test) for generator in node.generators for test in generator.ifs)
            return Parameters(element.of, _chosen(text))
        return Items((element,), repeats=True)

    _GeneratorExp = _ListComp
    _SetComp = _ListComp

    def _DictComp(self, node: ast.DictComp) -> Value:
        self._comprehend(node.generators)
        self.value(node.key)
        return Table(((None, self.value(node.value)),), partial=True)

    def _comprehend(self, generators: list[ast.comprehension]) -> None:
        for generator in generators:
            self.assign(generator.target, self.element(self.value(generator.iter)), generator.target)
            for test in generator.ifs:
                self.value(test)

    def element(self, iterable: Value) -> Value:
        """What iterating gives; a parameter has the format of its module's weights."""
        element = element_of(iterable)
        if isinstance(iterable, Parameters) and isinstance(element, Tensor):
            known = [self.formats.get(ident, frozenset()) for ident in iterable.of]
            if known and all(known):
                return element.in_formats(frozenset().union(*known))
        return element

    def assign(self, target: ast.expr, value: Value, node: ast.AST) -> None:
        raise NotImplementedError

    # -- operators --

    def _BinOp(self, node: ast.BinOp) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        return self.operate(node, node.op, left, right)

    def operate(self, node: ast.AST, op: ast.operator, left: Value, right: Value) -> Value:
        """``left op right``."""
        name, function = OPERATORS.get(type(op), ("other", operator.add))
        if isinstance(left, Const) and isinstance(right, Const):
            return folded(name, function, left.value, right.value)
        if isinstance(left, Items) and isinstance(right, Items) and name == "add":
            return Items(left.items + right.items, left.repeats or right.repeats)
        if isinstance(left, Table) and isinstance(right, Table) and name == "or":
            return Table(left.pairs + right.pairs, left.partial or right.partial)
        if isinstance(left, Parameters) and isinstance(right, Parameters) and name == "add":
            return Parameters(left.of | right.of)
        result = operated(name, left, right, node, self.region())
        self.emit("operator", node, name, left, (left, right), result=result)
        return result

    def region(self) -> Object | None:
        """The innermost autocast region around here."""
        return next((context for context in reversed(self.contexts) if context.kind == "region"), None)

    def _UnaryOp(self, node: ast.UnaryOp) -> Value:
        operand = self.value(node.operand)
        if isinstance(operand, Const):
            try:
                if isinstance(node.op, ast.USub):
                    return Const(-operand.value)
                if isinstance(node.op, ast.Not):
                    return Const(not operand.value)
            except TypeError:
                return UNKNOWN
        bound = finfo_bound(operand)
        if bound is not None and bound[1] in _NEGATED and isinstance(node.op, ast.USub):
            return Method(bound[0], _NEGATED[bound[1]])
        passes = isinstance(operand, Tensor) or is_number(operand)
        return operand if passes and not isinstance(node.op, ast.Not) else UNKNOWN

    def _Compare(self, node: ast.Compare) -> Value:
        values = [self.value(node.left), *(self.value(part) for part in node.comparators)]
        names = ".".join(type(op).__name__ for op in node.ops)
        if len(values) == 2:
            known = compared(names, *values)
            if known is not None:
                return Const(known)
        self.emit("compare", node, names, values[0], tuple(values))
        tensors = [value for value in values if isinstance(value, Tensor)]
        return Tensor(frozenset({"bool"}), frozenset({"mask"}), node=node) if tensors else UNKNOWN

    def _IfExp(self, node: ast.IfExp) -> Value:
        truth = self.truth(self.value(node.test))
        if truth is not None:
            return self.value(node.body if truth else node.orelse)
        return join(self.value(node.body), self.value(node.orelse))

    def truth(self, value: Value) -> bool | None:
        """Whether a condition holds, None when that is not known."""
        if isinstance(value, Const):
            return bool(value.value)
        if isinstance(value, Object | Instance | Function | Class):
            return True
        return None

    def _BoolOp(self, node: ast.BoolOp) -> Value:
        values = [self.value(part) for part in node.values]
        stops = isinstance(node.op, ast.Or)
        if any(self.truth(value) is stops for value in values):
            return next(value for value in values if self.truth(value) is stops)
        if all(self.truth(value) is not None for value in values):
            return values[-1]
        return UNKNOWN

    def _NamedExpr(self, node: ast.NamedExpr) -> Value:
        value = self.value(node.value)
        self.assign(node.target, value, node)
        return value

    def _Lambda(self, node: ast.Lambda) -> Value:
        return Function(node, None, self.frame)

    def _JoinedStr(self, node: ast.JoinedStr) -> Value:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                value = self.value(part.value)
                if isinstance(value, Tensor) and "number" not in value.tags:
                    self.emit("item", part, "format", value)
        return UNKNOWN

    def _Await(self, node: ast.Await) -> Value:
        return self.value(node.value)

    def _Call(self, node: ast.Call) -> Value:
        return self.call(node)


_METHODS = {
    kind: f"_{kind.__name__}" for kind in vars(ast).values() if isinstance(kind, type) and issubclass(kind, ast.expr)
}
_NEGATED = {"min": "max", "max": "min"}


def _chosen(text: str) -> str:
    """Which parameters a condition of a comprehension keeps."""
    if "requires_grad" not in text:
        return ""
    return "frozen" if re.search(r"not \w+\.requires_grad|requires_grad (is|==) False", text) else "trainable"


def element_of(iterable: Value) -> Value:
    """What iterating gives, the same for every turn."""
    if isinstance(iterable, Items):
        if not iterable.items:
            return UNKNOWN
        result = iterable.items[0]
        for item in iterable.items[1:]:
            result = join(result, item)
        return result
    if isinstance(iterable, Parameters):
        return Tensor(frozenset(), frozenset({"parameter", *({"frozen"} & {iterable.only})}), of=iterable.of)
    if isinstance(iterable, Tensor):
        return iterable.tagged("element")
    if isinstance(iterable, Object) and iterable.kind == "module":
        return Object("module", "", (*iterable.ident, -1), iterable.node)
    return UNKNOWN
