"""What calling something does: functions and classes of the source are entered."""

from __future__ import annotations

import ast

from halfstep.lint import vocabulary
from halfstep.lint.expressions import element_of
from halfstep.lint.libraries import Libraries
from halfstep.lint.parameters import assumed
from halfstep.lint.state import Frame
from halfstep.lint.tensors import Keywords
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
    Unknown,
    Value,
    join,
)

MAX_DEPTH = 12
"""Functions of the source inside each other; a deeper one is not entered."""


class Calls(Libraries):
    """Evaluates calls; the bodies of functions are run by :mod:`halfstep.lint.statements`."""

    def run_body(self, body: list[ast.stmt]) -> Value:
        """Run the body of a function and give what it returns."""
        raise NotImplementedError

    def call(self, node: ast.Call) -> Value:
        function = self.value(node.func)
        args, keywords = self._arguments(node)
        if isinstance(function, Method) and isinstance(node.func, ast.Attribute):
            self._grow(node.func.value, function, args)
        return self.apply(function, args, keywords, node)

    def _grow(self, target: ast.expr, function: Method, args: tuple[Value, ...]) -> None:
        """``items.append(x)`` and ``extend``: ``target`` holds a longer list afterwards."""
        items = function.receiver
        if isinstance(items, Items) and function.name in {"append", "extend", "add"} and args:
            new = element_of(args[0]) if function.name == "extend" and isinstance(args[0], Items) else args[0]
            known = element_of(items)
            self.assign(target, Items((new if not items.items else join(known, new),), repeats=True), target)

    def _arguments(self, node: ast.Call) -> tuple[tuple[Value, ...], Keywords]:
        args: list[Value] = []
        for part in node.args:
            value = self.value(part)
            if isinstance(part, ast.Starred):
                args.extend(value.items if isinstance(value, Items) else [UNKNOWN])
            else:
                args.append(value)
        keywords: list[tuple[str, Value]] = []
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                keywords.append((keyword.arg, value))
            elif isinstance(value, Table):
                keywords.extend((key, item) for key, item in value.pairs if isinstance(key, str))
                if value.partial:
                    keywords.append(("**", UNKNOWN))
            else:
                keywords.append(("**", value))
        return tuple(args), tuple(keywords)

    def apply(self, function: Value, args: tuple[Value, ...], keywords: Keywords, node: ast.AST) -> Value:
        """Call ``function``."""
        if isinstance(function, Function):
            return self.call_function(function, args, keywords, node)
        if isinstance(function, Class):
            return self.instantiate(function.node, args, keywords, node)
        if isinstance(function, Name):
            return self._library_call(function.qualified, args, keywords, node)
        if isinstance(function, Method):
            return self._method(function.receiver, function.name, args, keywords, node)
        if isinstance(function, Instance | Object):
            return self._call_object(function, args, keywords, node)
        result = self._unknown_result(args, node)
        self.emit("other", node, getattr(function, "name", ""), function, args, keywords, result)
        return result

    def call_function(self, function: Function, args: tuple[Value, ...], keywords: Keywords, node: ast.AST) -> Value:
        definition = function.node
        if definition in self.functions or len(self.functions) >= MAX_DEPTH:
            return self._unknown_result(args, node)
        if isinstance(definition, ast.Lambda):
            self.emit("local", node, "", function.owner, args, keywords)
            return self._enter(function, args, keywords, node)
        self.emit("local", node, definition.name, function.owner, args, keywords)
        decorators = [self.value(decorator) for decorator in definition.decorator_list]
        names = {decorator.qualified for decorator in decorators if isinstance(decorator, Name)}
        is_context = bool(names & {"contextlib.contextmanager", "contextlib.asynccontextmanager"})
        if self.relevance.yields(definition) and not is_context and self.functions:
            return UNKNOWN  # its body runs when somebody asks for its next value
        self.inlined.add(definition)
        contexts = [d for d in decorators if isinstance(d, Object) and d.kind in {"region", "no_grad"}]
        for name in names & {"torch.no_grad", "torch.inference_mode", "torch.cuda.amp.autocast"}:
            contexts.append(Object(vocabulary.kind_of(name), name, self.ident(definition), definition))
        self.contexts += contexts
        try:
            return self._enter(function, args, keywords, node, is_context)
        finally:
            del self.contexts[len(self.contexts) - len(contexts) :]

    def _enter(
        self,
        function: Function,
        args: tuple[Value, ...],
        keywords: Keywords,
        node: ast.AST,
        is_context: bool = False,
    ) -> Value:
        definition = function.node
        self.calls.append(node)
        frame = self._bind(function, args, keywords)
        self.functions.append(definition)
        self.frames.append(frame)
        outer = self.frame, self.outside, self.yielded
        self.frame, self.outside, self.yielded = len(self.frames) - 1, len(self.contexts), ()
        try:
            if isinstance(definition, ast.Lambda):
                return self.value(definition.body)
            result = self.run_body(definition.body)
            return Items(self.yielded) if is_context else result
        finally:
            del self.contexts[self.outside :]
            self.frame, self.outside, self.yielded = outer
            self.functions.pop()
            self.calls.pop()

    def note_yield(self) -> None:
        """A context manager of the source hands over here: what it has opened is what its ``with`` opens."""
        self.yielded = tuple(self.contexts[self.outside :])

    def _bind(self, function: Function, args: tuple[Value, ...], keywords: Keywords) -> Frame:
        """The frame of a call: what was passed, then defaults, then what the use of a parameter tells."""
        definition = function.node
        parameters = definition.args
        frame = Frame({}, function.frame)
        positional = [*parameters.posonlyargs, *parameters.args]
        if function.owner is not None:
            args = (function.owner, *args)
            frame.owner = function.owner
        passed = dict(keywords)
        uses = self.relevance.uses(definition)
        defaults: dict[str, ast.expr] = dict(
            zip(
                [arg.arg for arg in positional][len(positional) - len(parameters.defaults) :],
                parameters.defaults,
                strict=True,
            )
        )
        defaults |= {
            arg.arg: default
            for arg, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
            if default is not None
        }
        for index, arg in enumerate([*positional, *parameters.kwonlyargs]):
            value: Value | None = args[index] if index < len(args) and index < len(positional) else passed.get(arg.arg)
            if value is None and arg.arg in defaults:
                value = self.value(defaults[arg.arg])
                if isinstance(value, Const) and (isinstance(value.value, bool) or value.value is None):
                    value = None  # a switch: its caller decides
            if value is None or isinstance(value, Unknown):
                value = self._assume(arg, uses.get(arg.arg, set()), value) or value or Unknown(arg.arg)
            frame.values[arg.arg] = value
        if parameters.vararg is not None:
            frame.values[parameters.vararg.arg] = Items(args[len(positional) :])
        if parameters.kwarg is not None:
            known = {arg.arg for arg in [*positional, *parameters.kwonlyargs]}
            frame.values[parameters.kwarg.arg] = Table(
                tuple((k, v) for k, v in keywords if k not in known), partial=True
            )
        return frame

    def _assume(self, arg: ast.arg, uses: set[str], passed: Unknown | None) -> Value | None:
        """What the use of a parameter tells. The name that the caller passed means the same from then on."""
        name = "" if passed is None else passed.name
        turns = [loop.turn for loop in self.loops if isinstance(loop.node, ast.For) and name in _targets(loop.node)]
        value = assumed(arg.arg, uses, arg.annotation, self.names, arg, (*self.ident(arg), *turns))
        if passed is not None and isinstance(value, Object):
            self.becomes(passed, value)
        return value

    def instantiate(self, cls: ast.ClassDef, args: tuple[Value, ...], keywords: Keywords, node: ast.AST) -> Value:
        """Make an object of a class of the source: run its ``__init__``."""
        instance = Instance(cls, self.ident(node), self.is_module(cls))
        self.inlined.add(cls)
        if any(key == (instance.ident, "?made") for key in self.heap) and self.loops:
            self.heap = {key: value for key, value in self.heap.items() if key[0] != instance.ident}
        self.heap[(instance.ident, "?made")] = NONE
        for ancestor in self.mro(cls):
            for statement in ancestor.body:
                if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                    self.call_function(Function(statement, instance), args, keywords, node)
                    self.emit("make", node, cls.name, None, args, keywords, instance)
                    return instance
        for name, value in keywords:  # a dataclass: fields by name
            self.heap[(instance.ident, name)] = value
        self.emit("make", node, cls.name, None, args, keywords, instance)
        return instance

    def is_module(self, cls: ast.ClassDef) -> bool:
        """Whether a class of the source is a module with a forward."""
        return any(
            vocabulary.is_module_base(self.names.qualified(base) or "") for part in self.mro(cls) for base in part.bases
        )

    def _call_object(
        self, function: Instance | Object, args: tuple[Value, ...], keywords: Keywords, node: ast.AST
    ) -> Value:
        if isinstance(function, Instance):
            name = "forward" if function.is_module else "__call__"
            method = self.attribute(function, name, node)
            if not isinstance(method, Function):
                return self._unknown_result(args, node)
            if not function.is_module:
                return self.call_function(method, args, keywords, node)
            self.emit("forward", node, function.node.name, function, args, keywords)
            self.forward_depth += 1
            try:
                result = self.call_function(method, args, keywords, node)
            finally:
                self.forward_depth -= 1
            return self._came_out(result, node)
        if function.kind in {"module", "loss function"}:
            return self._forward(function, args, keywords, node)
        self.emit("other", node, function.kind, function, args, keywords)
        return self._unknown_result(args, node)


def _targets(loop: ast.For) -> set[str]:
    """The names that a loop assigns in every turn."""
    return {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
