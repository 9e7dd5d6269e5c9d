"""The precision plugin of Lightning: its hooks, each at the moment that it is named for, over the Steppers of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.fabric.wrappers import _FabricOptimizer
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from halfstep.dtypes import LOW_DTYPES
from halfstep.errors import HalfstepError
from halfstep.events import RunInfo, StepReport
from halfstep.hardware import Hardware
from halfstep.integrations.lightning.checks import check_module, check_promotion, check_strategy
from halfstep.integrations.lightning.schedulers import hold_schedulers
from halfstep.integrations.lightning.windows import NO_REPLAY, Settings, Windows
from halfstep.policy import Policy
from halfstep.ranks.contract import DEFAULT, Contract
from halfstep.region import Region
from halfstep.stepper import Event
from halfstep.watch.settings import Watch


class Precision(LightningPrecision):
    """``Trainer(plugins=Precision("auto"))`` and ``Fabric(plugins=Precision("bf16"))``: a loop's steps by a Stepper.

    policy: text or Policy; ``auto`` picks by the device and says why in :attr:`info`.
    keep_casts, log, watch, sinks, contract: as for a Stepper. The log of a second optimizer has ``-2`` at its end.

    Lightning runs a training step once, so that a policy that says ``on_overflow=replay`` is one that skips; the plugin
    says so, in a warning and in :attr:`info`.
    """

    def __init__(
        self,
        policy: str | Policy = "auto",
        *,
        keep_casts: bool = False,
        log: str | os.PathLike[str] | None = None,
        watch: Watch | str | os.PathLike[str] | bool = True,
        sinks: Sequence[Callable[[Event], None]] = (),
        contract: Contract = DEFAULT,
        hardware: Hardware | None = None,
    ) -> None:
        self._settings = Settings(Policy.parse(policy), keep_casts, log, watch, tuple(sinks), contract, hardware)
        self._trainer: Trainer | None = None
        self._models: list[nn.Module] = []
        self._windows: Windows | None = None
        self._region: Region | None = None
        self._saved: Mapping[str, Any] | None = None
        self._again: Callable[[], torch.Tensor] | None = None
        self._is_looking = self._has_warned = False
        self._release: Callable[[], None] | None = None
        self._stepped: StepReport | None = None  # in the training step that runs, or that has just run

    def __repr__(self) -> str:
        return f"halfstep.integrations.lightning.Precision({str(self._settings.policy)!r})"

    # What the user asks.

    @property
    def info(self) -> RunInfo:
        """The policy asked for, the one in effect, why they differ, and the device."""
        if self._windows:
            return self._windows.info
        if self._region:
            return self._region.info
        raise HalfstepError(
            "info of a precision plugin before there is a model",
            "which policy is in effect depends on its device",
            "Ask after trainer.fit(), in a hook of the module, or after the first forward pass under Fabric.",
        )

    @property
    def precision(self) -> str:
        """What ``trainer.precision`` shows: the policy in effect, and before there is a model the one asked for."""
        return self.info.effective if self._windows or self._region else str(self._settings.policy)

    @property
    def report(self) -> StepReport | None:
        """The StepReport of the last window, of whichever optimizer. None before the first."""
        return self._windows.report if self._windows else None

    def report_of(self, optimizer: Optimizer) -> StepReport | None:
        """The StepReport of the last window of an optimizer, for a loop with several."""
        return self._windows.report_of(_unwrapped(optimizer)) if self._windows else None

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Make every ``.grad`` of an optimizer the true gradient, for who looks at it; one read and one pass."""
        self._unscale(_unwrapped(optimizer))

    def _unscale(self, optimizer: Optimizer) -> bool:
        """As :meth:`unscale_gradients`; whether there are gradients, and finite ones."""
        windows = self._steps
        if not windows.holds(optimizer):
            return False
        return windows.stepper_of(optimizer).unscale(count=self._count(optimizer))

    @property
    def _steps(self) -> Windows:
        if self._windows is None:
            raise HalfstepError(
                "a backward pass before the first forward pass of a model",
                "the policy is not yet in effect",
                "Call the model that fabric.setup() returned.",
            )
        return self._windows

    def _count(self, optimizer: Optimizer) -> float:
        trainer, whole = self._trainer, None
        if trainer is not None and trainer.lightning_module.automatic_optimization:
            whole = trainer.accumulate_grad_batches
        return self._steps.count(optimizer, whole)

    # The Trainer: before a run, and after it.

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        module: Any = model if isinstance(model, LightningModule) else model.module
        trainer = self._trainer = module.trainer
        check_strategy(type(trainer.strategy).__name__)
        if trainer.state.fn == "fit":
            check_module(module, optimizers)
            if not module.automatic_optimization:
                check_promotion(self._settings.policy, "manual optimization")
            self._windows, self._region = Windows(model, optimizers, self._settings), None
            self._warn()
            self._release = hold_schedulers(module, lambda: self._stepped is not None and self._stepped.applied)
        elif not self._windows or self._windows.first.region.model is not module:
            self._windows, self._region = None, Region(module, self._settings.policy, self._settings.hardware)
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        if self._release:
            self._release()
            self._release = None
        if self._windows:
            self._windows.close()

    def _warn(self) -> None:
        if self._windows and self._windows.drops_replay and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(f"{NO_REPLAY} (policy {self._settings.policy}). Add on_overflow=skip to say so yourself.")

    # A forward pass.

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        if self._is_looking:  # a diagnosis opens its own region
            yield
            return
        self._stepped = None
        with self._steps.forward(is_last=self._is_last):
            yield

    @property
    def _is_last(self) -> bool:
        """Whether the window ends with this micro-batch, as far as the loop knows."""
        trainer = self._trainer
        if trainer is None or not trainer.lightning_module.automatic_optimization:
            return True
        return not trainer.fit_loop._should_accumulate()

    def forward_context(self) -> AbstractContextManager[Any]:
        if self._trainer is not None:
            return self._evaluation()
        if self._windows is None and self._region is None:
            self._begin_fabric()
        if self._windows and torch.is_grad_enabled():
            return self._windows.forward(is_last=True)
        return self._evaluation()

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        """The policy's formats; whether there are gradients is the loop's business."""
        region = self._windows.first.region if self._windows else self._region
        is_inference, has_gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        with region.inference() if region else nullcontext():
            if is_inference:
                yield
            else:
                with torch.inference_mode(False), torch.set_grad_enabled(has_gradients):
                    yield

    def convert_output(self, data: Any) -> Any:
        """Under Fabric the loss is computed outside of the region: what the model returns in 16 bit becomes fp32."""
        return tree_map_only(torch.Tensor, lambda value: value.float() if value.dtype in LOW_DTYPES else value, data)

    # Fabric: which models there are is known at the first forward pass, and which optimizers when they step.

    def convert_module(self, module: nn.Module) -> nn.Module:
        if not (isinstance(module, LightningModule) and module._trainer is not None):
            self._models.append(module)
        return module

    def _begin_fabric(self) -> None:
        model = self._models[0] if len(self._models) == 1 else nn.ModuleList(self._models)
        if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
            check_strategy("ModelParallelStrategy")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            self._region = Region(model, self._settings.policy, self._settings.hardware)
        else:
            check_promotion(self._settings.policy, "Fabric")
            # What Fabric wraps around a model is not to be seen from here: ranks do not know of each other.
            is_first = not (torch.distributed.is_available() and torch.distributed.is_initialized())
            is_first = is_first or torch.distributed.get_rank() == 0
            settings = self._settings if is_first else replace(self._settings, log=None)
            self._windows = Windows(model, None, settings)
            self._warn()
            if self._saved is not None:
                self._windows.load_state_dict(self._saved)

    # A backward pass.

    def pre_backward(self, tensor: torch.Tensor, module: nn.Module | None) -> torch.Tensor:
        return super().pre_backward(tensor, module) if self._trainer is not None else tensor

    def backward(self, tensor: torch.Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        if type(model).__name__ == "DeepSpeedEngine":
            check_strategy("DeepSpeedStrategy")
        if self._trainer is not None:
            args = args[1:]  # the optimizer
        if others := [*args, *(kwargs.keys() - {"retain_graph"})]:
            raise HalfstepError(
                f"a backward pass with {', '.join(map(str, others))}",
                "a Stepper starts it from the scaled loss, over all parameters",
                "Leave it out; retain_graph may stay.",
            )
        retain_graph = bool(kwargs.get("retain_graph"))
        self._steps.backward(tensor, is_last=self._is_last, retain_graph=retain_graph, again=self._again)

    def post_backward(self, tensor: torch.Tensor, module: nn.Module | None) -> torch.Tensor:
        return super().post_backward(tensor, module) if self._trainer is not None else tensor.detach()

    # A window's end.

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        model, closure = kwargs.pop("model", None), kwargs.pop("closure", None)
        if kwargs:
            raise HalfstepError(
                f"optimizer.step({', '.join(kwargs)}=...)",
                "the Stepper calls step() of the optimizer without arguments",
                "Leave it out.",
            )
        if not isinstance(optimizer, Optimizer):
            check_strategy("DeepSpeedStrategy")
        windows = self._steps
        windows.stepper_of(optimizer)  # refuses what cannot work, before a closure runs
        # The closure of automatic optimization can run its training step alone, which a diagnosis asks for.
        run_again = getattr(closure, "_step_fn", None)
        self._again = partial(self._look, run_again) if run_again else None
        try:
            result = closure() if closure is not None else None
        finally:
            self._again = None
        holds = windows.holds(optimizer)
        if self._trainer is not None:
            if holds and self._is_looked_at(self._trainer, model):
                self._unscale(optimizer)
            self._after_closure(model, optimizer)
        if holds:
            self._stepped = windows.end(optimizer, self._count(optimizer))
            if self._trainer is not None and not model.automatic_optimization:
                # The next forward pass of this training step belongs to the next window.
                windows.forward(is_last=True)
        return result

    def _look(self, run: Callable[[], Any]) -> torch.Tensor:
        self._is_looking = True
        try:
            loss: torch.Tensor = run().closure_loss
        finally:
            self._is_looking = False
        return loss

    @staticmethod
    def _is_looked_at(trainer: Trainer, module: LightningModule) -> bool:
        """Whether a hook sees the gradients before the step: Lightning promises it true ones."""
        hook = "on_before_optimizer_step"
        return (
            is_overridden(hook, module)
            or (module.automatic_optimization and is_overridden("configure_gradient_clipping", module))
            or any(is_overridden(hook, callback, parent=Callback) for callback in trainer.callbacks)
        )

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip true gradients: by norm within the step, which costs no pass; by value at once."""
        optimizer = _unwrapped(optimizer)
        if clip_val <= 0 or not self._steps.holds(optimizer):
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.NORM:
            self._steps.stepper_of(optimizer).gradient_norm(clip_val, count=self._count(optimizer))
        elif self._unscale(optimizer):
            self.clip_grad_by_value(optimizer, clip_val)

    def main_params(self, optimizer: Optimizer) -> Iterator[torch.Tensor]:
        """What Lightning clips: a zero in a window that will be skipped, where its clip would raise an error."""
        optimizer = _unwrapped(optimizer)
        if self._unscale(optimizer) or not self._steps.holds(optimizer):
            yield from super().main_params(optimizer)
        else:
            nothing = torch.zeros((), device=self._steps.first.region.device)
            nothing.grad = torch.zeros_like(nothing)
            yield nothing

    # State.

    def state_dict(self) -> dict[str, Any]:
        return self._windows.state_dict() if self._windows else {}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A run of ``precision="16-mixed"`` goes on with the loss scale that it had."""
        if self._windows:
            self._windows.first.scale.load_from_scaler(checkpoint.get("MixedPrecision", {}))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._windows:
            self._windows.load_state_dict(state_dict)
        else:
            self._saved = state_dict


def _unwrapped(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer | _FabricOptimizer) else optimizer
