"""The loss scale: none, static or dynamic, three classes with the same verbs.

Its numbers live on the device, so that a step can use and update them without a read. Why scale at all: a gradient
below half of fp16's smallest subnormal, 3e-8, becomes zero; multiplied by 2^16 it is a normal number, and since every
factor is a power of two, dividing it out again in fp32 is exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from halfstep.errors import HalfstepError
from halfstep.policy import LossScale

CHECK_EVERY = 64
"""Updates between two looks at a scale whose verdicts stay on the device: is it exhausted?"""


class NoScale:
    """No scaling: the value is 1 and stays so. bf16 and fp32 have the range that fp16 lacks."""

    kind = "none"

    def __init__(self, settings: LossScale, device: torch.device) -> None:
        self.settings = settings
        value = settings.init if settings.kind != "none" else 1.0
        self.value = torch.full((), value, dtype=torch.float32, device=device)

    def update(self, found: torch.Tensor) -> None:
        """Take in the verdict of a window: ``found`` is 1.0 if its gradient was not finite, else 0.0."""

    def back_off(self) -> float | None:
        """Lower the scale at once and return the factor; None when there is nothing left to lower."""
        return None

    def undo(self, factor: float) -> None:
        """Take back what :meth:`back_off` did, once or several times, with ``factor`` their product."""
        self.value.div_(factor)

    def is_exhausted(self) -> bool:
        """Whether an overflow now would be one that no lower scale can mend. Reads from the device."""
        return False

    def numbers(self) -> dict[str, torch.Tensor]:
        """All that changes in it, on the device."""
        return {"value": self.value}

    def state_dict(self) -> dict[str, Any]:
        """Everything that :meth:`load_state_dict` needs, as plain numbers. Reads from the device."""
        return {"kind": self.kind, **{name: number.item() for name, number in self.numbers().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; one of another kind, or that no run can have written, is refused."""
        if state.get("kind") != self.kind:
            raise HalfstepError(
                f"the state of a {state.get('kind')} loss scale",
                f"this run has scale={self.kind}",
                "Resume with the policy that wrote it, or leave the state out to start the scale afresh.",
            )
        missing = sorted(self.state_dict().keys() - state.keys())
        if missing or math.frexp(state["value"])[0] != 0.5:
            raise HalfstepError(
                f"the state {dict(state)} of a loss scale",
                f"it lacks {', '.join(missing)}" if missing else "its value is not a positive power of two",
                "Pass what state_dict() of a loss scale returned.",
            )
        self.value.fill_(state["value"])

    def load_from_scaler(self, state: Mapping[str, Any]) -> bool:
        """Continue from the state of a ``torch.amp.GradScaler``; whether this scale has a use for it."""
        return False


class StaticScale(NoScale):
    """A scale that stays where it was set. An overflow skips the step and changes nothing."""

    kind = "static"


class DynamicScale(NoScale):
    """A scale that halves on an overflow and doubles after ``interval`` clean steps, between a floor and a ceiling.

    ``hysteresis`` overflows in a row lower it; a clean step in between starts the count anew. Lowering never goes below
    the floor, so the scale is never 0; that the floor itself overflows is for the caller to see (:meth:`is_exhausted`).
    """

    kind = "dynamic"

    def __init__(self, settings: LossScale, device: torch.device) -> None:
        super().__init__(settings, device)
        self._num_clean = torch.zeros((), dtype=torch.int32, device=device)
        self._num_overflows = torch.zeros((), dtype=torch.float32, device=device)

    def update(self, found: torch.Tensor) -> None:
        s = self.settings
        update_scale(
            self.value, self._num_clean, self._num_overflows, found,
            growth=s.growth, backoff=s.backoff, interval=s.interval,
            floor=s.floor, ceiling=s.ceiling, hysteresis=s.hysteresis,
        )  # fmt: skip

    def back_off(self) -> float | None:
        before = self.value.item()
        after = max(before * self.settings.backoff, self.settings.floor)
        if after == before:
            return None
        self.value.fill_(after)
        self._num_clean.zero_()
        return after / before

    def is_exhausted(self) -> bool:
        is_last = self.value.item() <= self.settings.floor
        return is_last and self._num_overflows.item() + 1 >= self.settings.hysteresis

    def numbers(self) -> dict[str, torch.Tensor]:
        return {"value": self.value, "num_clean": self._num_clean, "num_overflows": self._num_overflows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._num_clean.fill_(state["num_clean"])
        self._num_overflows.fill_(state["num_overflows"])
        # The run that wrote the state may have had other bounds.
        self.value.clamp_(self.settings.floor, self.settings.ceiling)

    def load_from_scaler(self, state: Mapping[str, Any]) -> bool:
        if not state:
            return False  # of one that was not enabled
        numbers = {"value": state["scale"], "num_clean": state["_growth_tracker"], "num_overflows": 0}
        self.load_state_dict({"kind": self.kind, **numbers})
        return True


def update_scale(
    value: torch.Tensor,
    num_clean: torch.Tensor,
    num_overflows: torch.Tensor,
    found: torch.Tensor,
    *,
    growth: float,
    backoff: float,
    interval: int,
    floor: float,
    ceiling: float,
    hysteresis: int,
) -> None:
    """One verdict on the device, in place and without a read.

    value, num_overflows: fp32 scalars, the scale and the overflows in a row.
    num_clean:            int32 scalar, the clean steps in a row.
    found:                1.0 for an overflow, else 0.0.
    """
    num_overflows.add_(found).mul_(found)
    lower = found
    if hysteresis > 1:
        lower = (num_overflows >= hysteresis).float()
        # A tolerated overflow is no clean step: -1 here becomes 0 below.
        num_clean.masked_fill_(found.bool(), -1)
    torch._amp_update_scale_(value, num_clean, lower, growth, backoff, interval)
    value.clamp_(floor, ceiling)


def make_scale(settings: LossScale, device: torch.device) -> NoScale:
    """The loss scale that ``settings`` describe, with its numbers on ``device``."""
    kinds = {scale.kind: scale for scale in (NoScale, StaticScale, DynamicScale)}
    return kinds[settings.kind](settings, device)
