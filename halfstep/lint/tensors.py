"""What the methods of tensors give, and the operations of torch."""

from __future__ import annotations

import ast
import re
from dataclasses import replace

from halfstep.lint import vocabulary
from halfstep.lint.arithmetic import is_small, unscales, with_a_graph
from halfstep.lint.expressions import Expressions
from halfstep.lint.formats import answer, devices_among, devices_of, format_of, imposed, moved_to
from halfstep.lint.values import (
    NONE,
    UNKNOWN,
    Const,
    Items,
    Method,
    Parameters,
    Tensor,
    Unknown,
    Value,
    is_lowest,
)

Keywords = tuple[tuple[str, Value], ...]
_GRIDS = frozenset({"arange", "linspace", "logspace", "randint", "randperm"})
_SIZE = re.compile(r"\.shape\[|\.size\(")
_MANY = re.compile(r"seq|len|step|time|pos|ctx|context", re.I)
"""How sources call what is counted in hundreds and more."""
_OF_VALUES = frozenset({"probability", "bounded", "log_probability", "lowest"})
_FILLS = frozenset({"masked_fill", "where", "full_like", "new_full", "fill", "index_fill"})
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


class Tensors(Expressions):
    """Evaluates what is asked of tensors."""

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

    @staticmethod
    def _unknown_result(args: tuple[Value, ...], node: ast.AST) -> Value:
        """What an unknown function gives back still comes out of the model when its arguments do."""
        tensors = [arg for arg in args if isinstance(arg, Tensor) and "number" not in arg.tags]
        if not tensors:
            return UNKNOWN
        tags = frozenset(tag for tensor in tensors for tag in tensor.tags & {"forward"})
        return Tensor(frozenset(), tags, node=node)


def _of_values(operation: str, tensors: list[Tensor]) -> frozenset[str]:
    """The tags that tell of the values an operation gives."""
    if operation in vocabulary.SAME_VALUES | {"masked_fill", "where", "clamp"}:
        return frozenset(tag for tensor in tensors for tag in tensor.tags & _OF_VALUES)
    if operation in vocabulary.PROBABILITY:
        return frozenset({"probability"})
    if operation in vocabulary.LOG_PROBABILITY:
        return frozenset({"log_probability"})
    return frozenset({"bounded"} if operation in vocabulary.BOUNDED else ())


def _extent(node: ast.AST, args: tuple[Value, ...]) -> set[str]:
    """How far a range may go: tags of a grid, none for one that any 16-bit format holds exactly."""
    numbers = [abs(a.value) for a in args if isinstance(a, Const) and isinstance(a.value, int | float)]
    if len(numbers) < sum(isinstance(arg, Const | Unknown | Tensor | Method) for arg in args):
        text = " ".join(ast.unparse(part) for part in node.args) if isinstance(node, ast.Call) else ""
        return {"grid", "long grid"} if _MANY.search(text) else {"grid"} if _SIZE.search(text) else set()
    return {tag for tag, limit in (("grid", 256), ("long grid", 2048)) if any(number > limit for number in numbers)}
