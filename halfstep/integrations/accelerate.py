"""halfstep under Accelerate: its ``Accelerator`` with a Stepper for each optimizer.

    accelerator = halfstep.integrations.accelerate.Accelerator(policy="auto", gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_fn(model(batch))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

The loop stays as it is: ``prepare``, ``backward``, ``clip_grad_norm_`` and ``step`` are what the Stepper does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import AutocastKwargs
from torch import nn
from torch.distributed.tensor import DTensor

from halfstep.errors import HalfstepError
from halfstep.gradients import gradients_of, norms_of
from halfstep.integrations.accelerate_optimizer import Optimizer
from halfstep.integrations.accelerate_prepared import PreparingAccelerator
from halfstep.integrations.accelerate_zero import EngineStepper, check_clipping, refuse


class Accelerator(PreparingAccelerator):
    """Accelerate's, in the formats of a policy.

    policy:      text or Policy; ``auto`` picks by the device and says why in ``accelerator.info``. None: what
                 ``mixed_precision`` or ``accelerate launch --mixed_precision`` says, else ``auto``.
    opens_regions: whether a forward pass of a prepared model opens the policy's region by itself and returns fp32, as
                 Accelerate does it. False for a loop that passes its micro-batches to the Stepper as closures.
    keep_casts, log, watch, sinks, contract: as for a Stepper.

    All other arguments are Accelerate's. ``optimizer.report`` of a prepared optimizer is the StepReport of its last
    window. The Steppers are built over what was prepared when the first pass runs or somebody asks for one; on several
    ranks by ``prepare``, which gets all models and optimizers at once.
    """

    # A micro-batch.

    def _region(self) -> AbstractContextManager[Any]:
        formats = self._formats()
        if not torch.is_grad_enabled():
            return formats.evaluation()
        self._is_open = True
        if not self._steppers:
            return formats
        stepper = self.stepper
        is_engine = isinstance(stepper, EngineStepper)
        return stepper.forward() if is_engine else stepper.forward(is_last=self.sync_gradients)

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """The policy's region; with ``AutocastKwargs(enabled=False)`` a part of it that computes as its tensors are."""
        with ExitStack() as stack:
            if autocast_handler is None or autocast_handler.enabled:
                stack.enter_context(self._region())
            else:
                stack.enter_context(torch.autocast(self.device.type, enabled=False))
            yield

    @contextmanager
    def holding(self) -> Iterator[list[torch.Tensor]]:
        """Inside, :meth:`backward` only keeps the loss in the list, for a Stepper that differentiates it itself."""
        held: list[torch.Tensor] = []
        self._held = held
        try:
            yield held
        finally:
            self._held = None

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """The scaled gradients of ``loss`` are added to those of the window. ``retain_graph`` as torch has it."""
        is_divided = self._has_engine and not kwargs.pop("scale_wrt_gas", True)
        if unknown := kwargs.keys() - {"retain_graph"}:
            raise HalfstepError(
                f"accelerator.backward({sorted(unknown)[0]}=...)",
                "the loss scale is where the gradient starts, and it ends in the window's sums",
                "Take such a gradient with torch.autograd.grad before, and put what it is for into the loss.",
            )
        if self.gradient_accumulation_steps > 1 and not self._has_engine:
            loss = loss / self.gradient_accumulation_steps
        if self._held is not None:
            self._held.append(loss)
            return
        stepper = self.stepper
        if not self._is_open:
            raise HalfstepError(
                "accelerator.backward(loss) without a call of a prepared model",
                "no region was open, so that the loss was computed in fp32",
                "Call what prepare() returned, model(x), or open accelerator.autocast() around the forward pass.",
            )
        for regions in self._regions.values():
            regions.close()
        if isinstance(stepper, EngineStepper):
            if kwargs:
                refuse("accelerator.backward(retain_graph=True)", "its engine takes one loss of a micro-batch")
            # The counts of a window add up to 1 where a loop has divided by what it holds, as the Trainer does.
            is_last = self.sync_gradients
            stepper.differentiate((loss, float(is_last)) if is_divided else loss, is_last=is_last)
        else:
            stepper.backward(loss, **kwargs)

    @property
    def share(self) -> float:
        """By what the losses of this window still have to be divided: they were, by a whole window's length."""
        return self.num_in_window / self.gradient_accumulation_steps if self.num_in_window else 1.0

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        # DeepSpeed's stepper says which micro-batch is a window's last; inside its own no_sync it may not say so.
        context: AbstractContextManager[None] = nullcontext() if self._has_engine else super().no_sync(model)
        return context

    def _do_sync(self) -> None:
        super()._do_sync()
        self.num_in_window = 1 if self.begins else self.num_in_window + 1
        self.begins = self.sync_gradients

    # The window's end.

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Make ``.grad`` the true gradient of the window, for a loop that looks at it or changes it before ``step()``.

        optimizer: one, or several; all by default.
        """
        chosen = self._optimizers if optimizer is None else optimizer
        self._unscale(chosen if isinstance(chosen, list | tuple) else [chosen], "unscale_gradients()")

    def _unscale(self, optimizers: Iterable[Optimizer], what: str) -> None:
        if self._has_engine:
            refuse(what)
        if not self.sync_gradients:
            raise HalfstepError(
                f"{what} before the last micro-batch of a window",
                "the coming ones would add scaled gradients to true ones",
                "Call it under 'if accelerator.sync_gradients:'.",
            )
        for optimizer in optimizers:
            stepper = self.stepper_of(optimizer)
            if stepper.masters:
                raise HalfstepError(
                    f"{what} under policy '{stepper.policy}'",
                    "the true gradient of a 16-bit weight would be rounded to 16 bit",
                    "Leave master out of the policy, or clip all parameters of the optimizer together.",
                )
            stepper.unscale(count=self.share)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """The true norm before clipping.

        All parameters of one optimizer are clipped by ``optimizer.step()``, in the one factor that also unscales. A
        part of them, those of several optimizers together, and another norm cost a pass, and a read from the device.
        Before the last micro-batch of a window nothing is clipped; the norm is that of the sums in this process.
        Under DeepSpeed the engine has clipped by then, and the norm is that of the last window.
        """
        if isinstance(stepper := self.stepper, EngineStepper):
            check_clipping(stepper, max_norm, norm_type)
            return stepper.norm()
        wanted = {id(parameter): parameter for parameter in _listed(parameters)}
        owners = [
            (optimizer, stepper)
            for optimizer, stepper in zip(self._optimizers, self.steppers, strict=True)
            if any(id(p) in wanted for p in gradients_of(optimizer))
        ]
        if not owners:
            raise HalfstepError(
                "clip_grad_norm_() of parameters without a gradient",
                "no prepared optimizer has one for any of them in this window",
                "Call it after accelerator.backward, with parameters of a prepared model.",
            )
        if not self.sync_gradients:
            held = [g for each, _ in owners for p, g in gradients_of(each).items() if id(p) in wanted]
            return norms_of(held)[1] / (self.stepper.scale.value * self.share)
        optimizer, stepper = owners[0]
        is_whole = len(owners) == 1 and all(id(p) in wanted for p in gradients_of(optimizer))
        if is_whole and norm_type == 2:
            return stepper.gradient_norm(max_norm, count=self.share)
        self._unscale([each for each, _ in owners], "clip_grad_norm_() of a part of an optimizer's parameters")
        own = {id(p) for each, _ in owners for p in gradients_of(each)}
        chosen = [p for key, p in wanted.items() if key in own]
        norm: torch.Tensor = self._clip_grad_norm_dtensor_aware(chosen, max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each element of the true gradient. One that was not finite is skipped nevertheless."""
        if self._has_engine:
            refuse("clip_grad_value_()")
        wanted = {id(parameter): parameter for parameter in _listed(parameters)}
        owners = [each for each in self._optimizers if any(id(p) in wanted for p in gradients_of(each))]
        self._unscale(owners, "clip_grad_value_()")
        torch.nn.utils.clip_grad_value_(list(wanted.values()), clip_value)


def _listed(parameters: Iterable[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
