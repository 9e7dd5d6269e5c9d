"""Which engine brings the ranks of a model together."""

from __future__ import annotations

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.errors import HalfstepError
from halfstep.policy import Policy
from halfstep.ranks.one import Ranks


def ranks_of(model: nn.Module) -> Ranks:
    """The ranks of a model: under DistributedDataParallel, under fully_shard, or this process alone.

    Raises HalfstepError for a wrapper whose gradients cannot be judged from outside.
    """
    kind = type(model).__name__
    if kind == "DeepSpeedEngine":
        raise HalfstepError(
            "a Stepper over a DeepSpeed engine",
            "DeepSpeed accumulates, unscales, clips and steps itself",
            "Use halfstep.distributed.DeepSpeedStepper(engine), which gives the same reports.",
        )
    if not (distributed.is_available() and distributed.is_initialized()):
        return Ranks(model)
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise HalfstepError(
            "a model under FullyShardedDataParallel (FSDP1)",
            "its flat parameters hide which part of a gradient a rank holds, and torch has replaced it",
            "Use halfstep.distributed.shard(model, policy), which calls torch's fully_shard (FSDP2).",
        )
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    is_sharded = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
    if wrapped and is_sharded:
        raise HalfstepError(
            "a model with both DistributedDataParallel and DTensor parameters",
            "two engines would reduce its gradients",
            "Shard over a mesh of two dimensions instead (fully_shard replicates over the first one).",
        )
    if wrapped:
        from halfstep.ranks.replicas import Replicas

        return Replicas(model, wrapped)
    if is_sharded:
        from halfstep.ranks.shards import Shards

        return Shards(model)
    return Ranks(model)


def check_ranks(ranks: Ranks, policy: Policy, explains: bool) -> None:
    """Refuse what an engine cannot do, where each forward pass is one of all ranks, or does otherwise than said."""
    ranks.check(policy)
    if ranks.looks_alone:
        return
    if explains or policy.on_exhausted == "promote":
        what = "explain=True" if explains else "on_exhausted=promote"
        raise HalfstepError(
            f"{what} where each forward pass needs all ranks",
            "a diagnosis runs the step as often as its own rank needs",
            "Leave it out here; halfstep trace under torchrun explains a step.",
        )
