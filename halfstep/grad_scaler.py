"""GradScaler: that of ``torch.amp``, with bounds for the scale and with answers where torch's says too little.

    scaler = halfstep.GradScaler()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if scaler.last_step_applied:
        scheduler.step()

Names, arguments and behaviour are torch's, and while the scale stays between its bounds so is every bit. Beyond it: the
scale is never 0, growth ends at a ceiling, several overflows in a row can be asked for before the scale falls, and a
run that no scale can save stops and says which parameters are at fault.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from halfstep.errors import HalfstepError, ScaleExhausted, and_more
from halfstep.gradients import gradients_of, values_of
from halfstep.optimizer import begins_momentum
from halfstep.scale import CHECK_EVERY, update_scale

_STOP_AFTER = 20
"""Overflows in a row after which one at the floor ends the run.

From torch's first scale it takes 16 to reach the floor. A scale that begins there, as a guard for bf16, gets the same
patience, so that a few bad batches do not stop a run that would have gone on.
"""

_FLOOR, _CEILING = 1.0, 2.0**24
_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class _CalledTooEarly(HalfstepError, AssertionError):
    """Where torch raises an AssertionError: a script that catches that one catches this one too."""


class _EmptyState(HalfstepError, RuntimeError):
    """Where torch raises a RuntimeError."""


class GradScaler(torch.amp.GradScaler):
    """A drop-in for ``torch.amp.GradScaler``, and an instance of it.

    floor:      the scale does not fall below it. 1, or ``init_scale`` where that is lower.
    ceiling:    the scale does not grow beyond it. 2^24, or ``init_scale`` where that is higher.
    hysteresis: number of overflows in a row that lower the scale; a clean step starts the count anew. An overflow
                always skips its step.

    The other arguments are torch's. A scale that is set later, by ``update(new_scale)`` or a state, widens a bound that
    excludes it.

    An overflow at the floor that is at least the 20th in a row raises ScaleExhausted from :meth:`update`. Where the
    verdict stays on the device, as with torch's fused optimizers, it is looked at once in 64 updates.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        floor: float | None = None,
        ceiling: float | None = None,
        hysteresis: int = 1,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._last_verdict: bool | torch.Tensor | None = None
        self._verdicts: weakref.WeakKeyDictionary[Optimizer, bool | torch.Tensor | None] = weakref.WeakKeyDictionary()
        if not self._enabled:
            return
        init = _in_fp32("init_scale", init_scale)
        self.floor = min(_FLOOR, init) if floor is None else _in_fp32("floor", floor)
        self.ceiling = max(_CEILING, init) if ceiling is None else _in_fp32("ceiling", ceiling)
        self.hysteresis = hysteresis
        if not self.floor <= init <= self.ceiling:
            raise HalfstepError(
                f"init_scale={init:g} with floor={self.floor:g} and ceiling={self.ceiling:g}",
                "the scale starts outside its bounds",
                "Change one of the three; a bound that is not given follows init_scale.",
            )
        if not hasattr(hysteresis, "__index__") or hysteresis < 1:
            raise HalfstepError(
                f"hysteresis={hysteresis}", "the scale falls after a whole number of overflows", "Use 1, 2, 3, ..."
            )
        self._init_num_overflows = 0.0
        self._num_overflows: torch.Tensor | None = None  # in a row; comes into being with the scale
        self._num_seen_overflows = 0  # in a row, as far as the host has seen them
        self._num_updates = 0

    # The answers.

    @property
    def last_step_applied(self) -> bool | None:
        """Whether the last :meth:`step` moved the weights; None before the first.

        With a fused optimizer only the device knows, and this reads from it.
        """
        return _read(self._last_verdict)

    def step_applied(self, optimizer: Optimizer) -> bool | None:
        """As :attr:`last_step_applied`, for the last step of one of several optimizers."""
        return _read(self._verdicts.get(optimizer))

    def parameters_at_fault(self, optimizer: Optimizer) -> list[str]:
        """The parameters of ``optimizer`` whose gradient holds an inf or a NaN now. Reads from the device.

        By name where the optimizer was built over ``model.named_parameters()``, else by place and shape.
        """
        gradients = gradients_of(optimizer)
        names = _names(optimizer)
        with torch.no_grad():
            flags = [torch.isfinite(values_of(gradient)).all() for gradient in gradients.values()]
            are_finite = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
        return [names[p] for p, is_finite in zip(gradients, are_finite, strict=True) if not is_finite]

    # A step.

    def scale(self, outputs: Any) -> Any:
        """torch's: ``outputs``, a tensor or an iterable of tensors, times the scale."""
        if not isinstance(outputs, torch.Tensor) or not self._enabled:
            return super().scale(outputs)
        # torch.compile does not go into torch's own, and would break the graph here.
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        assert self._scale is not None
        return outputs * self._scale.to(outputs.device, non_blocking=True)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """torch's: unscale, unless :meth:`unscale_` did, then ``optimizer.step()``, unless a gradient overflowed."""
        if not self._enabled:
            result = super().step(optimizer, *args, **kwargs)
            self._note(optimizer, True)
            return result
        self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            if state["stage"] is OptState.UNSCALED:
                self._merge_flags(optimizer)
            if "closure" not in kwargs and state["stage"] is not OptState.STEPPED and begins_momentum(optimizer):
                # torch's fused SGD leaves the momentum of a first step that it skips uninitialised.
                if state["stage"] is OptState.READY:
                    self._check_inf_per_device(optimizer)
                if any(flag.item() for flag in state["found_inf_per_device"].values()):
                    state["stage"], state["applied"] = OptState.STEPPED, False
                    self._note(optimizer, False)
                    return None
        elif not state["found_inf_per_device"] and (
            state["stage"] is OptState.UNSCALED or (state["stage"] is OptState.READY and not gradients_of(optimizer))
        ):
            raise _CalledTooEarly(
                f"step() of {type(optimizer).__name__} without gradients",
                "a loss was scaled, but none of this optimizer's parameters had a gradient to check",
                "Call scaler.scale(loss).backward() with a loss that depends on them, after zero_grad() and before "
                "unscale_(); or leave out the step of an optimizer that this loss does not train.",
            )
        result = super().step(optimizer, *args, **kwargs)
        flags = list(state["found_inf_per_device"].values())
        self._note(optimizer, state.get("applied", flags[0] if flags else None))
        return result

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        # torch's, which reads these flags and keeps the answer to itself.
        found = sum(flag.item() for flag in optimizer_state["found_inf_per_device"].values())
        optimizer_state["applied"] = not found
        return optimizer.step(*args, **kwargs) if not found else None

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        self._per_optimizer_states[id(optimizer)]["optimizer"] = optimizer
        try:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        except ValueError:
            names = _names(optimizer)
            bad = [names[p] for p, gradient in gradients_of(optimizer).items() if gradient.dtype is torch.float16]
            if not bad:
                raise
            raise HalfstepError(
                f"Attempting to unscale FP16 gradients of {and_more(bad)}",
                "the weights are fp16 themselves, and an unscaled gradient below 6e-8 would become 0",
                "Keep the weights in fp32 with model.float(), autocast computes in 16 bit all the same; or use "
                "halfstep.Stepper.",
            ) from None

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[str, Any]:
        if len(super()._check_inf_per_device(optimizer)) > 1:
            self._merge_flags(optimizer)
        return self._found_inf_per_device(optimizer)

    def _merge_flags(self, optimizer: Optimizer) -> None:
        """One flag, strictly 0 or 1, for those of all devices.

        torch adds them up, a script may have added up those of several ranks, and torch's fused kernels skip only when
        the sum is exactly 1.
        """
        flags = self._found_inf_per_device(optimizer)
        if flags:
            found = self._any(flags.values())
            flags.clear()
            flags[cast(Any, found.device)] = found

    def _any(self, flags: Iterable[torch.Tensor]) -> torch.Tensor:
        """1.0 if any of the flags is set, else 0.0, on the device of the scale."""
        assert self._scale is not None
        device = self._scale.device
        total = sum(flag.to(device, non_blocking=True).sum() for flag in flags)
        return cast(torch.Tensor, total).ne(0).float()

    def _note(self, optimizer: Optimizer, verdict: bool | torch.Tensor | None) -> None:
        self._last_verdict = self._verdicts[optimizer] = verdict

    # The scale.

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """torch's, with bounds and hysteresis; raises ScaleExhausted as the class says.

        new_scale: a positive number, which widens a bound that excludes it, or a tensor of one element.
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            if not isinstance(new_scale, torch.Tensor):
                new_scale = _in_fp32("new_scale", new_scale)
                self._widen(new_scale)
            super().update(new_scale)
            scale.clamp_(self.floor, self.ceiling)
            return
        states = self._per_optimizer_states.values()
        flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
        if not flags:
            raise _CalledTooEarly(
                "update() without a step",
                "since the last update() no optimizer with gradients was unscaled or stepped",
                "Call scaler.step(optimizer) first, and update() once for all of them.",
            )
        assert self._num_overflows is not None
        found = self._any(flags)
        at_fault = self._parameters_if_exhausted(found)
        update_scale(
            scale, growth_tracker, self._num_overflows, found,
            growth=self._growth_factor, backoff=self._backoff_factor, interval=self._growth_interval,
            floor=self.floor, ceiling=self.ceiling, hysteresis=self.hysteresis,
        )  # fmt: skip
        self._per_optimizer_states.clear()
        if at_fault is not None:
            raise ScaleExhausted(
                f"the loss scale at its floor of {self.floor:g}",
                f"at least {_STOP_AFTER} updates in a row overflowed, and the gradient of "
                f"{and_more(at_fault) or 'a parameter'} is still not finite",
                "No loss scale mends that: look at the data and at the loss, keep the module of these parameters in "
                "fp32 with autocast(enabled=False), or use bf16. The weights are those of the last applied step.",
            )

    def _parameters_if_exhausted(self, found: torch.Tensor) -> list[str] | None:
        """The parameters at fault if this overflow is one that no scale mends, else None. Looks only when it has to."""
        states = list(self._per_optimizer_states.values())
        applied = [state.get("applied") for state in states]
        self._num_updates += 1
        if False in applied:
            self._num_seen_overflows += 1
            looks = self._num_seen_overflows >= _STOP_AFTER
        elif None in applied:
            looks = self._num_updates % CHECK_EVERY == 0
        else:
            self._num_seen_overflows = 0
            looks = False
        if not looks:
            return None
        assert self._scale is not None
        assert self._num_overflows is not None
        scale, num_before, overflowed = torch.stack([self._scale, self._num_overflows, found]).tolist()
        if not overflowed or scale > self.floor or num_before + 1 < _STOP_AFTER:
            return None
        return [
            name for state in states if "optimizer" in state for name in self.parameters_at_fault(state["optimizer"])
        ]

    def _widen(self, scale: float) -> None:
        self.floor, self.ceiling = min(self.floor, scale), max(self.ceiling, scale)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=dev)
        self._num_overflows = torch.full((), self._init_num_overflows, dtype=torch.float32, device=dev)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scale is None:
            raise _CalledTooEarly(
                f"{funcname}() before any loss was scaled",
                "the gradients come from a loss that was never multiplied by the scale",
                "Call scaler.scale(loss).backward() in place of loss.backward().",
            )
        return super()._check_scale_growth_tracker(funcname)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries, which torch's own class can load, and ours beside them. Reads from the device."""
        state = super().state_dict()
        if self._enabled:
            state |= {"floor": self.floor, "ceiling": self.ceiling, "hysteresis": self.hysteresis}
            state["_num_overflows"] = self._get_num_overflows()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state of this class or of torch's; settings are those of the state, as in torch."""
        if not self._enabled:
            return
        if not state_dict:
            raise _EmptyState(
                "an empty state", "it was saved by a scaler that was not enabled", "Leave it out to start afresh."
            )
        if missing := [key for key in _TORCH_KEYS if key not in state_dict]:
            raise HalfstepError(
                f"a state without {', '.join(missing)}",
                "it was written by something else",
                "Pass what state_dict() of a GradScaler returned.",
            )
        scale = _in_fp32("the scale of a state", state_dict["scale"])
        super().load_state_dict(dict(state_dict))
        self.floor = state_dict.get("floor", self.floor)
        self.ceiling = state_dict.get("ceiling", self.ceiling)
        self.hysteresis = state_dict.get("hysteresis", self.hysteresis)
        self._widen(scale)
        self._init_num_overflows = state_dict.get("_num_overflows", 0.0)
        self._num_seen_overflows = int(self._init_num_overflows)
        if self._num_overflows is not None:
            self._num_overflows.fill_(self._init_num_overflows)

    def _get_num_overflows(self) -> float:
        return self._init_num_overflows if self._num_overflows is None else self._num_overflows.item()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_last_verdict"], state["_verdicts"] = self.last_step_applied, None
        if self._enabled:
            state["_init_num_overflows"], state["_num_overflows"] = self._get_num_overflows(), None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._verdicts = weakref.WeakKeyDictionary()


def _in_fp32(name: str, value: Any) -> float:
    """``value`` as the fp32 tensor of the scale holds it; only a positive number can be divided out again."""
    rounded = torch.tensor(float(value), dtype=torch.float32).item()
    if not 0 < rounded < math.inf:
        raise HalfstepError(
            f"{name}={value}",
            "the scale is a positive number that fp32 holds, since gradients are divided by it",
            "Use a power of two, such as 2.0**16.",
        )
    return rounded


def _read(verdict: bool | torch.Tensor | None) -> bool | None:
    return verdict.item() == 0.0 if isinstance(verdict, torch.Tensor) else verdict


def _names(optimizer: Optimizer) -> dict[torch.Tensor, str]:
    names = {}
    for i, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        for j, parameter in enumerate(group["params"]):
            shape = f"shape {tuple(parameter.shape)}"
            names[parameter] = f"{given[j]} ({shape})" if given else f"parameter {j} of group {i} ({shape})"
    return names
