"""The step of an optimizer that evaluates the loss itself, such as LBFGS or a sharpness-aware one.

Its ``step(closure)`` asks for loss and gradient several times, at weights of its own choosing in between. Each
evaluation has to be true (unscaled, finite), and a step that meets one which is not has to leave no trace: such an
optimizer stops with its weights somewhere on the way.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from halfstep.gradients import gradients_of


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``step()`` cannot do without a closure.

    LBFGS says so in its signature. Sharpness-aware optimizers do not, their ``step(closure=None)`` asserts one; they
    are known by the two halves of their step, ``first_step`` and ``second_step``.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    is_required = closure is not None and closure.default is closure.empty
    return is_required or (hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"))


def step_by_closure(
    optimizer: Optimizer, loss: torch.Tensor, evaluate: Callable[[], torch.Tensor]
) -> NonFiniteEvaluation | None:
    """``optimizer.step(closure)``, done wholly or not at all.

    loss:     its value at the weights of now, whose true gradient is in ``.grad``. An optimizer that begins by asking
              for both, as LBFGS does, gets them without an evaluation; a sharpness-aware one begins with ``.grad``.
    evaluate: puts the true gradient at the weights of then into ``.grad`` and returns the true loss; raises
              NonFiniteEvaluation if there is none.

    Returns what ``evaluate`` raised. Then, as after any other exception, weights and states are as before: a copy of
    both is held during the step, for LBFGS up to (2 history_size + 4) numbers for each one in the weights.
    """
    before = _Before(optimizer)

    def closure() -> torch.Tensor:
        if before.is_now():
            return loss
        with torch.enable_grad():
            return evaluate()

    step: Any = optimizer.step
    try:
        step(closure)
    except NonFiniteEvaluation as failure:
        before.restore()
        return failure
    except BaseException:
        before.restore()
        raise
    return None


class NonFiniteEvaluation(Exception):
    """An evaluation whose gradient stayed inf or NaN. ``verdict`` is what its maker knows of it."""

    def __init__(self, verdict: Any) -> None:
        self.verdict = verdict


class _Before:
    """Weights, gradients and optimizer states as they were before a step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._weights = {p: p.detach().clone() for group in optimizer.param_groups for p in group["params"]}
        self._gradients = {p: (g, g._version) for p, g in gradients_of(optimizer).items()}
        self._optimizers = [
            (each, {key: copy.deepcopy(state) for key, state in each.state.items()}, _settings(each))
            for each in _with_those_inside(optimizer)
        ]
        self._was_evaluated = False

    def is_now(self) -> bool:
        """Whether the gradient in ``.grad`` is still there and still that of the weights. True at most once."""
        was_evaluated, self._was_evaluated = self._was_evaluated, True
        return (
            not was_evaluated
            and all(p.grad is g and g._version == version for p, (g, version) in self._gradients.items())
            and all(torch.equal(p, weight) for p, weight in self._weights.items())
        )

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, weight in self._weights.items():
            parameter.copy_(weight)
        for optimizer, states, settings in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update(states)
            for group, values in zip(optimizer.param_groups, settings, strict=True):
                group.update(values)


def _with_those_inside(optimizer: Optimizer) -> Iterator[Optimizer]:
    """A sharpness-aware optimizer lets another one move the weights, and keeps it as an attribute."""
    yield optimizer
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            yield from _with_those_inside(value)


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
