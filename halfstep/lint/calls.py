"""What calling something does: functions of the source are entered, library calls are understood by their name."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import replace

from halfstep.lint import vocabulary
from halfstep.lint.expressions import Expressions, element_of, is_small, unscales, with_a_graph
from halfstep.lint.formats import (
    answer,
    devices_among,
    devices_of,
    format_of,
    imposed,
    moved_to,
    region_formats,
    widest,
)
from halfstep.lint.parameters import assumed
from halfstep.lint.state import Frame
from halfstep.lint.values import (
    NONE,
    UNKNOWN,
    Class,
    Const,
    Function,
    Ident,
    Instance,
    Items,
    Method,
    Name,
    Object,
    Parameters,
    Scale,
    Table,
    Tensor,
    Unknown,
    Value,
    is_lowest,
    join,
)

Keywords = tuple[tuple[str, Value], ...]
MAX_DEPTH = 12
_DTYPES = {"half": "torch.float16", "bfloat16": "torch.bfloat16", "float": "torch.float32", "double": "torch.float64"}
_SAME_MODULE = frozenset(
    "train eval cuda cpu requires_grad_ apply share_memory to_empty compile half float bfloat16 double to xpu "
    "gradient_checkpointing_enable enable_input_require_grads set_default_dtype".split()
)
_GRIDS = frozenset({"arange", "linspace", "logspace", "randint", "randperm"})
_ORDERED = {
    "scaler": {"scale", "step", "update", "unscale_", "get_scale", "state_dict", "load_state_dict"},
    "optimizer": {"step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"},
    "scheduler": {"step", "state_dict", "load_state_dict"},
}


class Calls(Expressions):
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

    @staticmethod
    def _unknown_result(args: tuple[Value, ...], node: ast.AST) -> Value:
        """What an unknown function gives back still comes out of the model when its arguments do."""
        tensors = [arg for arg in args if isinstance(arg, Tensor) and "number" not in arg.tags]
        if not tensors:
            return UNKNOWN
        tags = frozenset(tag for tensor in tensors for tag in tensor.tags & {"forward"})
        return Tensor(frozenset(), tags, node=node)

    # -- functions and classes of the source --

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
        definition, caller = function.node, self.frame
        self.calls.append(node)
        frame = self._bind(function, args, keywords)
        self.functions.append(definition)
        self.frames.append(frame)
        self.frame = len(self.frames) - 1
        outside = len(self.contexts)
        self.yielded: tuple[Object, ...] = ()
        try:
            if isinstance(definition, ast.Lambda):
                return self.value(definition.body)
            result = self.run_body(definition.body)
            return Items(tuple(self.yielded)) if is_context else result
        finally:
            del self.contexts[outside:]
            self.frame = caller
            self.functions.pop()
            self.calls.pop()

    def note_yield(self) -> None:
        """A context manager of the source hands over here: what is open now is what its ``with`` opens."""
        base = len([c for c in self.contexts if c not in self.contexts[-4:]])
        self.yielded = tuple(self.contexts[base:])

    def _bind(self, function: Function, args: tuple[Value, ...], keywords: Keywords) -> Frame:
        """The frame of a call: what was passed, then defaults, then what the use of a parameter tells."""
        definition = function.node
        parameters = definition.args
        frame = Frame({}, function.frame if function.frame != self.frame or self.frame else function.frame)
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
            caller = self.frames[self.frame].values
            caller.update({name: value for name, known in caller.items() if known is passed})
            self.heap.update({key: value for key, known in self.heap.items() if known is passed})
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

    # -- objects --

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

    def _came_out(self, result: Value, node: ast.AST) -> Value:
        if isinstance(result, Tensor):
            return result.tagged("forward")
        if isinstance(result, Items):
            return Items(tuple(self._came_out(item, node) for item in result.items), result.repeats)
        return Tensor(frozenset(), frozenset({"forward"}), node=node) if isinstance(result, Unknown) else result

    def _forward(self, module: Object, args: tuple[Value, ...], keywords: Keywords, node: ast.AST) -> Value:
        last = module.type.rpartition(".")[2]
        region = self.region()
        formats = region_formats(region)
        weights = self.formats.get(module.ident)
        result: Value
        if last == "Sequential":
            self.emit("forward", node, module.type, module, args, keywords)
            children = module.args[0].items if module.args and isinstance(module.args[0], Items) else module.args
            result = args[0] if args else UNKNOWN
            self.forward_depth += 1
            self.calls.append(node)
            for child in children:
                result = self.apply(child, (result,), (), node) if isinstance(child, Object | Instance) else UNKNOWN
            self.calls.pop()
            self.forward_depth -= 1
            return self._came_out(result, node)
        if last in vocabulary.LOSS_CLASSES:
            operation = {"BCELoss": "binary_cross_entropy", "BCEWithLogitsLoss": "binary_cross_entropy_with_logits"}
            name = operation.get(last) or "cross_entropy"
            result = Tensor(answer(name, args, region), frozenset({"loss", "forward"}), node=node)
        elif last in vocabulary.LOWER_PRECISION_CLASSES:
            result = Tensor(formats or weights or widest(args), frozenset({"forward"}), node=node)
        elif last in vocabulary.FP32_CLASSES and formats:
            result = Tensor(frozenset({"fp32"}), frozenset({"forward"}), node=node)
        elif last in vocabulary.FP32_CLASSES | vocabulary.PASSING_CLASSES:
            tags = {"forward", *_CLASS_VALUES.get(last, ())}
            result = Tensor(widest(args), frozenset(tags), node=node)
        elif last == "Embedding":
            result = Tensor(weights or frozenset({"fp32"}), frozenset({"forward"}), node=node)
        else:
            # A model whose code is elsewhere most likely ends in a product, but that is not known.
            known = formats or weights or frozenset()
            result = Tensor(known, frozenset({"forward", "assumed"}), node=node)
        self.emit("forward", node, module.type, module, args, keywords, result)
        return result

    def _method(self, receiver: Value, name: str, args: tuple[Value, ...], keywords: Keywords, node: ast.AST) -> Value:
        if name in _SIZES and isinstance(receiver, Tensor | Unknown):
            size = Unknown(is_number=True)
            return size if args or name in {"numel", "nelement", "dim"} else Items((size,), repeats=True)
        if isinstance(receiver, Tensor):
            return self._tensor_method(receiver, name, args, keywords, node)
        if isinstance(receiver, Object):
            return self._object_method(receiver, name, args, keywords, node)
        if isinstance(receiver, Instance):
            if receiver.is_module:
                return self._module_method(receiver, name, args, keywords, node)
            return self._other(receiver, name, args, keywords, node)
        if isinstance(receiver, Method | Unknown):
            guess = self._of_unknown(receiver, name, args, keywords, node)
            if guess is not None:
                return guess
        if isinstance(receiver, Table) and name == "get" and args and isinstance(args[0], Const):
            return receiver.get(args[0].value) or (args[1] if len(args) > 1 else UNKNOWN)
        if isinstance(receiver, Table) and name in {"values", "items", "keys", "copy"}:
            found = tuple(value for _, value in receiver.pairs)
            return receiver if name == "copy" else Items(found, True) if name == "values" else UNKNOWN
        return self._other(receiver, name, args, keywords, node)

    def _of_unknown(
        self, receiver: Value, name: str, args: tuple[Value, ...], keywords: Keywords, node: ast.AST
    ) -> Value | None:
        """Methods that tensors alone have tell that an unknown receiver is one."""
        if name in _TENSOR_ALONE:
            return self._tensor_method(Tensor(node=node), name, args, keywords, node)
        if name == "parameters" and isinstance(receiver, Method):
            return Parameters()
        if name == "to" and isinstance(receiver, Unknown) and self._is_cast(receiver, args, keywords):
            return self._tensor_method(Tensor(node=node), name, args, keywords, node)
        return None

    def _is_cast(self, receiver: Unknown, args: tuple[Value, ...], keywords: Keywords) -> bool:
        """Whether ``x.to(dtype)`` casts a tensor: a parameter that its function never uses as a module."""
        if not self.functions or not any(format_of(arg) for arg in (*args, dict(keywords).get("dtype"))):
            return False
        uses = self.relevance.uses(self.functions[-1]).get(receiver.name, _MODULE_USES)
        return not uses & _MODULE_USES

    def _other(self, receiver: Value, name: str, args: tuple[Value, ...], keywords: Keywords, node: ast.AST) -> Value:
        result = UNKNOWN if name in {"append", "update", "add", "write", "log"} else self._unknown_result(args, node)
        if isinstance(receiver, Unknown | Method) and name in {"parameters", "trainable_parameters"}:
            result = Parameters()
        elif isinstance(receiver, Unknown) and (devices := moved_to(name, args, keywords)):
            result = replace(receiver, devices=devices)
        self.emit("other", node, name, receiver, args, keywords, result)
        return result

    def _object_method(
        self, receiver: Object, name: str, args: tuple[Value, ...], keywords: Keywords, node: ast.AST
    ) -> Value:
        kind = receiver.kind
        result: Value = UNKNOWN
        if kind == "module" or kind == "average":
            return self._module_method(receiver, name, args, keywords, node)
        if name == "state_dict":
            result = Object("state", f"{kind}.state_dict", receiver.ident, node, (receiver,))
        elif kind == "scaler":
            updates = self.updates.get(receiver.ident, 0)
            if name == "scale" and args:
                result = self._scaled(args[0], receiver, updates, node)
            elif name == "get_scale":
                result = Scale(receiver.ident, updates, node)
            elif name == "update":
                self.updates[receiver.ident] = updates + 1
        elif kind == "accelerator" and name == "prepare":
            prepared = [
                replace(arg, keywords=(*arg.keywords, ("prepared", receiver))) if isinstance(arg, Object) else arg
                for arg in args
            ]
            result = Items(tuple(prepared)) if len(prepared) > 1 else prepared[0] if prepared else UNKNOWN
        elif kind == "fabric" and name in {"setup", "setup_dataloaders"}:
            result = Items(args) if len(args) > 1 else args[0] if args else UNKNOWN
        elif kind in {"accelerator", "fabric"} and name in {"autocast", "accumulate", "no_backward_sync"}:
            result = Object("context", f"{kind}.{name}", self.ident(node), node, args, keywords)
        elif kind == "region" and name in {"__enter__", "__exit__"}:
            if name == "__enter__":
                self.contexts.append(receiver)
            elif receiver in self.contexts:
                self.contexts.remove(receiver)
        elif kind == "hf trainer" or kind == "loader":
            result = UNKNOWN
        elif isinstance(receiver, Object) and not kind:
            result = self._unknown_result(args, node)
        self.emit(f"{kind or 'other'}.{name}" if kind else "other", node, name, receiver, args, keywords, result)
        if kind == "optimizer" and name == "step" and args and isinstance(args[0], Function):
            self.apply(args[0], (), (), node)
        return result

    def _scaled(self, value: Value, scaler: Object, updates: int, node: ast.AST) -> Value:
        if isinstance(value, Items):
            return Items(tuple(self._scaled(item, scaler, updates, node) for item in value.items), value.repeats)
        tensor = value if isinstance(value, Tensor) else Tensor(node=node)
        return replace(tensor.tagged("scaled"), scaler=scaler.ident, updates=updates, node=node)

    def _module_method(
        self, receiver: Object | Instance, name: str, args: tuple[Value, ...], keywords: Keywords, node: ast.AST
    ) -> Value:
        result: Value = UNKNOWN
        if name in {"parameters", "trainable_parameters"}:
            result = Parameters(frozenset({receiver.ident}))
        elif name == "named_parameters":
            result = Items(
                (Items((UNKNOWN, Tensor(frozenset(), frozenset({"parameter"}), of=frozenset({receiver.ident})))),), True
            )
        elif name in _SAME_MODULE:
            result = receiver
            self._cast_module(receiver, name, args, keywords)
        elif name in {"modules", "children", "named_modules", "named_children"}:
            child = Object("module", "", (*receiver.ident, -1), node)
            result = Items((Items((UNKNOWN, child)) if name.startswith("named") else child,), True)
        elif name == "state_dict":
            result = Object("state", "module.state_dict", receiver.ident, node, (receiver,))
        elif name in {"forward", "forward_features"} and isinstance(receiver, Object):
            return self._forward(receiver, args, keywords, node)
        elif name in {"get_output_embeddings", "get_input_embeddings", "get_submodule"}:
            result = Object("module", "", (*receiver.ident, -1), node)
        elif name == "register_buffer" and len(args) > 1 and isinstance(args[0], Const):
            self.heap[(receiver.ident, str(args[0].value))] = args[1]
        elif name in {"manual_backward", "clip_gradients", "optimizers", "lr_schedulers", "log", "log_dict"}:
            self.emit(f"lightning.{name}", node, name, receiver, args, keywords)
            if name == "optimizers":
                return Object("lightning optimizer", "", receiver.ident, node)
            return UNKNOWN
        elif name not in {"zero_grad", "load_state_dict", "register_parameter", "add_module", "no_sync"}:
            result = self._unknown_result(args, node)
        if name == "no_sync":
            result = Object("context", "no_sync", self.ident(node), node)
        self.emit(f"module.{name}", node, name, receiver, args, keywords, result)
        return result

    def _cast_module(self, receiver: Object | Instance, name: str, args: tuple[Value, ...], keywords: Keywords) -> None:
        if name == "requires_grad_":
            on = args[0] if args else dict(keywords).get("requires_grad", Const(True))
            if on == Const(False):
                self.frozen.add(receiver.ident)
            else:
                self.frozen.discard(receiver.ident)
            return
        devices = moved_to(name, args, keywords)
        if devices is not None:
            self.devices[receiver.ident] = devices
        formats = frozenset({vocabulary.CAST_METHODS[name]}) if name in _DTYPES else frozenset()
        if name == "to":
            for arg in [*args, *(value for keyword, value in keywords if keyword == "dtype")]:
                formats = format_of(arg) or formats
        if formats:
            self.formats[receiver.ident] = formats

    # -- tensors --

    def _tensor_method(
        self, receiver: Tensor, name: str, args: tuple[Value, ...], keywords: Keywords, node: ast.AST
    ) -> Value:
        if "gradient" in receiver.tags:
            if name in {"zero_"}:
                self.emit("optimizer.zero_grad", node, name, Parameters(receiver.of), args, keywords)
                return receiver
            if name in vocabulary.INPLACE_GRADIENT:
                self.emit("gradient.write", node, name, receiver, args, keywords, receiver)
                return receiver
            if name not in {"detach_", "to", "requires_grad_", "size", "dim", "numel", "is_sparse"}:
                self.emit("gradient.read", node, name, receiver, args, keywords)
        if name == "backward":
            self.emit("backward", node, name, receiver, args, keywords)
            return NONE
        if name in {"item", "tolist", "numpy"}:
            result: Value = replace(receiver.tagged("number", "detached"), node=node)
            self.emit("item" if name != "numpy" else "tensor.numpy", node, name, receiver, args, keywords, result)
            return result if name != "numpy" else UNKNOWN
        formats = receiver.formats
        cast = None
        if name in vocabulary.CAST_METHODS:
            cast = frozenset({vocabulary.CAST_METHODS[name]})
        elif name in {"to", "type", "type_as"}:
            asked = [*args, *(value for keyword, value in keywords if keyword == "dtype")]
            for arg in asked:
                cast = format_of(arg) or cast
                if isinstance(arg, Tensor) and "number" not in arg.tags:
                    cast = arg.formats or frozenset()
                if isinstance(arg, Unknown) and arg.name == "dtype":
                    cast = frozenset()
        if cast is not None:
            devices = moved_to(name, args, keywords)
            tags = receiver.tags - {"assumed"} if cast else receiver.tags
            devices = receiver.devices if devices is None else devices
            result = replace(receiver, formats=cast, tags=tags, node=node, devices=devices)
            self.emit("cast", node, name, receiver, args, keywords, result)
            return result
        if name in {"to", "cuda", "cpu", "contiguous", "clone", "detach", "requires_grad_", "pin_memory"}:
            result = receiver.tagged("detached") if name == "detach" else receiver
            if name == "requires_grad_" and "detached" in receiver.tags and Const(False) not in args:
                result = replace(receiver, tags=receiver.tags - {"detached"} | {"leaf"}, node=node)
            devices = moved_to(name, args, keywords)
            result = result if devices is None else replace(result, devices=devices)
            self.emit(f"tensor.{name}", node, name, receiver, args, keywords, result)
            return result
        operands = (receiver, *(args[1:] if name == "where" else args))
        result = self._operation(name.removesuffix("_"), operands, keywords, node)
        if name.endswith("_"):
            kept = receiver.tags & {"parameter"}  # it is the same tensor
            result = replace(result, formats=formats, tags=result.tags | kept, of=receiver.of if kept else result.of)
        if name in {"chunk", "split", "unbind", "topk", "max", "min", "sort", "unique"} and isinstance(result, Tensor):
            several = name in {"chunk", "split", "unbind", "topk", "sort"} or bool(args or keywords)
            if several:
                self.emit(f"tensor.{name}", node, name, receiver, args, keywords, result)
                return Items((result,), repeats=True)
        self.emit(f"tensor.{name}", node, name, receiver, args, keywords, result)
        return result

    def _operation(self, name: str, args: tuple[Value, ...], keywords: Keywords, node: ast.AST) -> Tensor:
        """What an operation of torch answers, as far as its format and tags go."""
        flat = [item for arg in args for item in (arg.items if isinstance(arg, Items) else (arg,))]
        tensors = [value for value in flat if isinstance(value, Tensor)]
        asked = dict(keywords).get("dtype", NONE)
        formats = answer(name, flat, self.region()) if asked == NONE else format_of(asked)
        through = frozenset(tag for tensor in tensors for tag in tensor.tags & _THROUGH)
        tags = frozenset({"literal"}) if name.endswith("_like") else through
        if asked != NONE or imposed(name, self.region()):
            tags -= {"assumed"}
        tags |= _of_values(name, tensors)
        if name in _FILLS and any(is_lowest(arg) for arg in args):
            tags |= {"lowest"}
        tags -= with_a_graph(tensors)
        if len(args) > 1 and unscales("div" if name in {"div", "true_divide"} else name, args[1]):
            tags -= {"scaled"}
        elif name in {"div", "true_divide"} and len(args) > 1:
            tags |= {"divided"}
        elif name in {"mul", "multiply"} and len(args) > 1 and not isinstance(args[1], Tensor):
            tags |= {"divided"} if is_small(args[1]) else set() if isinstance(args[1], Const) else {"weighted"}
        if name in vocabulary.LOSSES:
            tags |= {"loss"}
        if name in {"isfinite", "isnan", "isinf", "eq", "ne", "lt", "gt", "le", "ge", "logical_not"}:
            formats, tags = frozenset({"bool"}), tags | {"mask"}
        if name in {"argmax", "argmin", "argsort"}:
            formats = frozenset({"int"})
        scaled = next((tensor for tensor in tensors if "scaled" in tensor.tags), None)
        of = frozenset(ident for tensor in tensors for ident in tensor.of) if "gradient" in tags else frozenset()
        device = dict(keywords).get("device")
        devices = devices_among(flat) if device is None else devices_of(device)
        return Tensor(
            formats, tags, scaled.scaler if scaled else None, scaled.updates if scaled else 0, of, node, devices
        )

    # -- names of libraries --

    def _library_call(self, qualified: str, args: tuple[Value, ...], keywords: Keywords, node: ast.AST) -> Value:
        last = qualified.rpartition(".")[2]
        if qualified.startswith("builtins."):
            return self._builtin(last, args, keywords, node)
        kind = vocabulary.kind_of(qualified)
        if kind == "wrapper" and args:
            inner = args[0]
            if qualified == "copy.deepcopy" and isinstance(inner, Object | Instance):
                copied = replace(inner, ident=self.ident(node))
                self.copy_attributes(inner.ident, copied.ident)
                inner = copied
            self.emit("call", node, qualified, None, args, keywords, inner)
            return inner
        if kind:
            made = Object(kind, qualified, self.ident(node), node, args, keywords)
            if kind == "module":
                if "device" in dict(keywords):
                    self.devices[made.ident] = devices_of(dict(keywords)["device"])
                if last == "from_pretrained":
                    asked = dict(keywords).get("torch_dtype") or dict(keywords).get("dtype")
                    if format_of(asked):
                        self.formats[made.ident] = format_of(asked)
                elif format_of(dict(keywords).get("dtype")):
                    self.formats[made.ident] = format_of(dict(keywords).get("dtype"))
            self.updates.pop(made.ident, None)
            self.emit("make", node, qualified, None, args, keywords, made)
            return made
        if last in vocabulary.CLIPS and args:
            result: Value = Tensor(frozenset({"fp32"}), frozenset({"gradient norm"}), node=node)
            self.emit("clip", node, qualified, None, args, keywords, result)
            return result
        if qualified in {"torch.nn.utils.get_total_norm", "torch.nn.utils.parameters_to_vector"}:
            self.emit("call", node, qualified, None, args, keywords)
            return self._operation(last, args, keywords, node)
        if qualified == "torch.autograd.grad":
            source = args[0] if args else dict(keywords).get("outputs", UNKNOWN)
            source = element_of(source) if isinstance(source, Items) else source
            tags = frozenset({"gradient", "autograd"}) | (
                source.tags & {"scaled"} if isinstance(source, Tensor) else frozenset()
            )
            scaled = source if isinstance(source, Tensor) and "scaled" in source.tags else None
            gradient = Tensor(
                frozenset(), tags, scaled.scaler if scaled else None, scaled.updates if scaled else 0, node=node
            )
            self.emit("autograd.grad", node, qualified, None, args, keywords, gradient)
            return Items((gradient,), repeats=True)
        if qualified in {"torch.autograd.backward"}:
            receiver = args[0] if args else UNKNOWN
            self.emit(
                "backward",
                node,
                qualified,
                element_of(receiver) if isinstance(receiver, Items) else receiver,
                args,
                keywords,
            )
            return NONE
        if qualified == "torch.save":
            self.emit("save", node, qualified, None, args, keywords)
            return NONE
        if qualified == "torch.load":
            result = Object("checkpoint", qualified, self.ident(node), node)
            self.emit("load", node, qualified, None, args, keywords, result)
            return result
        if qualified == "torch.nn.Parameter" or qualified == "torch.nn.parameter.Parameter":
            formats = args[0].formats if args and isinstance(args[0], Tensor) else frozenset()
            result = Tensor(formats, frozenset({"parameter"}), node=node)
        elif qualified.startswith(("torch.", "einops.")):
            if last in vocabulary.LITERALS:
                result = self._literal(last, args, keywords, node)
            else:
                operands = args[1:] if last == "where" else args  # its condition has no say
                result = self._operation(last, operands, keywords, node)
                if last in {"chunk", "split", "unbind", "topk", "sort", "meshgrid"}:
                    result = Items((result,), repeats=True)
        elif qualified.startswith("math."):
            result = _of_numbers(last, args)
        else:
            result = self._unknown_result(args, node)
        gradients = [
            arg for arg in args if isinstance(arg, Tensor) and {"gradient"} <= arg.tags and "autograd" not in arg.tags
        ]
        gradients += [
            item
            for arg in args
            if isinstance(arg, Items)
            for item in arg.items
            if isinstance(item, Tensor) and "gradient" in item.tags and "autograd" not in item.tags
        ]
        if gradients:
            self.emit("gradient.read", node, last, gradients[0], args, keywords)
        self.emit("call", node, qualified, None, args, keywords, result)
        return result

    def _literal(self, name: str, args: tuple[Value, ...], keywords: Keywords, node: ast.AST) -> Tensor:
        dtype = dict(keywords).get("dtype")
        usual = {"arange": "int", "randint": "int", "randperm": "int"}.get(name, "fp32")
        formats = format_of(dtype) if dtype is not None else frozenset({usual})
        tags = {"literal", *(_extent(node, args) if name in _GRIDS else ())}
        if any(is_lowest(arg) for arg in args):
            tags.add("lowest")
        if name in {"tensor", "as_tensor", "from_numpy"}:
            formats = format_of(dtype) if dtype is not None else frozenset()
            if any(isinstance(arg, Tensor) and arg.tags & {"number", "forward", "loss"} for arg in args):
                tags = {"rebuilt", "detached"}
        elif (
            name == "arange"
            and any(isinstance(a, Const) and isinstance(a.value, float) for a in args)
            and dtype is None
        ):
            formats = frozenset({"fp32"})
        return Tensor(formats, frozenset(tags), node=node, devices=devices_of(dict(keywords).get("device")))

    def _builtin(self, name: str, args: tuple[Value, ...], keywords: Keywords, node: ast.AST) -> Value:
        first = args[0] if args else UNKNOWN
        result: Value = UNKNOWN
        if name in {"float", "int"} and isinstance(first, Tensor):
            result = replace(first.tagged("number", "detached"), node=node)
            if "number" not in first.tags:
                self.emit("item", node, name, first, args, keywords, result)
            return result
        if name == "float" and isinstance(first, Const):
            try:
                return Const(float(first.value))
            except (TypeError, ValueError):
                return UNKNOWN
        if name == "print":
            for arg in args:
                if isinstance(arg, Tensor) and "number" not in arg.tags:
                    self.emit("item", node, name, arg, args, keywords)
        elif name in {"len", "int", "float"}:
            result = Unknown(is_number=True)
        elif name in {"list", "tuple", "iter", "reversed", "sorted", "set"}:
            result = first
        elif name == "enumerate":
            result = Items((Items((Unknown("index", is_number=True), self.element(first))),), repeats=True)
        elif name == "zip":
            result = Items((Items(tuple(self.element(arg) for arg in args)),), repeats=True)
        elif name in {"sum", "max", "min", "abs", "round", "pow"}:
            value = self.element(first) if isinstance(first, Items) else first
            if isinstance(value, Tensor):
                result = self._operation({"sum": "add", "max": "max", "min": "min"}.get(name, name), (value,), (), node)
        elif name == "getattr" and len(args) > 1 and isinstance(args[1], Const) and isinstance(args[1].value, str):
            result = self.attribute(first, args[1].value, node)
        elif name == "getattr" and first == Name("torch"):
            result = Unknown("dtype")
        elif name == "setattr" and len(args) == 3 and isinstance(first, Object | Instance):
            self.emit("replace", node, "", first, args, keywords, args[2])
        elif name == "isinstance" or name == "hasattr":
            result = UNKNOWN
        elif name == "dict":
            result = Table(
                tuple((k, v) for k, v in keywords if k != "**"), any(k == "**" for k, _ in keywords) or bool(args)
            )
        elif name == "next":
            result = self.element(first)
        elif name == "super":
            owner = self.frames[self.frame].owner
            result = Object("super", "", (), node, (owner,)) if owner is not None else UNKNOWN
        self.emit("call", node, f"builtins.{name}", None, args, keywords, result)
        return result


def _of_numbers(name: str, args: tuple[Value, ...]) -> Value:
    """What a function of ``math`` gives."""
    if all(isinstance(arg, Const) for arg in args):
        try:
            return Const(getattr(math, name)(*(arg.value for arg in args if isinstance(arg, Const))))
        except (TypeError, ValueError, ArithmeticError, AttributeError):
            return UNKNOWN
    return Unknown(is_number=True)


def _of_values(operation: str, tensors: list[Tensor]) -> frozenset[str]:
    """The tags that tell of the values an operation gives."""
    if operation in vocabulary.SAME_VALUES | {"masked_fill", "where", "clamp"}:
        return frozenset(tag for tensor in tensors for tag in tensor.tags & _OF_VALUES)
    if operation in vocabulary.PROBABILITY:
        return frozenset({"probability"})
    if operation in vocabulary.LOG_PROBABILITY:
        return frozenset({"log_probability"})
    return frozenset({"bounded"} if operation in vocabulary.BOUNDED else ())


def _targets(loop: ast.For) -> set[str]:
    """The names that a loop assigns in every turn."""
    return {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}


def _extent(node: ast.AST, args: tuple[Value, ...]) -> set[str]:
    """How far a range may go: tags of a grid, none for one that any 16-bit format holds exactly."""
    numbers = [abs(a.value) for a in args if isinstance(a, Const) and isinstance(a.value, int | float)]
    if len(numbers) < sum(isinstance(arg, Const | Unknown | Tensor | Method) for arg in args):
        text = " ".join(ast.unparse(part) for part in node.args) if isinstance(node, ast.Call) else ""
        return {"grid", "long grid"} if _MANY.search(text) else {"grid"} if _SIZE.search(text) else set()
    return {tag for tag, limit in (("grid", 256), ("long grid", 2048)) if any(number > limit for number in numbers)}


_SIZE = re.compile(r"\.shape\[|\.size\(")
_MANY = re.compile(r"seq|len|step|time|pos|ctx|context", re.I)
"""How sources call what is counted in hundreds and more."""
_OF_VALUES = frozenset({"probability", "bounded", "log_probability", "lowest"})
_CLASS_VALUES = {
    "Sigmoid": {"probability"}, "Softmax": {"probability"}, "LogSoftmax": {"log_probability"}, "Tanh": {"bounded"},
}  # fmt: skip
_FILLS = frozenset({"masked_fill", "where", "full_like", "new_full", "fill", "index_fill"})
_MODULE_USES = frozenset({"()", "parameters", "named_parameters", "train", "eval", "state_dict", "load_state_dict"})
_SIZES = frozenset({"size", "numel", "nelement", "dim", "stride"})
_THROUGH = frozenset(
    {
        "forward",
        "divided",
        "weighted",
        "scaled",
        "gradient",
        "loss",
        "detached",
        "assumed",
        "autograd",
        "mask",
        "rebuilt",
        "grid",
        "long grid",
    }
)
_TENSOR_ALONE = frozenset(
    "backward unsqueeze masked_fill masked_fill_ softmax log_softmax detach half bfloat16 requires_grad_ view_as "
    "bmm matmul sigmoid rsqrt clamp_min log_ logsumexp numpy".split()
)
