"""The small net and the batches on which the step is compared with loops written by hand."""

from __future__ import annotations

import torch
from reference.loop import Gate
from torch import nn

X = torch.linspace(-2, 2, 192).reshape(24, 8).sin()
Y = X.mean(1, keepdim=True) + 0.5
POLICIES = ["fp32", "bf16", "fp16 on_overflow=skip scale.init=1024", "fp16 scale.init=1024"]
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9, weight_decay=0.01),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9, weight_decay=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def net(seed=0):
    torch.default_generator.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Gate(), nn.Linear(16, 1))


def groups_of(model):
    return [{"params": list(model[0].parameters())}, {"params": list(model[3].parameters()), "lr": 0.02}]


def batch(step):
    return X.roll(step, 0)[:8], Y.roll(step, 0)[:8]


def loss_of(model, step):
    x, y = batch(step)
    return (model(x) - y).square().mean()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_same_bits(left, right):
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)
