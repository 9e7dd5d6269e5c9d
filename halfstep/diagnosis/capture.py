"""One micro-batch that can run again: same weights, buffers, batch and random state, under any policy and scale.

What a diagnosis claims is tried on it first. A run leaves nothing behind: weights, gradients, buffers and random state
are afterwards what they were, also after an exception.
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
from halfstep.record import Producer, find_producer
from halfstep.region import Region
from halfstep.snapshot import RandomState, RunningStatistics
from halfstep.window import Loss, over, read_loss, unit_of


@dataclass(frozen=True)
class Outcome:
    """What one run of a captured micro-batch gave.

    loss: true loss. grad_norm: true global 2-norm. gradients: of each parameter by name, times scale / unit.
    A micro-batch that counts 0, as one without a token does, has its sums here, divided by 1.
    """

    loss: float
    grad_norm: float
    gradients: dict[str, torch.Tensor]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Capture:
    """A micro-batch of ``model`` at the moment when this object is made.

    closure: runs the forward pass on ``model`` and returns the loss, or (sum, count), the same each time: its batch is
             drawn before, and what it changes besides buffers (a plain attribute of a module) is not put back.
    policy:  the one that it ran under.
    scale, unit: backward starts from scale / unit, as a Stepper's does. A unit of None comes from the count of the
             micro-batch, as in the first one of a Stepper.
    step:    number of the window that it belongs to.

    A run in the policy of the capture does what the step did, to the bit. Any other policy sees 16-bit weights (of a
    layout of master weights, or of a frozen base) widened to fp32, which changes none of their values and takes 4 more
    bytes for each of them while it runs.
    """

    def __init__(
        self,
        model: nn.Module,
        closure: Callable[[], Loss],
        policy: Policy,
        *,
        scale: float = 1.0,
        unit: float | None = None,
        step: int = 1,
        hardware: Hardware | None = None,
    ) -> None:
        self.model, self.closure, self.policy = model, closure, policy
        self.scale, self.unit, self.step, self.hardware = scale, unit, step, hardware
        self._regions: dict[str, Region] = {}
        self._own_region = self.region(policy)  # first, so that its kernels stay for the others
        self._state = ForwardState(model, self._own_region.device)

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
        policy = policy or self.policy
        region = self.region(policy)
        factor = torch.tensor(self.scale if scale is None else scale, device=region.device)
        with self._as_captured(policy), ExitStack() as stack:
            for context in under:
                stack.enter_context(context)
            loss, count = self._forward(region, factor)
            self._backward(region, loss, factor)
            stack.close()
            named = self.model.named_parameters()
            gradients = {name: p.grad for name, p in named if p.grad is not None}
            norm = norms_of(gradients.values())[1] if gradients else torch.zeros(())
            count = float(count) or 1.0
            divisor = factor * count / (self.unit or 1.0)
            return Outcome((loss.detach().float() / count).item(), (norm / divisor).item(), gradients)

    def find_producer(self, policy: Policy | None = None, scale: float | None = None) -> Producer | None:
        """What makes the first non-finite value in ``policy`` at ``scale``; None if every value is finite."""
        policy = policy or self.policy
        region = self.region(policy)
        factor = torch.tensor(self.scale if scale is None else scale, device=region.device)
        with self._as_captured(policy):
            return find_producer(
                self.model,
                lambda: self._forward(region, factor)[0],
                lambda loss: self._backward(region, loss, factor),
            )

    def _forward(self, region: Region, factor: torch.Tensor) -> tuple[torch.Tensor, float | torch.Tensor]:
        with region:
            loss, count = read_loss(self.closure(), factor)
        if self.unit is None:
            self.unit = unit_of(count, self.policy.scale.kind)
        return loss, count

    def _backward(self, region: Region, loss: torch.Tensor, factor: torch.Tensor) -> None:
        start = over(factor, self.unit or 1.0)
        with region.backward():
            wide = loss.float() if loss.dtype in LOW_DTYPES else loss
            wide.backward(start.to(wide.dtype))

    @contextmanager
    def _as_captured(self, policy: Policy) -> Iterator[None]:
        found = ForwardState(self.model, self.device)
        parameters = list(self.model.parameters())
        waiting = [p.grad for p in parameters]
        to_widen = parameters if policy != self.policy else []
        narrow = [(p, p.data) for p in to_widen if p.dtype in LOW_DTYPES]
        try:
            for parameter in parameters:
                parameter.grad = None
            for parameter, data in narrow:
                parameter.data = data.float()
            self._state.put()
            with torch.enable_grad():
                yield
        finally:
            for parameter, data in narrow:
                parameter.grad = None  # it is in fp32
                parameter.data = data
            for parameter, gradient in zip(parameters, waiting, strict=True):
                parameter.grad = gradient
            found.put()


class ForwardState:
    """What a forward pass reads besides weights and batch: random state, buffers, and who is in training mode."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._random_state = RandomState(device)
        self._random_state.save()
        modules = list(model.modules())
        self._training = [(module, module.training) for module in modules]
        self._tables = [(module._buffers, dict(module._buffers)) for module in modules]
        self._values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    @torch.no_grad()
    def put(self) -> None:
        self._random_state.restore()
        for module, training in self._training:
            module.training = training
        for table, buffers in self._tables:
            # A forward pass may give a module another tensor instead of writing into the one that it has.
            if table.keys() != buffers.keys() or any(table[name] is not buffer for name, buffer in buffers.items()):
                table.clear()
                table.update(buffers)
        for buffer, value in self._values:
            # Not where nothing has changed: a buffer that is an expanded view cannot be written.
            if not torch.equal(buffer, value):
                buffer.copy_(value)


def largest_scale(passes: Callable[[float], bool], low: float, high: float) -> float:
    """The largest power of two below ``high`` that ``passes``, where ``low`` does and ``high`` does not.

    Where a scale overflows each larger one does, so it is found by halving the exponents in between.
    """
    least, most = math.log2(low), math.log2(high)
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if passes(2.0**middle) else (least, middle)
    return float(2.0**least)


@contextmanager
def as_before(
    model: nn.Module, device: torch.device, random_state: RandomState | None, statistics: RunningStatistics
) -> Iterator[None]:
    """Go back to ``random_state`` (to none: stay) and ``statistics`` for a moment, and then return to now."""
    now, statistics_now = RandomState(device), RunningStatistics(model)
    now.save()
    if random_state is not None:
        random_state.restore()
    statistics.restore()
    try:
        yield
    finally:
        now.restore()
        statistics_now.restore()
