"""Shards: a Policy turned into torch's ``fully_shard`` (FSDP2), weight by weight.

Every rank keeps a part of each fp32 weight, of its gradient and of the optimizer's state. A block's weights are
gathered, in the 16-bit format that the policy computes in, just before the block runs. Torch gives all weights of a
group one format, and so would round norms with the products that they stand between. Here the model itself is the first
group, of what stays fp32 wherever it stands, and each block becomes a group of what is left in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from halfstep.distributed.blocks import blocks_of
from halfstep.distributed.bundles import bundles_of
from halfstep.dtypes import LOW_DTYPES
from halfstep.errors import HalfstepError
from halfstep.formats import FORMATS, SIXTEEN_BIT
from halfstep.hardware import detect
from halfstep.policy import Policy, check_module_rules, resolve
from halfstep.ranks.agreement import agree, together
from halfstep.ranks.digests import differing, digest_of
from halfstep.ranks.group import Group
from halfstep.ranks.shards import group_of
from halfstep.ranks.wire import Bf16ReduceScatter, check_wire
from halfstep.region import device_of
from halfstep.weights import widen_embedding


def mixed_precision(format: str) -> MixedPrecisionPolicy:
    """torch's settings for weights that are gathered in ``format``. Gradients are reduced in fp32.

    Inputs and outputs are left as they come, since a region casts at each operation.
    """
    dtype = FORMATS[format].dtype if format in SIXTEEN_BIT else None
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def shard(
    model: nn.Module,
    policy: str | Policy = "auto",
    *,
    mesh: DeviceMesh | None = None,
    blocks: Iterable[type[nn.Module] | str] | None = None,
    reshard_after_forward: bool = True,
    wire: str = "fp32",
) -> nn.Module:
    """Cut every parameter of ``model`` over the ranks, in place, and return it; all begin with the weights of rank 0.

    All ranks call it, before there is an optimizer.

    policy: the one that the Stepper gets. It says which weights are gathered in 16 bit, see docs/fsdp2.md.
    mesh:   which ranks; all by default. One of two dimensions replicates over the first and shards over the second.
    blocks: classes, or patterns of names, of the parts that are gathered one at a time; see :func:`blocks_of`.
    reshard_after_forward: free a block's weights after its forward pass, and gather them again for backward. False
            saves that collective, and keeps all weights in 16 bit on every rank.
    wire:   ``fp32``, or ``bf16``: gradients travel in half the bytes and are summed in fp32, so that each is rounded
            once; see docs/communication.md. For a mesh of one dimension.

    Without ranks it returns the model as it is, so that the line may stay.

    Raises HalfstepError for several processes without an open process group, for a parameter that cannot be cut or
    would lose its updates, and where ranks differ in what they ask for.
    """
    check_wire(wire)
    if not (distributed.is_available() and distributed.is_initialized()):
        _check_alone()
        return model
    if mesh is None:
        mesh = init_device_mesh(_kind_of(model), (distributed.get_world_size(),))
    _check_mesh(mesh, wire)
    index = f":{torch.cuda.current_device()}" if mesh.device_type == "cuda" else ""
    device = torch.device(mesh.device_type + index)
    # A model on meta has no device to compare numbers on. No random number is drawn, so that a seed stays what it was.
    ranks = Group(nn.utils.skip_init(nn.Linear, 1, 1, device=device), group_of(mesh))
    with together(ranks):
        requested, hardware = Policy.parse(policy), detect(str(device))
        _check_model(model)
        check_module_rules(requested.modules, [name for name, _ in model.named_modules()])
        parts = blocks_of(model, blocks)
    agreed = agree(ranks, requested, hardware)
    with together(ranks):
        effective, _ = resolve(requested, hardware, agreed)
        bundles = bundles_of(model, effective, parts)
    _check_alike(model, ranks)
    embeddings = [module for bundle in bundles for module in bundle.tables()]
    _start_alike(model, ranks)
    bundled = {parameter for bundle in bundles for parameter in bundle.parameters}
    fully_shard(model, mesh=mesh, mp_policy=mixed_precision("fp32"), ignored_params=bundled)
    for bundle in bundles:
        others = {p for module in bundle.modules for p in module.parameters()} - bundle.parameters
        fully_shard(
            bundle.modules if len(bundle.modules) > 1 else bundle.modules[0],
            mesh=mesh,
            mp_policy=mixed_precision(bundle.format),
            ignored_params=others,
            reshard_after_forward=reshard_after_forward and bundle.is_block,
        )
    for embedding in embeddings:
        widen_embedding(embedding)
    if wire == "bf16":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(Bf16ReduceScatter())  # type: ignore[arg-type]  # a private base class
    return model


def _start_alike(model: nn.Module, ranks: Group) -> None:
    """Send the weights and buffers of the first rank to the others, as DDP does; a model on meta has none yet."""
    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor.data) is torch.Tensor and not tensor.is_meta:
            value = tensor.detach().to(ranks.device)
            distributed.broadcast(value, group=ranks.group, group_src=0)
            tensor.data.copy_(value)


def _kind_of(model: nn.Module) -> str:
    """The kind of device that the model trains on: torch moves one that is still on the CPU to where NCCL works."""
    kind = device_of(model).type
    if kind in ("cpu", "meta"):
        return "cuda" if "nccl" in str(distributed.get_backend()) else "cpu"
    return kind


def _check_alike(model: nn.Module, ranks: Group) -> None:
    shapes = {name: f"{tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters()}
    if differing(ranks, [digest_of(shapes)])[0]:
        raise HalfstepError(
            "shard() of a model that is not the same on all ranks",
            "its parameters differ in name, shape, format, or in what is trained",
            "Build it alike on every rank.",
        )


def _check_alone() -> None:
    num = int(os.environ.get("WORLD_SIZE", 1))
    if num > 1:
        raise HalfstepError(
            f"shard() in one of {num} processes that do not know of each other",
            "no process group is open, and each would train a model of its own",
            "Call halfstep.distributed.start() first.",
        )


def _check_mesh(mesh: DeviceMesh, wire: str) -> None:
    if mesh.ndim > 1 and wire == "bf16":
        raise HalfstepError(
            f"wire='bf16' over a mesh of {mesh.ndim} dimensions",
            "torch adds up the gradients of its replicas in fp32",
            "Use a mesh of one dimension, or wire='fp32'.",
        )
    if mesh.ndim > 2 or (mesh.ndim == 2 and mesh.mesh_dim_names is None):
        raise HalfstepError(
            f"a mesh of {mesh.ndim} dimensions{'' if mesh.mesh_dim_names else ' without names'}",
            "weights are cut over one, or replicated over the first of two and cut over the second",
            'Use init_device_mesh(kind, (replicas, shards), mesh_dim_names=("replicate", "shard")).',
        )


def _check_model(model: nn.Module) -> None:
    wrapped = next((m for m in model.modules() if isinstance(m, FSDPModule | DistributedDataParallel)), None)
    if wrapped is not None:
        raise HalfstepError(
            f"shard() of a model with {type(wrapped).__name__} in it",
            "its gradients are brought together already",
            "Pass the model as it was built.",
        )
    for name, parameter in model.named_parameters():
        shape = f"shape {tuple(parameter.shape)}"
        if parameter.dim() == 0:
            raise HalfstepError(
                f"parameter {name}, a single number without a dimension",
                "fully_shard cuts along a first dimension",
                "Make it of shape (1,): nn.Parameter(value.reshape(1)).",
            )
        if not parameter.is_contiguous():
            raise HalfstepError(
                f"parameter {name} ({shape}), which is not contiguous",
                "fully_shard cuts contiguous memory alone",
                "Make it contiguous before: parameter.data = parameter.data.contiguous().",
            )
        if parameter.requires_grad and parameter.dtype != torch.float32:
            kind = str(parameter.dtype).removeprefix("torch.")
            is_low = parameter.dtype in LOW_DTYPES
            raise HalfstepError(
                f"trainable parameter {name} ({shape}) in {kind}",
                "a weight in 16 bit loses every update under half its last place"
                if is_low
                else "fully_shard reduces the gradients of a group in one format",
                "Make it fp32 before shard(): parameter.data = parameter.data.float(). It is gathered in the policy's "
                "format all the same.",
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            raise HalfstepError(
                f"embedding {name} with max_norm",
                "it scales its rows in place, in a gathered copy that is thrown away",
                "Leave max_norm out, or train on one device or under replicate().",
            )
