"""Slices of optimizer states.

A step that has an fp32 weight only for a moment takes a large parameter in slices, so that the moment costs little
memory. That is right for optimizers that work element by element; of each state they see the same slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import optim

GRAIN = 4096
"""Slices begin at multiples of this and are never shorter: whole SIMD vectors, whole blocks of quantised states, and
the size from which torchao and bitsandbytes quantise."""

_ELEMENTWISE = (
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
)
_BY_PARAMETER = (optim.Adafactor, optim.Muon, optim.SparseAdam)
_QUANTISED = {
    "halfstep.plan": ("AdamW8bit",),  # a plan's, which holds what bitsandbytes' does
    "torchao.optim": ("Adam8bit", "AdamW8bit", "AdamFp8", "AdamWFp8"),
    # Those without a number take it as an argument, as transformers gives it.
    "bitsandbytes.optim": (
        *("Adam", "AdamW", "Lion", "RMSprop"),
        *("Adam8bit", "AdamW8bit", "SGD8bit", "RMSprop8bit", "Adagrad8bit", "Lion8bit"),
    ),
}
_BITSANDBYTES_BLOCK = 256


def scratch_bytes(optimizer: optim.Optimizer) -> int:
    """Bytes that a step needs for each element of a slice: the fp32 weight and gradient, and temporaries.

    torch's own optimizers take three more fp32 numbers. Those with quantised states unpack them: torchao, where it
    is not compiled, through several int64 tensors.
    """
    return 20 if type(optimizer) in _ELEMENTWISE else 128


def steps_by_parameter(optimizer: optim.Optimizer) -> bool:
    """Whether several steps over some parameters each do what one step over all does.

    Not so where a step counts in ``param_groups``, or takes a norm over the whole model, as Prodigy, LAMB and
    schedule-free optimizers do. So we say yes of those alone that we know.
    """
    return type(optimizer) in (*_ELEMENTWISE, *_BY_PARAMETER) or _is_known_quantised(optimizer)


def slices_at(optimizer: optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Whether ``optimizer`` moves a slice of ``parameter`` as it would move it as a part of the whole."""
    # States that were loaded may lie in another order than the parameter.
    tensors = [parameter, *(v for v in optimizer.state.get(parameter, {}).values() if isinstance(v, torch.Tensor))]
    if not all(tensor.is_contiguous() for tensor in tensors):
        return False
    if not _is_known_quantised(optimizer):
        return type(optimizer) in _ELEMENTWISE
    # Both keep a state in fp32 where a tensor is small, or its blocks do not come out even; a slice of one would.
    block_size = getattr(optimizer, "block_size", 1)
    smallest = getattr(getattr(optimizer, "args", None), "min_8bit_size", GRAIN)
    return parameter.numel() % block_size == 0 and GRAIN % block_size == 0 and smallest <= GRAIN


def _is_known_quantised(optimizer: optim.Optimizer) -> bool:
    kind = type(optimizer)
    return kind.__name__ in _QUANTISED.get(".".join(kind.__module__.split(".")[:2]), ())


def slice_state(state: Mapping[str, Any], numel: int, start: int, stop: int) -> dict[str, Any]:
    """The state of elements ``start`` to ``stop`` of a parameter with ``numel``: views, and a copy of each scalar."""
    return {name: _slice(name, value, numel, start, stop) for name, value in state.items()}


def _slice(name: str, value: Any, numel: int, start: int, stop: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if _is_quantised(value):
        return _slice_quantised(value, start, stop)
    if name.startswith("absmax"):
        return value[start // _BITSANDBYTES_BLOCK : -(-stop // _BITSANDBYTES_BLOCK)]
    if value.numel() == numel:
        return value.view(-1)[start:stop]
    return value.clone() if value.numel() == 1 else value


def merge_state(whole: dict[str, Any], part: Mapping[str, Any], parameter: torch.Tensor, start: int, stop: int) -> None:
    """Put back what a step over elements ``start`` to ``stop`` has left in ``part``; what it made new grows to full."""
    numel = parameter.numel()
    for name, value in part.items():
        if name not in whole or whole[name] is None:
            whole[name] = _grown(name, value, parameter, stop - start)
        mine = _slice(name, whole[name], numel, start, stop)
        if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor) and mine.shape == value.shape:
            if value.numel() == 1 and whole[name].numel() == 1:
                whole[name] = value
            elif _is_quantised(value):
                _copy_quantised(mine, value)
            elif not _is_same_memory(mine, value):
                mine.copy_(value)
        else:
            whole[name] = value


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """By storage and offset: a fake tensor has both, and no address."""
    storages = one.untyped_storage()._cdata, other.untyped_storage()._cdata
    return storages[0] == storages[1] and one.storage_offset() == other.storage_offset()


def _grown(name: str, value: Any, parameter: torch.Tensor, length: int) -> Any:
    """Room for the state of a whole parameter, from the one of a slice of ``length`` elements."""
    if not isinstance(value, torch.Tensor):
        return value
    if _is_quantised(value):
        return _grow_quantised(value, parameter)
    if name.startswith("absmax"):
        return value.new_empty(-(-parameter.numel() // _BITSANDBYTES_BLOCK))
    return value.new_empty(parameter.shape) if value.numel() == length else value


def copied(value: Any, device: torch.device) -> Any:
    """A copy on ``device``, also of a quantised tensor, in its own format."""
    if not hasattr(value, "__tensor_flatten__"):
        return value.detach().to(device, copy=True)
    names, context = value.__tensor_flatten__()
    return type(value).__tensor_unflatten__({name: copied(getattr(value, name), device) for name in names}, context)


def _is_quantised(value: Any) -> bool:
    """Whether it is one of torchao's tensors, which hold codes, one scale for each block of them, and a table."""
    return hasattr(value, "codes")


def _slice_quantised(value: Any, start: int, stop: int) -> Any:
    block = value.codes.numel() // value.scale.numel()
    return _rebuilt(value, value.codes.view(-1)[start:stop], value.scale[start // block : stop // block])


def _grow_quantised(value: Any, parameter: torch.Tensor) -> Any:
    block = value.codes.numel() // value.scale.numel()
    return _rebuilt(value, value.codes.new_empty(parameter.shape), value.scale.new_empty(parameter.numel() // block))


def _copy_quantised(target: Any, source: Any) -> None:
    target.codes.copy_(source.codes)
    target.scale.copy_(source.scale)


def _rebuilt(value: Any, codes: torch.Tensor, scale: torch.Tensor) -> Any:
    names, context = value.__tensor_flatten__()
    tensors = {name: getattr(value, name) for name in names} | {"codes": codes, "scale": scale}
    return type(value).__tensor_unflatten__(tensors, context)
