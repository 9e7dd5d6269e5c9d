"""Fixed answers to what code asks of a tensor's values, which a fake tensor does not have.

A training step reads few values: whether the gradient is finite, a loss for the log, how many elements a mask selects.
Each gets an answer that lets a healthy step go on: a number is 0, a condition is false, and a mask selects everything,
which is the most memory that it can take. How many were asked is counted, and a plan says it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

DEVICE = torch.ops.prim.device.default
"""What ``tensor.device`` of a fake tensor calls: three of four calls of a step, and no operation."""

CANNOT_RUN = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What a fake tensor raises for an operation whose result depends on values, or that has no fake form."""


class Answers(TorchDispatchMode):
    """While it is open, over a FakeTensorMode, questions about values are answered. ``num`` counts them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)  # first, since a fake tensor knows some constants, as an optimizer's step
        except (DataDependentOutputException, DynamicOutputShapeException):
            answer = _ANSWERS.get(func)
            if answer is None:
                raise
        self.num += 1
        return answer(func, args, kwargs)


def _number(func: Any, args: Any, kwargs: Any) -> bool | int | float:
    dtype = args[0].dtype
    return False if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0


def _nonzero(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    mask: torch.Tensor = args[0]
    return mask.new_empty((mask.numel(), mask.dim()), dtype=torch.long)


def _selected(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    values: torch.Tensor = args[0]
    return values.new_empty(torch.broadcast_shapes(values.shape, args[1].shape).numel())


def _indexed(func: Any, args: Any, kwargs: Any) -> Any:
    """By a mask: as if it selected every element of the dimensions that it covers."""
    indices: list[torch.Tensor | None] = []
    for index in args[1]:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            indices += [index.new_zeros(index.numel(), dtype=torch.long) for _ in range(index.dim())]
        else:
            indices.append(index)
    return func(args[0], indices, *args[2:], **kwargs)


_ANSWERS: dict[Any, Any] = {
    aten._local_scalar_dense.default: _number,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _selected,
    aten.index.Tensor: _indexed,
    aten.index_put.default: _indexed,
    aten.index_put_.default: _indexed,
}
