"""One run through statements: which branch, how often a loop, what a name holds afterwards."""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from halfstep.lint.conditions import Break, Conditions, Continue, Left, Raise, Return
from halfstep.lint.event import Loop
from halfstep.lint.expressions import element_of
from halfstep.lint.names import last_name
from halfstep.lint.values import (
    NONE,
    UNKNOWN,
    Class,
    Const,
    Function,
    Instance,
    Items,
    Method,
    Name,
    Object,
    Table,
    Tensor,
    Unknown,
    Value,
    join,
)


class Run(Conditions):
    """Runs statements in order."""

    def run_body(self, body: list[ast.stmt]) -> Value:
        outer, self.returned = self.returned, []
        try:
            with suppress(Return, Break, Continue):
                self.block(body)
        finally:
            returned, self.returned = self.returned, outer
        if not returned:
            return NONE
        result = returned[0]
        for value in returned[1:]:
            result = join(result, value)
        return result

    def module(self, body: list[ast.stmt]) -> None:
        """Run the module's own code, as a script would."""
        with suppress(Left):
            self.block(body)

    def definitions(self, body: list[ast.stmt]) -> None:
        """Run what the module's own code defines, without keeping an event: the globals of its functions."""
        self.quiet += 1
        for statement in body:
            runs = isinstance(statement, ast.For | ast.While) or (
                isinstance(statement, ast.Expr) and self.relevance.matters(statement)
            )
            if not runs:
                with suppress(Left):
                    self.block([statement])
        self.quiet -= 1

    def function(self, definition: ast.FunctionDef | ast.AsyncFunctionDef, cls: ast.ClassDef | None) -> None:
        """Run a function that nothing in the source calls; a method after its class's ``__init__``."""
        owner = None
        with suppress(Left):
            if cls is not None:
                made = self.instantiate(cls, (), (), cls)
                is_static = any(getattr(d, "id", "") == "staticmethod" for d in definition.decorator_list)
                owner = None if is_static else made
                if definition.name == "__init__":
                    return
            self.call_function(Function(definition, owner), (), (), definition)

    def block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        self.spend()
        method = getattr(self, "_do_" + type(node).__name__, None)
        if method is not None:
            method(node)
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)

    # -- definitions and names --

    def _do_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.bind(node.name, Function(node, None, self.frame))

    _do_AsyncFunctionDef = _do_FunctionDef

    def _do_ClassDef(self, node: ast.ClassDef) -> None:
        self.bind(node.name, Class(node))

    def _do_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        """Imports are known to ``names``."""

    _do_ImportFrom = _do_Import
    _do_Global = _do_Import
    _do_Nonlocal = _do_Import
    _do_Pass = _do_Import

    def _do_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Yield | ast.YieldFrom):
            if node.value.value is not None:
                self.value(node.value.value)
            self.note_yield()
            return
        self.value(node.value)

    def _do_Assign(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self.assign(target, value, node)

    def _do_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.value(node.value), node)

    def _do_AugAssign(self, node: ast.AugAssign) -> None:
        load = ast.copy_location(_loaded(node.target), node.target)
        left, right = self.value(load), self.value(node.value)
        if isinstance(left, Const) and isinstance(left.value, int | float) and self._counts(node.target):
            left = Unknown(last_name(node.target))  # the second turn of a loop is not its last
        self.assign(node.target, self.operate(node, node.op, left, right), node)

    def _counts(self, target: ast.expr) -> bool:
        """Whether what ``target`` holds grows from turn to turn or from call to call."""
        return bool(self.loops) or isinstance(target, ast.Attribute)

    def _do_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.bind(target.id, UNKNOWN)

    def assign(self, target: ast.expr, value: Value, node: ast.AST) -> None:
        """``target = value``."""
        if isinstance(value, Unknown) and isinstance(node, ast.Assign) and self._is_optimizer(target, node.value):
            value = Object("optimizer", "", self.ident(target), target)
            self.emit("make", target, "", result=value)
        if isinstance(target, ast.Name):
            if isinstance(value, Unknown) and not value.name:
                value = replace(value, name=target.id)
            self.bind(target.id, value)
        elif isinstance(target, ast.Tuple | ast.List):
            self._unpack(target.elts, value, node)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, Items((value,), True), node)
        elif isinstance(target, ast.Attribute):
            self._assign_attribute(target, value, node)
        elif isinstance(target, ast.Subscript):
            self._assign_item(target, value, node)

    def _is_optimizer(self, target: ast.expr, value: ast.expr) -> bool:
        """Whether ``scaler.step(target)`` tells what another file made, or passed to a constructor."""
        if last_name(target) not in self.relevance.stepped:
            return False
        function = self.functions[-1] if self.functions else None
        is_passed = isinstance(target, ast.Attribute) and getattr(function, "name", "") == "__init__"
        return is_passed or _makes(value)

    def _unpack(self, targets: list[ast.expr], value: Value, node: ast.AST) -> None:
        starred = any(isinstance(target, ast.Starred) for target in targets)
        if isinstance(value, Items) and not value.repeats and len(value.items) == len(targets) and not starred:
            for target, item in zip(targets, value.items, strict=True):
                self.assign(target, item, node)
            return
        part: Value = element_of(value) if isinstance(value, Items) else UNKNOWN
        if isinstance(value, Tensor):
            part = value
        if isinstance(value, Object) and value.kind == "lightning optimizer":
            part = value
        for target in targets:
            self.assign(target, part, node)

    def _assign_attribute(self, target: ast.Attribute, value: Value, node: ast.AST) -> None:
        base = self.value(target.value)
        self.forget(target.attr)
        if target.attr == "grad":
            if value == NONE:
                self.emit("optimizer.zero_grad", node, "grad = None", base)
            else:
                self.emit("gradient.write", node, "grad =", base, (value,))
        elif target.attr == "data" and isinstance(base, Tensor | Unknown):
            self.emit("data", node, "data", base, (value,))
        elif isinstance(base, Instance):
            known = self.heap.get((base.ident, target.attr))
            if known is not None and self._is_module(value) and (base.is_module or self._is_module(known)):
                self.emit("replace", node, target.attr, base if base.is_module else known, (value,))
            if isinstance(value, Unknown) and not value.name:
                value = replace(value, name=target.attr)
            self.heap[(base.ident, target.attr)] = value
        elif isinstance(base, Object):
            if base.kind == "module" and self._is_module(value):
                self.emit("replace", node, target.attr, base, (value,))
            self.heap[(base.ident, target.attr)] = value
        elif self._is_module(_root(base)) and self._is_module(value):
            self.emit("replace", node, target.attr, _root(base), (value,))
        self.emit("attribute", node, target.attr, base, (value,))

    @staticmethod
    def _is_module(value: Value) -> bool:
        return (isinstance(value, Object) and value.kind == "module") or (
            isinstance(value, Instance) and value.is_module
        )

    def _assign_item(self, target: ast.Subscript, value: Value, node: ast.AST) -> None:
        base, index = self.value(target.value), self.value(target.slice)
        if isinstance(base, Table):
            key = index.value if isinstance(index, Const) else None
            pairs = tuple(pair for pair in base.pairs if pair[0] != key or key is None)
            self.assign(target.value, Table((*pairs, (key, value)), base.partial or key is None), node)
            return
        if self._is_module(_root(base)) and self._is_module(value):
            self.emit("replace", node, "[]", _root(base), (value,))
        self.emit("store", node, "[]", base, (index, value))

    # -- leaving --

    def _do_Return(self, node: ast.Return) -> None:
        self.returned.append(self.value(node.value))
        self.emit("return", node)
        raise Return

    def _do_Break(self, node: ast.Break) -> None:
        self.emit("break", node)
        raise Break

    def _do_Continue(self, node: ast.Continue) -> None:
        self.emit("continue", node)
        raise Continue

    def _do_Raise(self, node: ast.Raise) -> None:
        if node.exc is not None:
            self.value(node.exc)
        raise Raise

    def _do_Assert(self, node: ast.Assert) -> None:
        self.value(node.test)

    # -- loops --

    def _do_For(self, node: ast.For | ast.AsyncFor) -> None:
        iterable = self.value(node.iter)
        if (
            isinstance(iterable, Items)
            and not iterable.repeats
            and 0 < len(iterable.items) <= 8
            and self._are_objects(iterable)
        ):
            for item in iterable.items:
                self.assign(node.target, item, node)
                try:
                    self.block(node.body)
                except Continue:
                    continue
                except Break:
                    break
            else:
                self.block(node.orelse)
            return
        element = self.element(iterable)
        self._loop(node, lambda: self._next(node, element))

    _do_AsyncFor = _do_For

    def _next(self, node: ast.For | ast.AsyncFor, element: Value) -> None:
        self.assign(node.target, _another(element, self.loops[-1].turn), node)

    @staticmethod
    def _are_objects(iterable: Items) -> bool:
        return all(
            isinstance(item, Object | Instance)
            or (isinstance(item, Items) and any(isinstance(part, Object | Instance) for part in item.items))
            for item in iterable.items
        )

    def _do_While(self, node: ast.While) -> None:
        self._loop(node, lambda: self.condition(node.test))

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, advance: Callable[[], object]) -> None:
        """Run the body of a loop, twice where the order of a step may be told by two turns."""
        matters = any(self.relevance.matters(part) for part in node.body)
        turns = 2 if matters and not self.relevance.holds_loop(node) and not self.quiet else 1
        outer_loops, outer_enclosing = len(self.loops), len(self.enclosing)
        before = self.snapshot() if not matters else None
        is_broken = False
        for turn in range(turns):
            self.loops.append(Loop(node, turn))
            self.emit("again" if turn else "loop", node)
            try:
                advance()
                self.block(node.body)
            except Continue:
                pass
            except Break:
                is_broken = True
                break
            finally:
                del self.loops[outer_loops:]
                del self.enclosing[outer_enclosing:]
        self.emit("end", node)
        if before is not None:
            self.merge(before)
        if not is_broken:
            self.block(node.orelse)

    # -- with and try --

    def _do_With(self, node: ast.With | ast.AsyncWith) -> None:
        depth = len(self.contexts)
        for item in node.items:
            value = self.value(item.context_expr)
            opened = list(value.items) if isinstance(value, Items) else [value]
            for context in opened:
                if isinstance(context, Object) and context.kind != "no context":
                    self.contexts.append(context)
                    self.emit("enter", item.context_expr, context.kind, context)
                elif isinstance(context, Method | Unknown | Name | Instance):
                    name = getattr(context, "name", "")
                    self.contexts.append(Object("context", name, self.ident(item.context_expr), item.context_expr))
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value, node)
        try:
            self.block(node.body)
        finally:
            for context in reversed(self.contexts[depth:]):
                if isinstance(context, Object):
                    self.emit("leave", node, context.kind, context)
            del self.contexts[depth:]

    _do_AsyncWith = _do_With

    def _do_Try(self, node: ast.Try) -> None:
        try:
            self.block(node.body)
            self.block(node.orelse)
        except Raise:
            pass
        finally:
            for handler in node.handlers:
                if not self.quiet:
                    self.rehearse(handler.body)
            self.block(node.finalbody)

    _do_TryStar = _do_Try

    def _do_Match(self, node: ast.Match) -> None:
        self.value(node.subject)
        before = self.snapshot()
        self.quiet += 1
        try:
            for case in node.cases:
                with suppress(Left):
                    self.block(case.body)
        finally:
            self.quiet -= 1
        self.merge(before)


def _loaded(target: ast.expr) -> ast.expr:
    """A target of ``+=`` as the expression that reads it."""
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    if isinstance(target, ast.Attribute):
        return ast.Attribute(target.value, target.attr, ast.Load())
    assert isinstance(target, ast.Subscript)
    return ast.Subscript(target.value, target.slice, ast.Load())


def _root(value: Value) -> Value:
    """The module that an attribute of an attribute belongs to: ``net`` of ``net.encoder.head``."""
    while isinstance(value, Method):
        value = value.receiver
    return value


def _another(element: Value, turn: int) -> Value:
    """A loop over several optimizers or scalers hands out another one in each turn."""
    if isinstance(element, Items):
        return Items(tuple(_another(item, turn) for item in element.items), element.repeats)
    if isinstance(element, Object) and element.kind in {"optimizer", "scaler"}:
        return replace(element, ident=(*element.ident, -1, turn))
    return element


def _makes(node: ast.expr) -> bool:
    """Whether an expression may make a new object: a call, or a part of what a call gave."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return isinstance(node, ast.Call)
