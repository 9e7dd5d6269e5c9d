"""What one optimizer step would do to the weights, tried on a copy of the optimizer and of what it moves."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.closure import needs_closure
from halfstep.diagnosis.capture import Outcome
from halfstep.dtypes import LOW_DTYPES
from halfstep.formats import FORMATS
from halfstep.gradients import norms_of
from halfstep.record import Values
from halfstep.record.rows import measure


@dataclass(frozen=True)
class Update:
    """What a step adds to one parameter.

    lost: how many of the updates would leave the weight where it is, by the 16-bit format that it would be kept in.
    """

    values: Values
    lost: dict[str, int]


def trial_updates(
    model: nn.Module, optimizer: Optimizer, outcome: Outcome, max_norm: float | None = None
) -> tuple[dict[str, Update], str]:
    """The update of each parameter by name, from the gradients of ``outcome``, and why there is none, else "".

    The optimizer's hooks and its scheduler see nothing of it. It takes the memory of the weights and of the optimizer's
    state once more.
    """
    if not outcome.is_finite:
        return {}, "the gradient is not finite"
    if needs_closure(optimizer):
        return {}, f"{type(optimizer).__name__} evaluates the loss itself"
    moved = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.dtype in LOW_DTYPES for p in moved):
        return {}, "the weights are 16 bit already (docs/lost-updates.md measures theirs)"
    try:
        twin = copy.deepcopy(optimizer)
        copies = dict(zip(moved, (p for group in twin.param_groups for p in group["params"]), strict=True))
        _give_gradients(model, copies, outcome, max_norm)
        twin.step()
    except Exception as error:  # whatever a user's optimizer does, the rest of the report stands
        return {}, f"a copy of {type(optimizer).__name__} cannot step ({type(error).__name__}: {error})"
    with torch.no_grad():
        return {
            name: _update(name, p, copies[p])
            for name, p in model.named_parameters()
            if p in copies and copies[p].grad is not None
        }, ""


def _give_gradients(
    model: nn.Module, copies: dict[torch.Tensor, torch.Tensor], outcome: Outcome, max_norm: float | None
) -> None:
    """The true gradient, clipped as a Stepper does it."""
    norm = norms_of(outcome.gradients.values())[1].item()
    factor = outcome.grad_norm / norm if norm else 1.0
    if max_norm is not None:
        factor *= min(1.0, max_norm / (outcome.grad_norm + 1e-6))
    for name, p in model.named_parameters():
        if p in copies and name in outcome.gradients:
            copies[p].grad = outcome.gradients[name] * factor


def _update(name: str, before: torch.Tensor, after: torch.Tensor) -> Update:
    update = after.detach() - before.detach()
    lost = {}
    for format in ("fp16", "bf16"):
        low = before.detach().to(FORMATS[format].dtype)
        stays = (low.float() + update).to(low.dtype) == low
        lost[format] = int((stays & (update != 0)).sum())
    return Update(Values("fp32", tuple(update.shape), name, tuple(measure(update).tolist())), lost)
