"""The window: what its micro-batches add up to, and the verdict on its gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from halfstep.dtypes import LOW_DTYPES
from halfstep.errors import HalfstepError
from halfstep.gradients import Gradients, is_not_finite, is_one, norms_of
from halfstep.ranks.one import Ranks, Total
from halfstep.record import Producer
from halfstep.scale import NoScale

Loss = torch.Tensor | tuple[torch.Tensor, "int | float | torch.Tensor"]
"""What a closure returns: a mean (each micro-batch counts alike), or (sum, count) of tokens or samples."""


@dataclass
class Window:
    """What the micro-batches so far add up to. Their gradients are in ``.grad``, as a sum scaled by scale / unit."""

    num_micro_batches: int = 0
    loss_sum: torch.Tensor | None = None
    count: torch.Tensor | float = 0.0
    num_replays: int = 0
    nonfinite_share: float | None = None
    total: Total | None = None
    """What it adds up to, where a replay's verdict has found that out already."""
    is_left: bool = False
    """A rank by itself holds a gradient that is not finite in the sums, so that the window will be skipped."""
    is_exhausted: bool = False
    """That gradient is not finite at the floor of the scale either."""
    is_claimed: bool = False
    """Another window that shares these losses has ended with them."""
    unscaled: Verdict | None = None
    """The verdict on the sums before they became true gradients in ``.grad``."""
    makers: tuple[Producer, ...] = ()
    """Who made what is not finite, where only all ranks together can do something about it."""

    def add(self, loss: torch.Tensor, count: float | torch.Tensor) -> None:
        """One more micro-batch."""
        self.num_micro_batches += 1
        self.loss_sum, self.count = self.sums_with(loss, count)

    def share(self, loss: torch.Tensor, count: float | torch.Tensor) -> None:
        """As :meth:`add`, of a loss that may be for another window too, and so may be those before it.

        What another has ended with is not for this one; the last loss says what the gradient is divided by.
        """
        if self.is_claimed:
            self.loss_sum, self.is_claimed = None, False
        self.count = 0.0
        self.add(loss, count)

    def sums_with(self, loss: torch.Tensor, count: float | torch.Tensor) -> tuple[torch.Tensor, float | torch.Tensor]:
        """Loss and count with one more micro-batch; a loss in fp64 keeps its digits, for an LBFGS's line search."""
        loss = loss.detach()
        if loss.dtype in LOW_DTYPES:
            loss = loss.float()
        return loss if self.loss_sum is None else self.loss_sum + loss, self.count + count


@dataclass(slots=True)  # not frozen, which takes four times as long to make, in every step
class Verdict:
    """On a gradient: what it has to be divided by, 1.0 if it is not finite, and whether the scale is the cause."""

    divisor: torch.Tensor | float
    found: torch.Tensor
    overflow: torch.Tensor
    numbers: torch.Tensor
    """Loss, norm, scale and ``found``, as the report reads them; of several ranks also ``Total.faults``."""
    count: torch.Tensor | float
    norms: torch.Tensor
    """Of each scaled gradient; the true one is it times ``unit`` / (scale x ``count``)."""
    parameters: tuple[torch.Tensor, ...]
    """Whose they are. The optimizer may take the gradients away."""
    unit: float

    def after(self, now: Verdict) -> Verdict:
        """This one, where ``now`` is that on the same gradients, unscaled and maybe changed by somebody since.

        What was not finite before stays so, although a clip by value may have made a number of it.
        """
        found = torch.maximum(self.found, now.found)
        numbers = self.numbers.clone()
        numbers[1] = torch.where(now.found > self.found, now.numbers[1], numbers[1])
        numbers[3] = found
        return replace(self, divisor=now.divisor, found=found, numbers=numbers)


def read_loss(result: Loss, like: torch.Tensor) -> tuple[torch.Tensor, float | torch.Tensor]:
    """Loss and count of a micro-batch, as numbers; a count on the device in the format of ``like``."""
    loss, count = result if isinstance(result, tuple) and len(result) == 2 else (result, 1.0)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise HalfstepError(
            f"a loss that is {_kind(loss)}", "backward starts from one number", "Return a mean or (sum, count)."
        )
    if not loss.requires_grad:
        raise HalfstepError(
            "a loss without a gradient",
            "it depends on no trainable parameter, or was computed under no_grad or detached",
            "Return the loss as the model's output gives it; for evaluation use stepper.inference().",
        )
    if loss.dim():
        loss = loss.reshape(())
    if isinstance(count, torch.Tensor) and count.numel() == 1:
        return loss, count.detach().reshape(()).to(like)  # fp32: counts in 16 bit do not add up
    if not hasattr(count, "__float__") or isinstance(count, torch.Tensor):
        raise HalfstepError(
            f"a count that is {_kind(count)}",
            "the second of a pair is the number that the sum is divided by",
            "Return (sum, count), or the mean alone.",
        )
    return loss, float(count)


def unit_of(count: float | torch.Tensor, scale_kind: str) -> float:
    """What the scaled sums of a run are divided by: the power of two nearest to its first count, 1.0 without a scale.

    A sum over thousands of tokens would meet fp16 thousands of times larger than a mean. This brings it back and rounds
    nothing; the true count is in the factor at the window's end.
    """
    usual = float(count) if scale_kind != "none" else 1.0
    return 2.0 ** round(math.log2(usual)) if 0 < usual < math.inf else 1.0


def judge(
    window: Window, gradients: Gradients, scale: NoScale, unit: float, max_norm: float | None, ranks: Ranks
) -> Verdict:
    """The verdict on the sums of a window's scaled gradients. Nothing is read from the device, and nothing changed."""
    assert window.loss_sum is not None, "a window holds something"
    # Unscale: the true gradient is their mean over the window's count.
    total = window.total
    if total is None:
        norms, scaled_norm = norms_of(gradients.values())
        total = ranks.total(gradients, norms, scaled_norm, window.loss_sum, window.count)
    count = total.count
    divisor = count / unit
    if scale.kind != "none":
        divisor = scale.value * divisor
    norm = over(total.norm, divisor)
    found = is_not_finite(norm)
    # A count of 0 makes it NaN too, which says nothing about the scale.
    overflow = found if isinstance(count, float) and count else is_not_finite(total.norm)
    # Clip, with the formula of torch.nn.utils.clip_grad_norm_. It divides, since that rounds once.
    if max_norm is not None:
        clip = ((norm + 1e-6) / max_norm).clamp_(min=1.0)
        divisor = clip if is_one(divisor) else clip * divisor
    numbers = torch.stack([over(total.loss_sum, count), norm, scale.value, found])
    if total.faults is not None:
        numbers = torch.cat([numbers, total.faults])
    return Verdict(divisor, found, overflow, numbers, count, total.norms, tuple(gradients), unit)


def why_skipped(count: float | torch.Tensor, loss: float, norm: float, *faults: float) -> str:
    """The reason of a step that was not applied. ``faults``: those of ``Total``, where there are several ranks."""
    if not count:
        return "the count is 0: there is nothing to take the mean of"
    num_bad, sum_of_bad = faults[:2] if faults else (0.0, 0.0)
    if num_bad == 1:
        whose = f"the loss of rank {sum_of_bad:.0f} is not finite"
    elif num_bad:
        whose = f"the losses of {num_bad:.0f} ranks are not finite"
    elif not math.isfinite(loss):
        whose = f"the loss is {loss}"
    else:
        return f"the gradient norm is {norm}"
    return f"{whose}: a fault of the forward pass or the data, which no loss scale mends"


def _kind(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def over(value: torch.Tensor, divisor: torch.Tensor | float) -> torch.Tensor:
    """``value / divisor``, where that is an operation at all."""
    return value if is_one(divisor) else value / divisor
