"""A model on several ranks, whole on each: torch's DistributedDataParallel."""

from __future__ import annotations

import os
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.errors import HalfstepError
from halfstep.ranks.wire import Bf16Hook, check_wire, in_bf16


def replicate(model: nn.Module, *, wire: str = "fp32", **arguments: Any) -> nn.Module:
    """The model under torch's DistributedDataParallel; without ranks the model itself, so that the line may stay.

    model:     on the device that it trains on. Every rank begins with the weights and buffers of rank 0.
    wire:      ``fp32``, or ``bf16``: gradients travel in half the bytes and are summed in fp32, so that each element
               is rounded twice, however many ranks there are; see docs/communication.md.
    arguments: of DistributedDataParallel. ``device_ids`` is the model's device on CUDA unless it is given.

    Raises HalfstepError for several processes without an open process group, for a model that is wrapped already, and
    for what cannot travel in ``wire``.
    """
    check_wire(wire)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise HalfstepError(
            "replicate() of a model under DistributedDataParallel",
            "its gradients would be averaged twice",
            "Pass the model itself, or leave replicate() out.",
        )
    if not (distributed.is_available() and distributed.is_initialized()):
        num = int(os.environ.get("WORLD_SIZE", 1))
        if num == 1:
            return model
        raise HalfstepError(
            f"replicate() in one of {num} processes that do not know of each other",
            "no process group is open, and each would train a model of its own",
            "Call halfstep.distributed.start() first.",
        )
    if wire == "bf16":
        _check_bf16(model, arguments)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) == 1 and next(iter(devices)).type == "cuda":
        arguments.setdefault("device_ids", list(devices))
    wrapped = DistributedDataParallel(model, **arguments)
    group = wrapped.process_group
    if wire == "bf16" and distributed.get_world_size(group) > 1:
        wrapped.register_comm_hook(Bf16Hook(group), in_bf16)
    return wrapped


def _check_bf16(model: nn.Module, arguments: dict[str, Any]) -> None:
    if arguments.get("mixed_precision") is not None:
        raise HalfstepError(
            "wire='bf16' with DistributedDataParallel's mixed_precision",
            "that reduces gradients by a communication hook of its own",
            "Leave mixed_precision out; the policy of the Stepper says what computes in 16 bit.",
        )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise HalfstepError(
                f"wire='bf16' with module {name}, whose gradients are sparse",
                "ranks hold different rows of them",
                "Build it with sparse=False, or use wire='fp32'.",
            )
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise HalfstepError(
                f"wire='bf16' with parameter {name}, which is {parameter.dtype}",
                "bf16 holds real numbers",
                "Use wire='fp32'.",
            )
