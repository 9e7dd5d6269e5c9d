"""What the precision plugin refuses before a run, each in one line."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from halfstep.errors import HalfstepError
from halfstep.policy import Policy


def check_strategy(name: str) -> None:
    """Refuse a strategy, by the name of its class, that casts, scales or steps by itself."""
    for part, use in (
        ("FSDP", "halfstep.distributed.shard(model, policy)"),
        ("ModelParallel", "halfstep.distributed.shard(model, policy)"),
        ("DeepSpeed", "halfstep.distributed.DeepSpeedStepper(engine)"),
        ("XLA", "halfstep.Stepper on a CUDA device or a CPU"),
    ):
        if part in name:
            raise HalfstepError(
                f"{name} with halfstep's precision plugin",
                "it casts, scales or steps by itself",
                f"Use strategy='ddp', or {use} in a loop of your own.",
            )


def check_promotion(policy: Policy, loop: str) -> None:
    """Refuse ``on_exhausted=promote`` in a loop that cannot run a loss again."""
    if policy.on_exhausted == "promote":
        raise HalfstepError(
            f"on_exhausted=promote under {loop}",
            "the module at fault is found by running the loss again, which this loop cannot",
            "Use automatic optimization, or a rule: halfstep trace names the module.",
        )


def check_module(module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
    """Refuse a module that the plugin would not train, or not as it says."""
    if not optimizers or type(optimizers[0]).__name__ == "_MockOptimizer":
        raise HalfstepError(
            f"{type(module).__name__}.configure_optimizers() without an optimizer",
            "a precision plugin has no step to take",
            "Return one, or leave the plugin out.",
        )
    if is_overridden("backward", module):
        raise HalfstepError(
            f"{type(module).__name__}.backward",
            "the Stepper runs the backward pass, from the scaled loss",
            "Take it out; with self.automatic_optimization = False call self.manual_backward(loss).",
        )
