"""One parameter under a GradScaler, whose scaled gradient is what the test says."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

from halfstep.grad_scaler import GradScaler

TORCH = torch.amp.GradScaler
INF, NAN = math.inf, math.nan
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
}
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)
every_stage = pytest.mark.parametrize("unscales", [False, True], ids=["step", "unscale_, step"])


class Loop:
    """One parameter whose scaled gradient is what the test says."""

    def __init__(self, cls=GradScaler, optimizer="sgd", **kwargs):
        self.weight = nn.Parameter(torch.ones(3))
        self.optimizer = OPTIMIZERS[optimizer]([("weight", self.weight)])
        self.scaler = cls("cpu", **kwargs)

    def step(self, bad=False, unscales=False):
        scaled = self.scaler.scale(self.weight.sum())
        self.optimizer.zero_grad()
        scaled.backward()
        if bad:
            self.weight.grad[1] = INF if isinstance(bad, bool) else bad
        if unscales:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)

    def run(self, verdicts, unscales=False):
        scales = []
        for bad in verdicts:
            self.step(bad, unscales)
            self.scaler.update()
            scales.append(self.scaler.get_scale())
        return scales

    def result(self):
        state = self.optimizer.state_dict()["state"].get(0, {})
        return [self.weight.detach(), *(v for v in state.values() if isinstance(v, torch.Tensor))]


def draws(seed, share, count):
    draw = random.Random(seed)
    return [draw.random() < share for _ in range(count)]


def contains(error, text):
    return text in str(error)
