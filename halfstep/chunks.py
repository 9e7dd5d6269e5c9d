"""The step of an optimizer over 16-bit weights: an fp32 weight exists for the moment in which it is moved.

Any torch optimizer moves fp32 weights, without knowing that the model holds 16-bit ones: for the moment of its step a
parameter's data is the fp32 weight, and its gradient fp32. This happens in chunks, so that the fp32 weights never exist
all at once. A chunk's gradients are freed with it, and later chunks may be as large as earlier ones have made room: the
step needs no more memory than the end of the backward pass did, but for the first few chunks of 5 MB or 1/1024 of the
model. An optimizer that is not known to move each parameter by itself takes one step over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, Self

import torch
from torch.optim import Optimizer

from halfstep.gradients import Gradients, divide
from halfstep.states import GRAIN, merge_state, scratch_bytes, slice_state, slices_at, steps_by_parameter

_FIRST_CHUNKS = 1024
"""The first chunks are this part of the model: at 20 bytes an element 1/50 byte a parameter."""
_SMALLEST_BYTES = 5 << 20
"""Scratch that is spent in any case: each step of the optimizer costs 0.1 ms besides its work."""
_FREED_BYTES = 2
"""What the gradient of an element frees, at the least."""


class Weights(Protocol):
    """Where the fp32 weights come from and go to; ``start`` and ``stop`` are places in the flattened parameter."""

    def __contains__(self, parameter: object) -> bool: ...

    def read_part(self, parameter: torch.Tensor, start: int, stop: int) -> torch.Tensor: ...

    def write_part(self, parameter: torch.Tensor, start: int, stop: int, weight: torch.Tensor) -> None: ...


class _Part:
    """The elements from ``start`` to ``stop`` of a parameter, which the optimizer takes for the parameter meanwhile."""

    def __init__(self, parameter: torch.Tensor, start: int, stop: int) -> None:
        self.parameter, self.start, self.stop = parameter, start, stop
        self.is_whole = stop - start == parameter.numel()
        self.stored = parameter.data

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.is_whole else tensor.reshape(-1)[self.start : self.stop]


def step_in_chunks(optimizer: Optimizer, gradients: Gradients, divisor: torch.Tensor | float, weights: Weights) -> None:
    """Divide the gradients by ``divisor`` and let ``optimizer`` step. Takes ``gradients`` apart and frees them."""
    with _States(optimizer) as states:
        for parameter in gradients:
            parameter.grad = None
        for chunk in _chunks(optimizer, gradients):
            values = []
            for part in chunk:
                gradient = part.of(gradients[part.parameter])
                values.append(gradient.float() if part.parameter in weights else gradient)
                if part.stop == part.parameter.numel():
                    del gradients[part.parameter], gradient
            divide(values, divisor)
            try:
                for part in chunk:
                    states.open(part)
                    if part.parameter in weights:
                        part.parameter.data = weights.read_part(part.parameter, part.start, part.stop)
                    else:
                        part.parameter.data = part.of(part.stored)
                    part.parameter.grad = values.pop(0)
                optimizer.step()
                for part in chunk:
                    weight, part.parameter.data, part.parameter.grad = part.parameter.data, part.stored, None
                    if part.parameter in weights:
                        weights.write_part(part.parameter, part.start, part.stop, weight)
            finally:
                for part in chunk:
                    part.parameter.grad, part.parameter.data = None, part.stored
                    states.close(part)


def _chunks(optimizer: Optimizer, gradients: Gradients) -> Iterator[list[_Part]]:
    """Parts of at most ``limit`` elements together; a parameter that cannot be sliced is one, whatever its size.

    An optimizer that is not known to move each parameter by itself gets all of them at once, in one step.
    """
    if not steps_by_parameter(optimizer):
        yield [_Part(parameter, 0, parameter.numel()) for parameter in gradients]
        return
    total = sum(parameter.numel() for parameter in gradients)
    chunk: list[_Part] = []
    num_in_chunk, num_freed = 0, 0
    num_scratch = scratch_bytes(optimizer)
    # The small ones first: what they free is room for the large ones.
    for parameter in sorted(gradients, key=torch.Tensor.numel):
        numel, start = parameter.numel(), 0
        is_sliced = not gradients[parameter].is_sparse and slices_at(optimizer, parameter)
        while start < numel:
            # A power of two, since some optimizers compile their step for each size.
            limit = max(total // _FIRST_CHUNKS, GRAIN, (_SMALLEST_BYTES + num_freed * _FREED_BYTES) // num_scratch)
            limit = 1 << (limit.bit_length() - 1)
            if chunk and numel - start > limit - num_in_chunk:
                yield chunk
                chunk, num_in_chunk = [], 0
            stop = start + limit if is_sliced and numel - start >= limit + GRAIN else numel
            chunk.append(_Part(parameter, start, stop))
            num_in_chunk += stop - start
            start = stop
        num_freed += numel
    if chunk:
        yield chunk


class _States:
    """The states of sliced parameters: the optimizer sees those of the slice that it is about to move."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._wholes: dict[torch.Tensor, dict[str, Any]] = {}
        self._before: dict[torch.Tensor, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for parameter, whole in self._wholes.items():
            if whole:
                self._optimizer.state[parameter] = whole
            else:
                self._optimizer.state.pop(parameter, None)

    def open(self, part: _Part) -> None:
        if part.is_whole:
            return
        parameter, state = part.parameter, self._optimizer.state
        if part.start == 0:
            self._wholes[parameter] = state.pop(parameter, {})
            # Each slice counts its step from here, and finds a state missing that was missing here.
            self._before[parameter] = dict(self._wholes[parameter])
        state[parameter] = slice_state(self._before[parameter], parameter.numel(), part.start, part.stop)

    def close(self, part: _Part) -> None:
        if not part.is_whole and part.parameter in self._wholes:
            whole = self._wholes[part.parameter]
            merge_state(whole, self._optimizer.state[part.parameter], part.parameter, part.start, part.stop)


@contextmanager
def hooks_once(optimizer: Any) -> Iterator[None]:
    """Run the optimizer's own step hooks around what happens inside, and keep them from running there, for each chunk.

    Hooks that are registered for every optimizer do run for each.
    """
    pre, post = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    for hook in list(pre.values()):
        hook(optimizer, (), {})
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = type(pre)(), type(post)()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = pre, post
    for hook in list(post.values()):
        hook(optimizer, (), {})
