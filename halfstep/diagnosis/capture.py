"""One micro-batch that can run again: same weights, buffers, batch and random state, under any policy and scale.

What a diagnosis claims is tried on it first. A run leaves nothing behind: gradients, buffers and random state are
afterwards what they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from halfstep.dtypes import LOW_DTYPES
from halfstep.gradients import norms_of
from halfstep.hardware import Hardware
from halfstep.policy import Policy
from halfstep.region import Region
from halfstep.snapshot import RandomState
from halfstep.window import Loss, over, read_loss


@dataclass(frozen=True)
class Outcome:
    """What one run of a captured micro-batch gave.

    loss: true loss. grad_norm: true global 2-norm. gradients: of each parameter by name, times scale / unit.
    """

    loss: float
    grad_norm: float
    gradients: dict[str, torch.Tensor]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Capture:
    """A micro-batch of ``model`` at the moment when this object is made.

    closure: runs the forward pass on ``model`` and returns the loss, or (sum, count), the same each time.
    policy:  the one that it ran under. scale, unit: backward starts from scale / unit, as a Stepper's does.
    step:    number of the window that it belongs to.
    """

    def __init__(
        self,
        model: nn.Module,
        closure: Callable[[], Loss],
        policy: Policy,
        *,
        scale: float = 1.0,
        unit: float = 1.0,
        step: int = 1,
        hardware: Hardware | None = None,
    ) -> None:
        self.model, self.closure, self.policy = model, closure, policy
        self.scale, self.unit, self.step, self.hardware = scale, unit, step, hardware
        self._regions: dict[str, Region] = {}
        self._own_region = self.region(policy)  # first, so that its kernels stay for the others
        self._random_state = RandomState(self._own_region.device)
        self._random_state.save()
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    @property
    def device(self) -> torch.device:
        return self._own_region.device

    def region(self, policy: Policy) -> Region:
        """The region of a policy over the model. HalfstepError where the device cannot do it."""
        text = str(policy)
        if text not in self._regions:
            self._regions[text] = Region(self.model, policy, self.hardware)
        return self._regions[text]

    def run(
        self,
        policy: Policy | None = None,
        scale: float | None = None,
        under: Sequence[AbstractContextManager[object]] = (),
    ) -> Outcome:
        """Forward and backward once, in ``policy`` at ``scale`` (those of the capture by default), inside ``under``."""
        region = self.region(policy or self.policy)
        factor = torch.tensor(self.scale if scale is None else scale, device=region.device)
        with self._as_captured(), ExitStack() as stack:
            for context in under:
                stack.enter_context(context)
            with region:
                loss, count = read_loss(self.closure(), factor)
            start = over(factor, self.unit)
            with region.backward():
                wide = loss.float() if loss.dtype in LOW_DTYPES else loss
                wide.backward(start.to(wide.dtype))
            stack.close()
            named = self.model.named_parameters()
            gradients = {name: p.grad for name, p in named if p.grad is not None}
            norm = norms_of(gradients.values())[1] if gradients else torch.zeros(())
            divisor = factor * count / self.unit
            return Outcome((loss.detach().float() / count).item(), (norm / divisor).item(), gradients)

    @contextmanager
    def _as_captured(self) -> Iterator[None]:
        parameters = list(self.model.parameters())
        waiting = [p.grad for p in parameters]
        found = RandomState(self.device)
        found.save()
        buffers = [(buffer, buffer.detach().clone()) for buffer, _ in self._buffers]
        was_training = [module.training for module in self.model.modules()]
        _put(self._buffers)
        self._random_state.restore()
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(parameters, waiting, strict=True):
                parameter.grad = gradient
            for module, training in zip(self.model.modules(), was_training, strict=True):
                module.training = training
            _put(buffers)
            found.restore()


@torch.no_grad()
def _put(buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for buffer, value in buffers:
        buffer.copy_(value)
