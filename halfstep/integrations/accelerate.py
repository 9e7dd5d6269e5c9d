"""halfstep under Accelerate: its ``Accelerator`` with a Stepper for each optimizer.

    accelerator = halfstep.integrations.accelerate.Accelerator(policy="auto", gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_fn(model(batch))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

The loop stays as it is: ``prepare``, ``backward``, ``clip_grad_norm_`` and ``step`` are where the Stepper does its part.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from halfstep.errors import HalfstepError
from halfstep.events import RunInfo, StepReport
from halfstep.policy import Policy
from halfstep.ranks.contract import DEFAULT, Contract
from halfstep.stepper import Event, Stepper
from halfstep.watch.settings import Watch


class Optimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """What ``prepare`` makes of an optimizer: its ``step`` ends the window of a Stepper.

    report: the StepReport of the last window, None before the first.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device_placement: bool, accelerator: Accelerator) -> None:
        super().__init__(optimizer, device_placement=device_placement)
        self._accelerator = accelerator
        self.report: StepReport | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            raise HalfstepError(
                "optimizer.step(closure) under Accelerate",
                "the loss would be evaluated behind the back of accelerator.backward",
                "Use halfstep.Stepper with stepper.step(closure).",
            )
        if self.gradient_state.sync_gradients:
            self.report = self._accelerator.stepper_of(self).end_window(count=self._accelerator.share)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if self.gradient_state.sync_gradients:
            self._accelerator.stepper_of(self).drop()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped. With a fused optimizer only the device knows, and this reads from it."""
        return self.report is not None and not self.report.applied


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's, in the formats of a policy.

    policy:      text or Policy; ``auto`` picks by the device and says why in ``accelerator.info``. It is in the place of
                 ``mixed_precision``.
    opens_regions: whether a forward pass of a prepared model opens the policy's region by itself and returns fp32, as
                 Accelerate does it; False for a loop that opens ``accelerator.autocast()`` around model and loss.
    keep_casts, log, watch, sinks, contract: as for a Stepper.

    All other arguments are Accelerate's.
    """

    def __init__(
        self,
        *args: Any,
        policy: str | Policy = "auto",
        opens_regions: bool = True,
        keep_casts: bool = False,
        log: str | os.PathLike[str] | None = None,
        watch: Watch | str | os.PathLike[str] | bool = True,
        sinks: Sequence[Callable[[Event], None]] = (),
        contract: Contract = DEFAULT,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("mixed_precision") not in (None, "no"):
            raise HalfstepError(
                f"mixed_precision={kwargs['mixed_precision']!r} and a policy",
                "two would open regions and scale the loss",
                f"Leave mixed_precision out, and use policy={kwargs['mixed_precision']!r}.",
            )
        # Not None, which would ask the environment that a launcher has set.
        super().__init__(*args, **{**kwargs, "mixed_precision": "no"})
        self._policy = policy
        self._opens_regions = opens_regions
        self._settings: dict[str, Any] = {
            "keep_casts": keep_casts,
            "watch": watch,
            "sinks": sinks,
            "contract": contract,
        }
        self._log = log
        self._steppers: dict[Optimizer, Stepper] = {}
        self._num_in_window = 0
        self._held: list[torch.Tensor] | None = None

    # What is prepared.

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super().prepare(*args, **kwargs)
        self._build()
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        if not isinstance(optimizer, AcceleratedOptimizer):
            placement = self.device_placement if device_placement is None else device_placement
            optimizer = Optimizer(optimizer, placement, self)
            self._optimizers.append(optimizer)
        return optimizer

    def _build(self) -> None:
        """A Stepper for each optimizer that has none, once there is a model."""
        if not self._models:
            return
        model = self._models[0] if len(self._models) == 1 else nn.ModuleList(self._models)
        for optimizer in self._optimizers:
            if optimizer in self._steppers:
                continue
            beside = next(iter(self._steppers.values()), None)
            log = None if beside else self._log
            stepper = Stepper(
                model, optimizer.optimizer, self._policy, accumulate=None, beside=beside, log=log, **self._settings
            )
            self._steppers[optimizer] = stepper
            self.register_for_checkpointing(stepper)
            if self._opens_regions and beside is None:
                for each in self._models:
                    _open_regions(each, self._region)

    @property
    def stepper(self) -> Stepper:
        """The Stepper of the first optimizer; the others share its policy and its scale."""
        self._build()
        if not self._steppers:
            raise HalfstepError(
                "an Accelerator without a model and an optimizer",
                "a Stepper belongs to both",
                "Call accelerator.prepare(model, optimizer) first.",
            )
        return next(iter(self._steppers.values()))

    def stepper_of(self, optimizer: Optimizer) -> Stepper:
        """The Stepper of a prepared optimizer."""
        self._build()
        return self._steppers[optimizer]

    @property
    def info(self) -> RunInfo:
        """The policy asked for, the one in effect, why they differ, and the device."""
        return self.stepper.info

    # A micro-batch.

    def _region(self) -> AbstractContextManager[Any]:
        if torch.is_grad_enabled():
            return self.stepper.forward(is_last=self.sync_gradients)
        return self.stepper.region

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """The policy's region."""
        with self._region():
            yield

    @contextmanager
    def holding(self) -> Iterator[list[torch.Tensor]]:
        """Inside, :meth:`backward` only keeps the loss in the list, for a Stepper that differentiates it itself."""
        self._held = held = []
        try:
            yield held
        finally:
            self._held = None

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        if self.gradient_accumulation_steps > 1:
            loss = loss / self.gradient_accumulation_steps
        if self._held is not None:
            self._held.append(loss)
        else:
            self.stepper.backward(loss, **kwargs)

    @property
    def share(self) -> float:
        """By what the losses of this window still have to be divided: they were, by a whole window's length."""
        return self._num_in_window / self.gradient_accumulation_steps if self._num_in_window else 1.0

    def _do_sync(self) -> None:
        begins = self.sync_gradients
        super()._do_sync()
        self._num_in_window = 1 if begins else self._num_in_window + 1

    # The window's end.

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """The true norm before clipping; ``optimizer.step()`` then clips to ``max_norm``."""
        if norm_type != 2:
            raise HalfstepError(f"norm_type={norm_type}", "halfstep clips the 2-norm", "Leave norm_type out.")
        wanted = {id(parameter) for parameter in parameters}
        for optimizer, stepper in self._steppers.items():
            own = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
            if own <= wanted:
                return stepper.gradient_norm(max_norm, count=self.share)
        raise HalfstepError("a part of an optimizer's parameters", "TODO", "TODO")


def _open_regions(model: nn.Module, region: Callable[[], AbstractContextManager[Any]]) -> None:
    """Run every call of ``model`` in a region, and return its 16-bit outputs as fp32."""
    open_regions: list[AbstractContextManager[Any]] = []

    def enter(*_: Any) -> None:
        opened = region()
        opened.__enter__()
        open_regions.append(opened)

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        open_regions.pop().__exit__(None, None, None)
        return accelerate.utils.convert_to_fp32(output)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)
