"""What ``fully_shard`` does with formats: in which one a weight is kept and gathered, and its gradient reduced.

torch shows that nowhere, so it is read from the groups that ``fully_shard`` has made, under the names that torch 2.11
and later give them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.modules.conv import _ConvNd

from halfstep.dtypes import FORMAT_OF, LOW_DTYPES
from halfstep.errors import HalfstepError
from halfstep.formats import FORMATS, SIXTEEN_BIT
from halfstep.policy import Policy
from halfstep.ranks.wire import Bf16ReduceScatter
from halfstep.weights import formats_of


@dataclass(frozen=True)
class Gather:
    """How one weight is brought together.

    kept, gathered: its format as a shard and where it computes. reduced: that of its gradient, None of a frozen one.
    policy: the group's ``MixedPrecisionPolicy``.
    """

    name: str
    owner: nn.Module
    parameter: torch.Tensor
    kept: torch.dtype
    gathered: torch.dtype
    reduced: torch.dtype | None
    policy: Any


def gathers_of(model: nn.Module) -> list[Gather]:
    """Of every weight under ``fully_shard``, tied ones once."""
    groups = {}
    for group in _groups(model):
        for each in group.fsdp_params:
            # By name, since loading and to_empty() may have put another tensor there.
            owner = each._module_info.module
            groups[id(getattr(owner, each._module_info.param_name))] = owner, group.mp_policy
    return [
        Gather(name, groups[id(p)][0], p, p.dtype, *_formats(p, groups[id(p)][1]), groups[id(p)][1])
        for name, p in model.named_parameters()
        if id(p) in groups
    ]


def _groups(model: nn.Module) -> list[Any]:
    states: dict[int, Any] = {}  # several modules may share one
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = fully_shard.state(module)  # type: ignore[attr-defined]  # contract() adds it
            states[id(state)] = state
    # torch 2.11 has one group a state; newer ones may have several.
    lists = [getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states.values()]
    return [group for groups in lists for group in groups if group is not None]


def _formats(parameter: torch.Tensor, policy: Any) -> tuple[torch.dtype, torch.dtype | None]:
    gathered = policy.param_dtype if policy.param_dtype and parameter.is_floating_point() else parameter.dtype
    return gathered, (policy.reduce_dtype or gathered) if parameter.requires_grad else None


def formats_in_words(model: nn.Module) -> dict[str, str]:
    """For the precision contract: what is gathered and reduced in which format, by the module that a group begins with.

    ``{"shards of blocks.0": "bf16 weights, fp32 gradients"}``
    """
    paths = {module: path for path, module in model.named_modules()}
    words = {}
    for group in _groups(model):
        parameters = [getattr(each._module_info.module, each._module_info.param_name) for each in group.fsdp_params]
        formats = [_formats(parameter, group.mp_policy) for parameter in parameters]
        gathered = _names({gathered for gathered, _ in formats})
        reduced = _names({reduced for _, reduced in formats if reduced is not None}) or "no"
        what = f"{gathered} weights, {reduced} gradients{_wire_of(group)}"
        words[f"shards of {paths[group.modules[0]] or 'the model'}"] = what
    return words


def _wire_of(group: Any) -> str:
    """How its gradients travel, where that is not as they are reduced."""
    reduction = getattr(group, "_reduce_scatter_comm", None)
    if isinstance(reduction, Bf16ReduceScatter):
        return " sent in bf16"
    is_of_torch = reduction is None or type(reduction).__module__.startswith("torch.")
    return "" if is_of_torch else f" sent by {type(reduction).__name__}, which is unknown"


def check_gathers(model: nn.Module, policy: Policy, warns: bool) -> None:
    """Refuse weights that reach the model in another format than the policy computes in, and warn of what is rounded.

    Weights that are gathered in fp32 fit every policy, since autocast casts them.
    """
    formats = formats_of(model, policy)
    paths = {module: path for path, module in model.named_modules()}
    gathers = gathers_of(model)
    for each in gathers:
        format = formats[each.parameter]
        if format not in SIXTEEN_BIT:
            # What a layer of 16 bit keeps in fp32, such as a vector, is not wrong in 16 bit, but rounded: see below.
            format = policy.format_of(paths[each.owner])
        wanted = FORMATS[format].dtype
        if each.gathered in LOW_DTYPES and each.gathered != wanted and each.kept != each.gathered:
            raise HalfstepError(
                f"policy {policy} over fully_shard with param_dtype={each.gathered}",
                f"parameter {each.name} reaches the model in {_names({each.gathered})}, and the policy computes in "
                f"{_names({wanted})} there",
                "Use halfstep.distributed.shard(model, policy), or give both the same format.",
            )
    if warns and (said := _rounds(gathers, formats)):
        warnings.warn(
            f"fully_shard, as this model was sharded, {'; '.join(said)}. halfstep.distributed.shard(model, policy) "
            "does not.",
            stacklevel=5,
        )


def _rounds(gathers: list[Gather], formats: dict[torch.Tensor, str]) -> list[str]:
    """What is rounded that the policy keeps in fp32."""
    said = []
    rounded = [each for each in gathers if each.gathered in LOW_DTYPES and each.kept not in LOW_DTYPES]
    # Under autocast too a product rounds its bias.
    vectors = [e for e in rounded if formats[e.parameter] not in SIXTEEN_BIT and not _is_bias(e)]
    if vectors:
        names = ", ".join(each.name for each in vectors[:3])
        dots = ", ..." if len(vectors) > 3 else ""
        said.append(
            f"rounds {len(vectors)} weights to {_names({e.gathered for e in vectors})} that the policy keeps in fp32 "
            f"({names}{dots})"
        )
    if any(each.policy.cast_forward_inputs for each in rounded):
        said.append("rounds what flows from block to block (cast_forward_inputs)")
    if any(each.policy.output_dtype in LOW_DTYPES for each in gathers):
        said.append("rounds outputs (output_dtype)")
    if reduced := {e.reduced for e in gathers if e.reduced in LOW_DTYPES}:
        said.append(f"adds gradients up in {_names(reduced)} (reduce_dtype)")
    return said


def _is_bias(gather: Gather) -> bool:
    return isinstance(gather.owner, nn.Linear | _ConvNd | nn.MultiheadAttention)


def _names(dtypes: set[Any]) -> str:
    return ", ".join(sorted(FORMAT_OF[dtype].name if dtype in FORMAT_OF else str(dtype) for dtype in dtypes))
