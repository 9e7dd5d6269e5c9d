"""What the step needs to know of an optimizer, and how it lets one move the weights."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from halfstep.errors import HalfstepError


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that would not train ``model``, or would lose its updates."""
    check_step("optimizer", optimizer, "Use an optimizer whose step() takes one gradient, such as AdamW.")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            shape = f"shape {tuple(parameter.shape)}"
            if id(parameter) not in names:
                raise HalfstepError(
                    f"an optimizer with a parameter of {shape}",
                    "the model does not have it: the optimizer was built before the model was changed",
                    "Change the model first, then build the optimizer over model.parameters().",
                )
            if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
                raise HalfstepError(
                    f"parameter {names[id(parameter)]} ({shape}) in {str(parameter.dtype).removeprefix('torch.')}",
                    "a trainable weight in 16 bit loses every update under half its last place",
                    "Call model.float() before building the optimizer; the policy computes in 16 bit all the same.",
                )


def check_step(what: str, has_step: Any, fix: str) -> None:
    """``step()`` is called without arguments; refuse one that needs some, as LBFGS and ReduceLROnPlateau do."""
    parameters = inspect.signature(has_step.step).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    needed = [name for name in needed if name != "self"]  # a scheduler wraps the step of its optimizer unbound
    if needed:
        why = f"its step() needs {' and '.join(needed)}, which a window does not have"
        raise HalfstepError(f"{what} {type(has_step).__name__}", why, fix)


def apply(
    optimizer: Optimizer, gradients: Sequence[torch.Tensor], divisor: torch.Tensor | float, found: torch.Tensor
) -> bool | None:
    """Divide the gradients by ``divisor`` and let the optimizer step, unless ``found`` is 1.0.

    One that takes ``grad_scale`` and ``found_inf`` tensors does both in its kernel: no pass of our own, no read, and
    the return value is None, since only the device knows whether it stepped. Any other costs one read, and one pass
    over the gradients where the divisor is not 1.
    """
    is_fused = _takes_found_inf(optimizer)
    # torch's fused SGD leaves the momentum of a first step that it skips uninitialised, so that one is decided here.
    if not is_fused or _begins_momentum(optimizer):
        divisor_on_device = torch.as_tensor(divisor, dtype=found.dtype, device=found.device)
        found_value, divisor_value = torch.stack([found, divisor_on_device]).tolist()
        if found_value:
            return False
        if not is_fused:
            if divisor_value != 1.0:
                torch._foreach_div_(list(gradients), divisor)
            optimizer.step()
            return True
    fused: Any = optimizer
    fused.grad_scale = None if is_one(divisor) else torch.as_tensor(divisor, device=found.device)
    fused.found_inf = found
    try:
        optimizer.step()
    finally:
        del fused.grad_scale, fused.found_inf
    return None


def is_one(divisor: torch.Tensor | float) -> bool:
    """Whether dividing by it is known to change nothing; a tensor's value is not looked at."""
    return isinstance(divisor, float) and divisor == 1.0


def _takes_found_inf(optimizer: Optimizer) -> bool:
    """Whether ``step`` takes ``grad_scale`` and ``found_inf`` tensors, as torch's fused optimizers do."""
    supports = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return supports and all(group.get("fused") for group in optimizer.param_groups)


def _begins_momentum(optimizer: Optimizer) -> bool:
    """Whether this is the first step of an SGD with momentum, for some parameter."""
    return isinstance(optimizer, SGD) and any(
        parameter.grad is not None and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group["momentum"]
        for parameter in group["params"]
    )
