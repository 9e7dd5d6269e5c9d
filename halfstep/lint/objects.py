"""What the methods of objects do: scalers, optimizers, modules, and what nobody knows."""

from __future__ import annotations

import ast
from dataclasses import replace

from halfstep.lint import vocabulary
from halfstep.lint.formats import answer, format_of, moved_to, region_formats, widest
from halfstep.lint.parameters import SCHEDULER
from halfstep.lint.tensors import Keywords, Tensors
from halfstep.lint.values import (
    UNKNOWN,
    Const,
    Function,
    Instance,
    Items,
    Method,
    Object,
    Parameters,
    Scale,
    Table,
    Tensor,
    Unknown,
    Value,
)

_CASTS = frozenset({"half", "bfloat16", "float", "double"})
_SAME_MODULE = frozenset(
    "train eval cuda cpu requires_grad_ apply share_memory to_empty compile half float bfloat16 double to xpu "
    "gradient_checkpointing_enable enable_input_require_grads set_default_dtype".split()
)
_CLASS_VALUES = {
    "Sigmoid": {"probability"}, "Softmax": {"probability"}, "LogSoftmax": {"log_probability"}, "Tanh": {"bounded"},
}  # fmt: skip
_MODULE_USES = frozenset({"()", "parameters", "named_parameters", "train", "eval", "state_dict", "load_state_dict"})
_SIZES = frozenset({"size", "numel", "nelement", "dim", "stride"})
_TENSOR_ALONE = frozenset(
    "backward unsqueeze masked_fill masked_fill_ softmax log_softmax detach half bfloat16 requires_grad_ view_as "
    "bmm matmul sigmoid rsqrt clamp_min log_ logsumexp numpy".split()
)


class Objects(Tensors):
    """Evaluates what is asked of objects and modules."""

    def apply(self, function: Value, args: tuple[Value, ...], keywords: Keywords, node: ast.AST) -> Value:
        raise NotImplementedError

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
        if name == "step" and not (args or keywords) and SCHEDULER.search(getattr(receiver, "name", "")):
            self.emit("scheduler.step", node, name, receiver)
            return UNKNOWN
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
                if isinstance(args[0], Unknown):
                    self.becomes(args[0], Tensor(tags=frozenset({"loss"}), node=node))
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
        formats = frozenset({vocabulary.CAST_METHODS[name]}) if name in _CASTS else frozenset()
        if name == "to":
            for arg in [*args, *(value for keyword, value in keywords if keyword == "dtype")]:
                formats = format_of(arg) or formats
        if formats:
            self.formats[receiver.ident] = formats

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

    def _came_out(self, result: Value, node: ast.AST) -> Value:
        if isinstance(result, Tensor):
            return result.tagged("forward")
        if isinstance(result, Items):
            return Items(tuple(self._came_out(item, node) for item in result.items), result.repeats)
        return Tensor(frozenset(), frozenset({"forward"}), node=node) if isinstance(result, Unknown) else result
