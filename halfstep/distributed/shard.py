"""Shards: a Policy turned into torch's ``fully_shard`` (FSDP2), weight by weight.

Every rank keeps a part of each fp32 weight, of its gradient and of the optimizer's state. A block's weights are
gathered, in the 16-bit format that the policy computes in, just before the block runs. Torch gives all weights of a
group one format, and so would round norms with the products that they stand between. Here the model itself is the first
group, of what stays fp32 wherever it stands, and each block becomes a group of what is left in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from halfstep.distributed.blocks import block_around, blocks_of
from halfstep.dtypes import LOW_DTYPES
from halfstep.errors import HalfstepError
from halfstep.formats import FORMATS, SIXTEEN_BIT
from halfstep.hardware import detect
from halfstep.policy import Policy, check_module_rules, resolve
from halfstep.ranks.shards import group_of
from halfstep.region import device_of
from halfstep.weights import formats_of, widen_embedding

MOST_FP32 = 1 / 8
"""Share of a block's weights up to which those in fp32 are gathered once for the whole model, beside the norms.

Above it all of the block is gathered in fp32, and autocast rounds what it would round on one device: up to twice the
bytes, where the other way would keep that share of the model gathered through the pass.
"""


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
) -> nn.Module:
    """Cut every parameter of ``model`` over the ranks, in place, and return it; all begin with the weights of rank 0.

    All ranks call it, before there is an optimizer.

    policy: the one that the Stepper gets. It says which weights are gathered in 16 bit, see docs/fsdp2.md.
    mesh:   which ranks; all by default. One of two dimensions replicates over the first and shards over the second.
    blocks: classes, or patterns of names, of the parts that are gathered one at a time; see :func:`blocks_of`.
    reshard_after_forward: free a block's weights after its forward pass, and gather them again for backward. False
            saves that collective, and keeps all weights in 16 bit on every rank.

    Raises HalfstepError without a process group, and for a parameter that cannot be cut or would lose its updates.
    """
    _check_start(model)
    if mesh is None:
        mesh = init_device_mesh(_kind_of(model), (distributed.get_world_size(),))
    elif mesh.ndim > 2 or (mesh.ndim == 2 and mesh.mesh_dim_names is None):
        raise HalfstepError(
            f"a mesh of {mesh.ndim} dimensions{'' if mesh.mesh_dim_names else ' without names'}",
            "weights are cut over one, or replicated over the first of two and cut over the second",
            'Use init_device_mesh(kind, (replicas, shards), mesh_dim_names=("replicate", "shard")).',
        )
    device = f"cuda:{torch.cuda.current_device()}" if mesh.device_type == "cuda" else mesh.device_type
    policy, _ = resolve(policy, detect(device))
    check_module_rules(policy.modules, [name for name, _ in model.named_modules()])
    _check_parameters(model)
    bundles = bundles_of(model, policy, blocks_of(model, blocks))
    embeddings = [module for bundle in bundles for module in bundle.tables()]
    _start_alike(model, mesh, device)
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
    return model


@dataclass(frozen=True)
class Bundle:
    """Parameters that one collective gathers, in one format, when the first of ``modules`` runs."""

    format: str
    modules: list[nn.Module]
    parameters: set[nn.Parameter]
    is_block: bool

    def tables(self) -> list[nn.Embedding]:
        """The embeddings whose fp32 table is gathered in 16 bit."""
        parts = (part for module in self.modules for part in module.modules())
        tables = {part: part.weight for part in parts if isinstance(part, nn.Embedding)}
        is_low = self.format in SIXTEEN_BIT
        return [e for e, w in tables.items() if is_low and w in self.parameters and w.dtype == torch.float32]


def bundles_of(model: nn.Module, policy: Policy, blocks: dict[str, nn.Module]) -> list[Bundle]:
    """What is gathered together, block by block, and beside them the 16-bit weights outside the blocks.

    The rest is the model's own group, gathered in fp32 for the whole pass: vectors and whatever else stays fp32 in a
    16-bit block, weights that two blocks share, and weights of the outermost module itself.
    """
    places: defaultdict[nn.Parameter, list[tuple[str, nn.Module]]] = defaultdict(list)
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                places[parameter].append((block_around(path, blocks), module))
    formats = _gathered(model, policy)
    held: defaultdict[str, defaultdict[str, list[nn.Parameter]]] = defaultdict(lambda: defaultdict(list))
    for parameter, owners in places.items():
        if len({block for block, _ in owners}) == 1 and all(module is not model for _, module in owners):
            held[owners[0][0]][formats[parameter]].append(parameter)
    bundles = []
    for path, by_format in held.items():
        if path:
            format = _format_of_block(by_format)
            own = by_format[format] if format in SIXTEEN_BIT else [p for each in by_format.values() for p in each]
            bundles.append(Bundle(format, [blocks[path]], set(own), is_block=True))
        else:
            for format in by_format.keys() & SIXTEEN_BIT:
                modules = {module: None for p in by_format[format] for _, module in places[p]}
                bundles.append(Bundle(format, list(modules), set(by_format[format]), is_block=False))
    return bundles


def _gathered(model: nn.Module, policy: Policy) -> dict[torch.Tensor, str]:
    """The format that each parameter is gathered in: fp32 or one of 16 bit.

    As master weights are held, but for tables that are looked up, unless a rule asks for 16 bit: autocast leaves them
    in fp32, and the gradient of a 16-bit table is summed up in 16 bit on a CPU, where it stops growing.
    """
    formats = {p: format if format in SIXTEEN_BIT else "fp32" for p, format in formats_of(model, policy).items()}
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and policy.rule_of(path) not in SIXTEEN_BIT:
            formats[module.weight] = "fp32"
    # What is fp64 stays so, as under autocast.
    return {p: "fp32" if p.dtype == torch.float64 else format for p, format in formats.items()}


def _format_of_block(by_format: dict[str, list[nn.Parameter]]) -> str:
    """The format that most of a block is gathered in."""
    sizes = {format: sum(p.numel() for p in each if p.dim() > 1) for format, each in by_format.items()}
    low = sizes.keys() & SIXTEEN_BIT
    is_mixed = len(low) > 1 or sizes.get("fp32", 0) > MOST_FP32 * sum(sizes.values())
    return "fp32" if is_mixed or not low else low.pop()


def _start_alike(model: nn.Module, mesh: DeviceMesh, device: str) -> None:
    """Send the weights and buffers of the first rank to the others, as DDP does; of a model on meta there are none."""
    group = group_of(mesh)
    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor.data) is torch.Tensor and not tensor.is_meta:
            value = tensor.detach().to(device)
            distributed.broadcast(value, group=group, group_src=0)
            tensor.data.copy_(value)


def _kind_of(model: nn.Module) -> str:
    """The kind of device that the model trains on: torch moves one that is still on the CPU to where NCCL works."""
    kind = device_of(model).type
    if kind in ("cpu", "meta"):
        return "cuda" if "nccl" in str(distributed.get_backend()) else "cpu"
    return kind


def _check_start(model: nn.Module) -> None:
    if not (distributed.is_available() and distributed.is_initialized()):
        raise HalfstepError(
            "shard(model) without a process group",
            "there are no other ranks to share the weights with",
            "Call halfstep.distributed.start() first, in a program that torchrun started; for one device leave shard() "
            "out.",
        )
    wrapped = next((m for m in model.modules() if isinstance(m, FSDPModule | DistributedDataParallel)), None)
    if wrapped is not None:
        raise HalfstepError(
            f"shard(model) of a model with {type(wrapped).__name__} in it",
            "its gradients are brought together already",
            "Give it the model as it was built.",
        )


def _check_parameters(model: nn.Module) -> None:
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
