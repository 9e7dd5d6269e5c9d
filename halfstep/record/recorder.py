"""Recorders: what each module, or each operation, made of its inputs in one forward and backward pass.

Statistics stay on the device while the pass runs and are read once, by ``read()``. Attached for one step and taken off
again, a recorder costs a healthy step nothing.
"""

from __future__ import annotations

import functools
import math
import weakref
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from halfstep.record.rows import Rows
from halfstep.record.values import Measurements, Values, format_name, is_measurable
from halfstep.record.walk import Site, Walk


@dataclass(frozen=True)
class Operation:
    """One operation that ran, in order of execution.

    op:      name of the aten operation, such as ``mm`` or ``_softmax``.
    inputs:  of its floating tensors; without the ones that it only writes to.
    outputs: the same objects as the inputs of who uses them.
    fills_inf: it was handed the number -inf, as ``masked_fill`` is.
    """

    site: Site
    op: str
    inputs: tuple[Values, ...]
    outputs: tuple[Values, ...]
    fills_inf: bool = False

    @property
    def is_cast(self) -> bool:
        """Whether the values are the same but for their format."""
        if self.op == "copy_" and len(self.inputs) == len(self.outputs) == 1:
            given, taken = self.inputs[0], self.outputs[0]
            return given.format != taken.format and given.size == taken.size
        return self.op == "_to_copy"

    @property
    def zeroed_by_cast(self) -> int:
        """How many values were not zero before a cast and are after it."""
        return self.outputs[0].num_zeros - self.inputs[0].num_zeros if self.is_cast and self.inputs else 0


@dataclass(frozen=True)
class ModuleValue:
    """A tensor at a module's border.

    kind: ``activation`` (an output), ``gradient`` (of an output) or ``weight gradient`` (of one parameter, ``name``).
    """

    module: str
    kind: str
    values: Values
    name: str | None = None


@dataclass(frozen=True)
class Record:
    """What a pass did, in order of execution."""

    operations: tuple[Operation, ...] = ()
    modules: tuple[ModuleValue, ...] = ()


class OperationRecorder:
    """Records every operation: ``with OperationRecorder(model) as recorder: ...``, then ``recorder.read()``.

    What returns nothing, as the fused kernels of optimizers do, is not recorded.
    """

    sees_views = False

    def __init__(self, model: nn.Module) -> None:
        self._walk = Walk(model, self)
        self._measurements = Measurements(model)
        self._operations: list[tuple[Site, str, tuple[int, ...], tuple[int, ...], bool]] = []

    def __enter__(self) -> Self:
        self._walk.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._walk.__exit__(*exception)

    def visit(self, site: Site, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, measurements = op_name(func), self._measurements
        if is_uninitialised(name):
            return func(*args, **kwargs)
        is_recorded = bool(func._schema.returns)  # fused kernels of an optimizer are neither forward nor backward
        read = floats(inputs_of(func, args, kwargs)) if is_recorded else []
        inputs = tuple([measurements.of(tensor) for tensor in read])
        result = func(*args, **kwargs)
        written = floats(written_to(func, args, kwargs))
        for tensor in written:
            measurements.written(tensor)
        if is_recorded:
            returned = floats(result)
            returned += [tensor for tensor in written if not any(tensor is other for other in returned)]
            outputs = tuple([self._output(tensor, written) for tensor in returned])
            if outputs:
                fills = any(isinstance(a, float) and a == -math.inf for a in (*args, *kwargs.values()))
                self._operations.append((site, name, inputs, outputs, fills))
        return result

    def _output(self, tensor: torch.Tensor, written: list[torch.Tensor]) -> int:
        is_written = any(tensor is other for other in written)
        return self._measurements.changed(tensor) if is_written else self._measurements.of(tensor)

    def read(self) -> Record:
        """Everything recorded; waits for the device once."""
        values = self._measurements.read()
        return Record(
            tuple(
                Operation(site, op, tuple(values[i] for i in inputs), tuple(values[o] for o in outputs), fills)
                for site, op, inputs, outputs, fills in self._operations
            )
        )


class ModuleRecorder:
    """Records what comes out of every module, forward and backward, and the gradients of its parameters.

    What a checkpoint computes again is not recorded twice, but its gradients are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._rows = Rows()
        self._found: list[tuple[str, str, torch.dtype, torch.Size, int, str | None]] = []
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for name, module in self.model.named_modules():
            self._watch(name, module)
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen.clear()

    def _watch(self, name: str, module: nn.Module) -> None:
        def add_gradient(gradient: torch.Tensor) -> None:
            self._add(gradient, name, "gradient")

        def after(module: nn.Module, args: Any, output: Any) -> None:
            is_again = torch._C._current_autograd_node() is not None  # a checkpoint computes it
            for tensor in floats(output):
                if not is_again:
                    self._add(tensor, name, "activation")
                if tensor.requires_grad and torch.is_grad_enabled():
                    self._handles.append(tensor.register_hook(add_gradient))

        self._handles.append(module.register_forward_hook(after))
        for own, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                full = f"{name}.{own}" if name else own
                add = functools.partial(self._add, module=name, kind="weight gradient", parameter=full)
                self._handles.append(parameter.register_hook(add))

    def _add(self, tensor: torch.Tensor, module: str, kind: str, parameter: str | None = None) -> None:
        if not is_measurable(tensor):
            return
        # A container often returns what its last part did. A tensor that was changed since is another one.
        version = 0 if tensor.is_inference() else tensor._version
        reference, seen, row = self._seen.get(id(tensor), (None, 0, 0))
        if reference is None or reference() is not tensor or seen != version or tensor.is_inference():
            row = self._rows.add(tensor)
            self._seen[id(tensor)] = weakref.ref(tensor), version, row
        self._found.append((module, kind, tensor.dtype, tensor.shape, row, parameter))

    def read(self) -> Record:
        """Everything recorded; waits for the device once."""
        rows = self._rows.read()
        return Record(
            modules=tuple(
                ModuleValue(module, kind, Values(format_name(dtype), tuple(shape), None, rows[row]), name)
                for module, kind, dtype, shape, row, name in self._found
            )
        )


# --- what an operation reads and writes ----------------------------------------------------------------------------

_FILLS = ("copy", "fill", "zero", "bernoulli", "uniform", "normal", "random", "exponential")
_OVERWRITES = frozenset(f"{name}_" for name in (*_FILLS, "log_normal", "cauchy", "geometric")) | {
    "_foreach_copy_",
    "_foreach_zero_",
}


@functools.cache
def op_name(func: Any) -> str:
    """``mm`` of ``aten.mm.default``."""
    return str(func._schema.name.partition("::")[2])


def is_uninitialised(name: str) -> bool:
    """Whether an operation returns memory that nobody has written yet, so that its values mean nothing."""
    return name.startswith(("empty", "new_empty", "_empty", "resize_"))


@functools.cache
def _takes_values(func: Any) -> bool:
    """Whether any values matter to an operation; some take a tensor only for its shape and format."""
    name = op_name(func)
    return not (name.endswith("_like") or name.startswith("new_"))


def inputs_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments whose values matter: not an ``out=``, not what is overwritten, not what only gives a shape."""
    if not _takes_values(func):
        return []
    values = list(args[1:] if op_name(func) in _OVERWRITES else args)
    return values + [value for key, value in kwargs.items() if key not in _outs(func)] if kwargs else values


@functools.cache
def _outs(func: Any) -> frozenset[str]:
    """Names of the arguments that take results, as ``out`` does."""
    return frozenset(argument.name for argument in func._schema.arguments if argument.is_out)


_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")


@functools.cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that an operation writes into."""
    # These do not say that they update running statistics.
    silent = ("running_mean", "running_var") if op_name(func) in _NORMS else ()
    arguments = enumerate(func._schema.arguments)
    return tuple((place, a.name) for place, a in arguments if a.is_write or a.name in silent)


def written_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes into."""
    places = _writes(func)
    if not places:
        return []
    return tree_leaves([args[place] if place < len(args) else kwargs.get(name) for place, name in places])


def floats(values: Any) -> list[torch.Tensor]:
    """The floating and complex tensors in ``values``; of a subclass, whose memory may be anything, none."""
    if isinstance(values, torch.Tensor):
        return [values] if is_measurable(values) else []
    is_flat = isinstance(values, tuple | list) and not any(isinstance(v, tuple | list | dict) for v in values)
    return [leaf for leaf in (values if is_flat else tree_leaves(values)) if is_measurable(leaf)]
