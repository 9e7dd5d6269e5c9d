"""What the step needs to know of an optimizer, and how it lets one move the weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, SGD, Optimizer

from halfstep.dtypes import LOW_DTYPES
from halfstep.errors import HalfstepError
from halfstep.gradients import Gradients, divide, is_one
from halfstep.master import Masters


def check_optimizer(model: nn.Module, optimizer: Optimizer, master: str) -> None:
    """Refuse an optimizer that would not train ``model``, or would lose its updates.

    ``master`` is the layout of the weights; in all but ``fp32`` a 16-bit weight has a rest that keeps them.
    """
    check_step("optimizer", optimizer, "Use an optimizer whose step() takes one gradient, such as AdamW.")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if isinstance(optimizer, LBFGS) and any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise HalfstepError(
            "LBFGS over weights that are shards",
            "it lays all weights end to end in one tensor, which shards cannot be",
            "Use replicas instead, halfstep.distributed.replicate(model), or another optimizer.",
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            shape = f"shape {tuple(parameter.shape)}"
            if id(parameter) not in names:
                raise HalfstepError(
                    f"an optimizer with a parameter of {shape}",
                    "the model does not have it: the optimizer was built before the model was changed",
                    "Change the model first, then build the optimizer over model.parameters().",
                )
            is_low = parameter.dtype in LOW_DTYPES
            if parameter.requires_grad and is_low and master == "fp32":
                raise HalfstepError(
                    f"parameter {names[id(parameter)]} ({shape}) in {str(parameter.dtype).removeprefix('torch.')}",
                    "a trainable weight in 16 bit loses every update under half its last place",
                    "Make it fp32 before building the optimizer (parameter.data = parameter.data.float()), since the "
                    "policy computes in 16 bit all the same (an adapter made with torch.zeros_like(base) takes the "
                    "base's format); or keep 16-bit weights with a rest: master=split16.",
                )


def check_step(what: str, has_step: Any, fix: str) -> None:
    """``step()`` is called without arguments; refuse one that needs some, as ReduceLROnPlateau does."""
    parameters = inspect.signature(has_step.step).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    # A scheduler wraps the step of its optimizer unbound, and a closure there is.
    needed = [name for name in needed if name not in ("self", "closure")]
    if needed:
        why = f"its step() needs {' and '.join(needed)}, which a window does not have"
        raise HalfstepError(f"{what} {type(has_step).__name__}", why, fix)


def apply(
    masters: Masters,
    gradients: Gradients,
    divisor: torch.Tensor | float,
    found: torch.Tensor,
    needs_verdict: bool,
) -> bool | None:
    """Divide the gradients by ``divisor`` and let the optimizer step, unless ``found`` is 1.0.

    One that takes ``grad_scale`` and ``found_inf`` tensors does both in its kernel: no pass of our own, no read, and
    the return value is None, since only the device knows whether it stepped. Any other costs one read, and one pass
    over the gradients where the divisor is not 1.

    ``needs_verdict``: the caller reads ``found`` after the step. Master weights free the gradients as they go, of a
    skipped step too, so that with them it is read before.
    """
    optimizer = masters.optimizer
    if not _takes_found_inf(optimizer):
        found_value, divisor = _read(found, divisor)
        if not found_value:
            masters.step(gradients, divisor)
        return not found_value
    # torch's fused SGD leaves the momentum of a first step that it skips uninitialised, so that one is decided here.
    is_decided = begins_momentum(optimizer) or (needs_verdict and bool(masters))
    if is_decided and found.item():
        return False
    fused: Any = optimizer
    fused.grad_scale = None if is_one(divisor) else torch.as_tensor(divisor, device=found.device)
    fused.found_inf = found
    try:
        masters.step(gradients, 1.0)
    finally:
        del fused.grad_scale, fused.found_inf
    return True if is_decided else None


def unscale(gradients: Iterable[torch.Tensor], divisor: torch.Tensor | float, found: torch.Tensor) -> bool:
    """Divide the gradients by ``divisor``, unless ``found`` is 1.0; whether they are good. Reads from the device."""
    found_value, divisor = _read(found, divisor)
    if not found_value:
        divide(gradients, divisor)
    return not found_value


def _read(found: torch.Tensor, divisor: torch.Tensor | float) -> tuple[float, torch.Tensor | float]:
    """``found`` as a number, and the divisor: 1.0 if that is what it is, which costs no pass."""
    if isinstance(divisor, float):
        return found.item(), divisor
    divisor_on_device = torch.as_tensor(divisor, dtype=found.dtype, device=found.device)
    found_value, divisor_value = torch.stack([found, divisor_on_device]).tolist()
    return found_value, 1.0 if divisor_value == 1.0 else divisor


def _takes_found_inf(optimizer: Optimizer) -> bool:
    """Whether ``step`` takes ``grad_scale`` and ``found_inf`` tensors, as torch's fused optimizers do."""
    supports = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return supports and all(group.get("fused") for group in optimizer.param_groups)


def begins_momentum(optimizer: Optimizer) -> bool:
    """Whether this is the first step of an SGD with momentum, for some parameter."""
    return isinstance(optimizer, SGD) and any(
        parameter.grad is not None and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group["momentum"]
        for parameter in group["params"]
    )
