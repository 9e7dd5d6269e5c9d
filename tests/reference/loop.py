"""Slow plain twin of a training step, in float64 and by hand; a gate that spoils a step; a comparison to the bit.

The twin adds up the gradients of a window's sums, divides by the true count, clips by the formula, and moves the
weights with a rule written out below. It has no scale, no autocast and no optimizer object.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Closure = Callable[[nn.Module], tuple[torch.Tensor, float]]


class PlainLoop:
    """``groups``: settings by group, each with ``names`` of its parameters; ``rule`` is ``sgd`` or ``adamw``."""

    def __init__(
        self, model: nn.Module, rule: str, groups: Sequence[dict[str, Any]], max_norm: float | None = None
    ) -> None:
        self.model = copy.deepcopy(model).double()
        self.rule = {"sgd": sgd, "adamw": adamw}[rule]
        self.groups, self.max_norm = groups, max_norm
        self.states: dict[str, dict[str, Any]] = {}

    def window(self, closures: Sequence[Closure]) -> tuple[float, float, bool]:
        """One step over the micro-batches; returns (mean loss, gradient norm before clipping, applied)."""
        parameters = dict(self.model.named_parameters())
        names = [name for group in self.groups for name in group["names"]]
        total: dict[str, torch.Tensor] = {}
        loss_sum = count = 0.0
        for closure in closures:
            loss, num = closure(self.model)
            gradients = torch.autograd.grad(loss, [parameters[name] for name in names], allow_unused=True)
            for name, gradient in zip(names, gradients, strict=True):
                if gradient is not None:
                    total[name] = total[name] + gradient if name in total else gradient
            loss_sum, count = loss_sum + loss.item(), count + num
        mean = {name: gradient / count for name, gradient in total.items()}
        norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in mean.values()))
        if not math.isfinite(norm):
            return loss_sum / count, norm, False
        factor = 1.0 if self.max_norm is None else min(1.0, self.max_norm / (norm + 1e-6))
        with torch.no_grad():
            for group in self.groups:
                for name in group["names"]:
                    if name in mean:
                        self.rule(parameters[name], mean[name] * factor, self.states.setdefault(name, {}), group)
        return loss_sum / count, norm, True

    def largest_gap(self, model: nn.Module) -> float:
        """Largest difference of any weight from ``model``'s, relative to the largest weight of its tensor."""
        own = dict(self.model.named_parameters())
        return max(
            float((own[name].detach() - p.detach().double()).abs().max() / own[name].detach().abs().max())
            for name, p in model.named_parameters()
        )


def sgd(weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    gradient = gradient + group.get("weight_decay", 0.0) * weight
    if momentum := group.get("momentum", 0.0):
        state["buffer"] = gradient + momentum * state["buffer"] if "buffer" in state else gradient
        gradient = state["buffer"]
    weight -= group["lr"] * gradient


def adamw(weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    beta1, beta2 = 0.9, 0.999
    state["step"] = t = state.get("step", 0) + 1
    state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * gradient
    state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * gradient**2
    weight -= group["lr"] * group.get("weight_decay", 0.0) * weight
    m, v = state["m"] / (1 - beta1**t), state["v"] / (1 - beta2**t)
    weight -= group["lr"] * m / (v.sqrt() + 1e-8)


def assert_same(left: Any, right: Any, path: str = "") -> None:
    """Two states are equal: their structure, and every number in them to the bit."""
    assert type(left) is type(right), path
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, path
        assert torch.equal(left, right), path
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_same(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, (list, tuple)):
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{path}/{i}")
    else:
        assert left == right, path


class Gate(nn.Module):
    """Passes its input on, and spoils what it is told to.

    limit:    a gradient with an element above it goes on as inf, as one does that fp16 cannot hold; None for none.
    value:    what to put into one element; where: ``output``, ``gradient`` or ``nowhere``.
    raises:   what to call there for an exception to raise instead.
    """

    def __init__(self, limit: float | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.where, self.value = "nowhere", math.nan
        self.raises: Callable[[], BaseException] | None = None
        self.largest = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Gate.apply(x, self)
        return result

    def spoil(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        tensor = tensor.clone()
        if self.where == where:
            if self.raises is not None:
                raise self.raises()
            tensor.view(-1)[0] = self.value
        if where == "gradient":
            self.largest = tensor.abs().max().item()
            if self.limit is not None and self.largest > self.limit:
                tensor.fill_(math.inf)
        return tensor


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: Gate) -> torch.Tensor:
        ctx.gate = gate
        return gate.spoil(x, "output")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.gate.spoil(gradient, "gradient"), None
