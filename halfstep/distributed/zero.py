"""What a step sets in DeepSpeed's ZeRO optimizer: the factor of the loss, the divisor of the gradient, the verdict.

DeepSpeed divides gradients by its loss scale in one multiplication with the clip, after it has adapted that scale to
the verdict of the same step: a step on which the scale grows divides by twice what its loss was multiplied with. Here
the number stays what it is told to be, so it can also carry the true count of a window, and adapting it comes after the
step. Works on private parts of DeepSpeed; each is looked for, and one that is gone is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from halfstep.distributed.deepspeed_settings import STAGES
from halfstep.errors import HalfstepError
from halfstep.ranks.group import Group
from halfstep.ranks.one import Copies


class ZeroOptimizer:
    """The ZeRO optimizer of a DeepSpeed engine, whose loss scale is what we say.

    Two kinds of class: those that hold a loss scaler, and BF16_Optimizer (stage 1 with bf16 weights) that has none, so
    that its gradients are divided here.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        self._has_scaler = hasattr(self._optimizer, "loss_scaler")
        needed = ("_update_scale", "overflow") if self._has_scaler else ("get_grads_for_norm",)
        missing = [name for name in needed if not hasattr(self._optimizer, name)]
        if missing:
            raise HalfstepError(
                f"a {type(self._optimizer).__name__} without {missing[0]}",
                "this version of DeepSpeed steps in another way than the one that halfstep knows, 0.19",
                "Install a DeepSpeed that docs/deepspeed.md names.",
            )
        self._skips = False
        if self._has_scaler:
            self._optimizer._update_scale = self._decide
        # torch's scaler judges the shard of one rank, and clips what is still scaled.
        self._optimizer.torch_autocast_gradscaler = None

    def _decide(self, has_overflow: bool = False) -> None:
        """In place of the update of the scale, when DeepSpeed knows its verdict and before it acts on it."""
        if self._skips:
            self._optimizer.overflow = True

    def show_scale(self, scale: float) -> None:
        """Let DeepSpeed's own logs and checkpoints hold the loss scale of the run."""
        if self._has_scaler:
            self._optimizer.loss_scaler.cur_scale = scale

    def backward(self, loss: torch.Tensor, factor: float) -> None:
        """Backward of ``loss`` x ``factor`` into DeepSpeed's sums, which are means over ranks."""
        if self._has_scaler:
            self._optimizer.loss_scaler.cur_scale = factor
        elif factor != 1.0:
            loss = loss * factor
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self, divisor: float, skips: bool) -> tuple[bool, float]:
        """Divide by ``divisor``, clip, step; whether the weights moved, and the true norm of the gradient.

        skips: drop the gradient whatever it is.
        """
        self._skips = skips
        if self._has_scaler:
            # An infinite divisor would make a gradient of zeros, with which Adam still moves.
            self._optimizer.loss_scaler.cur_scale = 1.0 if skips else divisor
        elif skips or divisor != 1.0:
            torch._foreach_div_(self._optimizer.get_grads_for_norm(for_clipping=True), 0.0 if skips else divisor)
        self._engine.step()
        return self._engine.was_step_applied(), float(self._engine.get_global_grad_norm())


class ZeroRanks(Group):
    """The data-parallel ranks of a DeepSpeed engine, whose forward and backward passes are those of all of them."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.module, engine.seq_data_parallel_group)
        self._engine = engine
        self.device = engine.device  # weights may lie elsewhere, as offloaded ones do

    def is_alone(self, is_last: bool) -> bool:
        return False

    def copies(self) -> Sequence[Copies]:
        if self._engine.zero_optimization_stage() == 3:
            return ()
        return [Copies(0, 1, dict(self.module.named_parameters()))]

    def describe(self) -> Mapping[str, Any]:
        reduction = str(self._engine.communication_data_type).removeprefix("torch.")
        return {"engine": f"DeepSpeed ZeRO stage {self._engine.zero_optimization_stage():d}", "reduction": reduction}


def check_engine(engine: Any) -> None:
    """Refuse an engine whose gradients are not the mean over all ranks that DeepSpeed judges and clips."""
    if not hasattr(engine, "zero_optimization_stage"):
        raise HalfstepError(
            f"a DeepSpeedStepper over a {type(engine).__name__}",
            "it drives the engine that deepspeed.initialize() returns first",
            "Use halfstep.Stepper for a model.",
        )
    if (
        sys.modules["deepspeed.runtime.torch_autocast"].is_autocast_initialized()
        and not engine.torch_autocast_enabled()
    ):
        raise HalfstepError(
            "a DeepSpeed engine that was built after one with torch_autocast",
            "DeepSpeed switches it on for a process, and this engine would send gradients in the format of its weights",
            "Build this one first, or in a process of its own, or both by deepspeed_config(), which does without.",
        )
    stage = engine.zero_optimization_stage()
    bf16 = engine._config.bfloat16_config
    needs_guard = bf16.enabled and not bf16.check_grad_overflow
    faults = {
        f"with zero_optimization.stage={int(stage)}": stage not in STAGES,
        "without an optimizer": not hasattr(engine.optimizer, "torch_autocast_gradscaler"),
        "with bf16.check_grad_overflow=false": needs_guard,
        "with zero_optimization.compute_grad_norm=false": not engine.zero_compute_grad_norm(),
        "with managed_gradient_accumulation=false": not engine.managed_gradient_accumulation(),
        "with gradient_allreduce_op=sum": not engine.gradient_average,
        "with pipeline parallelism": engine.pipeline_parallelism,
        "with tensor parallelism": engine.mp_world_size > 1,
        "with sequence parallelism": engine.sequence_parallel_size > 1,
        "with layers of experts": engine.has_moe_layers,
        "with ZenFlow": engine.zenflow,
        "whose loss scale was overridden": getattr(engine.optimizer, "custom_loss_scaler", False),
    }
    for fault, is_so in faults.items():
        if is_so:
            raise HalfstepError(
                f"a DeepSpeed engine {fault}",
                "its step is not one that is divided, judged and clipped as a whole by data-parallel ranks",
                "Build it with halfstep.distributed.deepspeed_config(policy, stage=1, 2 or 3).",
            )
