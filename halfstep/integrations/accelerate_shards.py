"""FSDP2 under Accelerate: weights are cut by halfstep's ``shard``, in the formats of the policy.

Accelerate has one MixedPrecisionPolicy for all weights of a model, which rounds norms with the products between them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import accelerate.accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn

from halfstep.distributed.sharding import shard
from halfstep.errors import HalfstepError
from halfstep.policy import Policy


def use_shards(state: AcceleratorState, plugin: FullyShardedDataParallelPlugin | None) -> None:
    """Check what the run says about FSDP. On CPUs, where Accelerate drops it without a word, it takes effect.

    Raises HalfstepError for FSDP1, and for settings that say what the policy says or that ``shard`` does not know.
    """
    is_asked = plugin is not None or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if state.distributed_type == DistributedType.MULTI_CPU and is_asked:
        state.fsdp_plugin = plugin or FullyShardedDataParallelPlugin()
        state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    if state.distributed_type == DistributedType.FSDP:
        _check(state.fsdp_plugin)


def _check(plugin: FullyShardedDataParallelPlugin) -> None:
    if plugin.fsdp_version != 2:
        raise HalfstepError(
            "FullyShardedDataParallel (fsdp_version=1)",
            "its flat parameters hide which part of a gradient a rank holds, and torch has replaced it",
            "Use FullyShardedDataParallelPlugin(fsdp_version=2), or --fsdp_version 2 of the launcher.",
        )
    faults = {
        "mixed_precision_policy": plugin.mixed_precision_policy is not None,
        "cpu_offload": bool(getattr(plugin.cpu_offload, "pin_memory", False)),
        "ignored_modules": plugin.ignored_modules is not None,
        "min_num_params": bool(plugin.min_num_params),
    }
    fixes = {
        "mixed_precision_policy": ("the policy says which weights are gathered in which format", "policy='bf16'"),
        "cpu_offload": ("the verdict is taken where the model computes", "DeepSpeed, which offloads by itself"),
        "ignored_modules": ("nobody would reduce their gradients", "requires_grad_(False) for them"),
        "min_num_params": ("blocks are classes of modules", "transformer_cls_names_to_wrap"),
    }
    for name, is_so in faults.items():
        if is_so:
            why, instead = fixes[name]
            raise HalfstepError(f"FullyShardedDataParallelPlugin({name}=...)", why, f"Leave it out, and use {instead}.")


@contextmanager
def own_sharding(policy: Policy) -> Iterator[None]:
    """Inside, Accelerate's ``prepare`` cuts a model as :func:`halfstep.distributed.shard` does."""

    def cut(accelerator: accelerate.Accelerator, model: nn.Module) -> nn.Module:
        plugin = accelerator.state.fsdp_plugin
        names = plugin.transformer_cls_names_to_wrap or ()
        names = names.split(",") if isinstance(names, str) else names
        blocks = {type(module) for module in model.modules() if type(module).__name__ in names}
        if len(blocks) < len(set(names)):
            raise HalfstepError(
                f"transformer_cls_names_to_wrap={list(names)}",
                f"the model has modules of {len(blocks)} of these classes",
                "Name classes that the model has, or none for its own blocks.",
            )
        return shard(
            model,
            policy,
            mesh=_mesh(accelerator),
            blocks=blocks or None,
            reshard_after_forward=bool(plugin.reshard_after_forward),
        )

    # By this name, in the middle of what it does with the optimizers.
    with mock.patch.object(accelerate.accelerator, "fsdp2_prepare_model", cut):
        yield


def _mesh(accelerator: accelerate.Accelerator) -> Any:
    mesh, layout = accelerator.torch_device_mesh, accelerator.parallelism_config
    if mesh is None or layout is None:
        return None
    if layout.tp_enabled or layout.cp_enabled or layout.sp_enabled:
        raise HalfstepError(
            "a ParallelismConfig with tensor, context or sequence parallelism",
            "a gradient's norm is taken over ranks that replicate or shard",
            "Use dp_replicate_size and dp_shard_size alone.",
        )
    return mesh[tuple(layout.fsdp_dim_names)]
