"""Recorders: what each module, or each operation, made of its inputs in one forward and backward pass.

Statistics stay on the device while the pass runs and are read once, by ``read()``. Attached for one step and taken off
again, a recorder costs a healthy step nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from halfstep.record.values import Measurements, Values
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
    """Records every operation: ``with OperationRecorder(model) as recorder: ...``, then ``recorder.read()``."""

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
        name = op_name(func)
        written = written_to(func, args, kwargs)
        if is_uninitialised(name):
            return func(*args, **kwargs)
        read = floats(inputs_of(func, args, kwargs))
        inputs = tuple(self._measurements.of(tensor) for tensor in read)
        result = func(*args, **kwargs)
        outputs = tuple(
            self._measurements.changed(tensor) if any(tensor is w for w in written) else self._measurements.of(tensor)
            for tensor in floats(result)
        )
        if outputs:
            fills = any(isinstance(a, float) and a == -math.inf for a in (*args, *kwargs.values()))
            self._operations.append((site, name, inputs, outputs, fills))
        return result

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
    """Records what comes out of every module, forward and backward, and the gradients of its parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._measurements = Measurements(model)
        self._found: list[tuple[str, str, int, str | None]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for name, module in self.model.named_modules():
            self._watch(name, module)
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch(self, name: str, module: nn.Module) -> None:
        def add(tensor: torch.Tensor, kind: str, parameter: str | None = None) -> None:
            self._found.append((name, kind, self._measurements.of(tensor), parameter))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if torch._C._current_autograd_node() is not None:
                return  # a checkpoint computes it again
            for tensor in floats(output):
                add(tensor, "activation")
                if tensor.requires_grad and torch.is_grad_enabled():
                    self._handles.append(tensor.register_hook(lambda gradient: add(gradient, "gradient")))

        self._handles.append(module.register_forward_hook(after))
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                full = f"{name}.{own}" if name else own
                hook = parameter.register_hook(lambda gradient, full=full: add(gradient, "weight gradient", full))
                self._handles.append(hook)

    def read(self) -> Record:
        """Everything recorded; waits for the device once."""
        values = self._measurements.read()
        return Record(modules=tuple(ModuleValue(m, kind, values[v], name) for m, kind, v, name in self._found))


# --- what an operation reads and writes ----------------------------------------------------------------------------

_OVERWRITES = frozenset(
    f"{name}_" for name in ("copy", "fill", "zero", "bernoulli", "uniform", "normal", "random", "exponential")
)


def op_name(func: Any) -> str:
    """``mm`` of ``aten.mm.default``."""
    return str(func._schema.name.partition("::")[2])


def is_uninitialised(name: str) -> bool:
    """Whether an operation returns memory that nobody has written yet, so that its values mean nothing."""
    return name.startswith(("empty", "new_empty", "_empty", "resize_"))


def inputs_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments whose values matter: not an ``out=``, and not what is overwritten."""
    values = list(args[1:] if op_name(func) in _OVERWRITES else args)
    return values + [value for key, value in kwargs.items() if key != "out"]


def written_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes into."""
    named = zip((argument for argument in func._schema.arguments), args, strict=False)
    written = [value for argument, value in named if argument.is_write]
    return tree_leaves(written + [kwargs[a.name] for a in func._schema.arguments if a.is_write and a.name in kwargs])


def floats(values: Any) -> list[torch.Tensor]:
    """The floating tensors in ``values``; of a subclass, whose memory may be anything, none."""
    return [
        leaf
        for leaf in (values if isinstance(values, tuple | list) and _is_flat(values) else tree_leaves(values))
        if type(leaf) in (torch.Tensor, nn.Parameter) and (leaf.is_floating_point() or leaf.is_complex())
    ]


def _is_flat(values: Iterable[Any]) -> bool:
    return not any(isinstance(value, tuple | list | dict) for value in values)
