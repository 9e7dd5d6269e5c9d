"""What calling a library does, by its qualified name, and what the builtins give."""

from __future__ import annotations

import ast
import math
from dataclasses import replace

from halfstep.lint import vocabulary
from halfstep.lint.expressions import element_of
from halfstep.lint.formats import devices_of, format_of
from halfstep.lint.objects import Objects
from halfstep.lint.tensors import Keywords
from halfstep.lint.values import (
    NONE,
    UNKNOWN,
    Const,
    Instance,
    Items,
    Name,
    Object,
    Table,
    Tensor,
    Unknown,
    Value,
)


class Libraries(Objects):
    """Evaluates calls of torch, of other libraries and of builtins."""

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
