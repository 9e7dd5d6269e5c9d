"""The small net with BatchNorm, and the optimizers, for steps that are to be skipped."""

from __future__ import annotations

import copy

import torch
from reference.loop import Gate
from torch import nn

X = torch.linspace(-2, 2, 96).reshape(12, 8).sin()
Y = X.mean(1, keepdim=True) + 0.5
OPTIMIZERS = {
    "sgd": lambda p, lr=0.05: torch.optim.SGD(p, lr, momentum=0.9),
    "sgd fused": lambda p, lr=0.05: torch.optim.SGD(p, lr, momentum=0.9, fused=True),
    "adamw": lambda p, lr=0.01: torch.optim.AdamW(p, lr),
    "adamw fused": lambda p, lr=0.01: torch.optim.AdamW(p, lr, fused=True),
}


def net():
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), Gate(), nn.Linear(16, 1))


def loss_of(model, step=0, x=X):
    return (model(x.roll(step, 0)[:8]) - Y.roll(step, 0)[:8]).square().mean()


def snapshot(stepper):
    """Weights, running statistics and optimizer states, copied."""
    return copy.deepcopy([stepper.model.state_dict(), stepper.optimizer.state_dict()])
