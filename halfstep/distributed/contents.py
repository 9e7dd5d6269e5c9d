"""What a checkpoint holds: a run as named tensors, cut as they are cut over the ranks, and numbers.

    weights/NAME    as the model holds it, and rests/NAME what a 16-bit weight leaves out
    buffers/NAME    as rank 0 holds it
    optimizer/NAME/STATE
    gradients/NAME  the sums of a window that is open, where an engine has reduced them already
    rank/3/...      what is rank 3's alone: gradients that are still local, buffers that differ from rank 0's
    rank/3          its numbers: scale, window, random state
    run             numbers that all ranks share, and what the caller has added

Names are those of ``stepper.ranks.module``, the model without what DDP wraps around it, so that they are the same under
every engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from halfstep.distributed import optimizer_state, random_state
from halfstep.errors import HalfstepError
from halfstep.gradients import gradients_of
from halfstep.stepper import Stepper


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this rank holds a part of it alone, as a DTensor."""
    return hasattr(tensor, "device_mesh")


def parts_of(stepper: Stepper) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """The model's parameters by name, each once, its buffers, and what else ``state_dict()`` has, as extra state."""
    module = stepper.ranks.module
    # Before the parameters are looked at: it brings back the shards where forward has left whole weights.
    state = module.state_dict()
    of_parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    others = {name: value for name, value in state.items() if name not in of_parameters}
    buffers = {name: value for name, value in others.items() if isinstance(value, torch.Tensor)}
    extra = {name: value for name, value in others.items() if name not in buffers}
    return dict(module.named_parameters()), buffers, extra


def is_cut(module: nn.Module) -> bool:
    """Whether ranks hold parts of its parameters."""
    return any(is_sharded(parameter) for parameter in module.parameters())


def buffer_checksums(stepper: Stepper) -> dict[str, bytes]:
    """Of the bits of each buffer, to tell whether all ranks hold the same."""
    return {name: _checksum(value) for name, value in parts_of(stepper)[1].items()}


def contents_of(stepper: Stepper, extra: Any, checksums: Sequence[Mapping[str, bytes]]) -> dict[str, Any]:
    """What this rank has to store, by name. Tensors are those of the run, not copies.

    checksums: :func:`buffer_checksums` of each rank.
    """
    ranks = stepper.ranks
    own = f"rank/{ranks.rank}"
    parameters, buffers, extra_state = parts_of(stepper)
    names = {parameter: name for name, parameter in parameters.items()}
    state = stepper.state_dict(numbers_only=True)
    contents: dict[str, Any] = {f"weights/{name}": parameter.detach() for name, parameter in parameters.items()}
    rests = stepper.masters.named_rests()
    contents |= {f"rests/{name}": rest for name, rest in rests.items() if rest is not None}
    for name, value in buffers.items():
        is_own = ranks.rank > 0 and len({each.get(name) for each in checksums}) > 1
        contents[f"{own}/buffers/{name}" if is_own else f"buffers/{name}"] = value

    def put(name: str, value: torch.Tensor) -> None:
        contents[f"optimizer/{name}"] = value.detach()

    optimizer = optimizer_state.take_apart(stepper.optimizer, names, put)
    if state["window"]["num_micro_batches"]:
        for parameter, gradient in gradients_of(stepper.optimizer).items():
            _check_gradient(names[parameter], gradient)
            name = f"gradients/{names[parameter]}"
            contents[name if is_sharded(gradient) else f"{own}/{name}"] = gradient
    numbers = on_device(state, torch.device("cpu"))
    contents[own] = {"stepper": numbers, "random": random_state.save(stepper.region.device)}
    if ranks.rank == 0:
        contents["run"] = {
            "optimizer": optimizer,
            "scheduler": scheduler_state(stepper.scheduler),
            "extra_state": extra_state,
            "extra": extra,
        }
    return contents


def scheduler_state(scheduler: Any) -> dict[str, Any] | None:
    """The kind and state of a stepper's scheduler; one that has no state to give is refused."""
    if scheduler is None:
        return None
    if not hasattr(scheduler, "state_dict"):
        raise HalfstepError(
            f"a checkpoint with the scheduler {type(scheduler).__name__}",
            "it has no state_dict(), so that it would begin anew in the run that loads",
            "Give it state_dict() and load_state_dict(), as torch's schedulers have.",
        )
    return {"kind": optimizer_state.kind_of(scheduler), "state": scheduler.state_dict()}


def on_device(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor in its dicts on ``device``."""
    if isinstance(value, Mapping):
        return {key: on_device(each, device) for key, each in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value


def check_extra(extra: Any) -> None:
    """Refuse shards in what the caller adds, of which rank 0's part alone would be kept."""
    if isinstance(extra, Mapping | list | tuple):
        for each in extra.values() if isinstance(extra, Mapping) else extra:
            check_extra(each)
    elif isinstance(extra, torch.Tensor) and is_sharded(extra):
        raise HalfstepError(
            f"extra with a shard of a tensor of shape {tuple(extra.shape)}",
            "rank 0 writes extra, and has a part of this tensor alone",
            "Give it whole: tensor.full_tensor().",
        )


def _check_gradient(name: str, gradient: torch.Tensor) -> None:
    if gradient.is_sparse:
        raise HalfstepError(
            f"a checkpoint in mid-window with a sparse gradient of {name}",
            "torch.distributed.checkpoint stores dense tensors",
            "Save at a window's end, when stepper.step has returned a report.",
        )


def _checksum(buffer: torch.Tensor) -> bytes:
    if is_sharded(buffer):
        return b""  # nobody holds what another rank does
    bits = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(bits.numpy().data, digest_size=16).digest()
