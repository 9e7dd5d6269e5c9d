"""Nets with planted faults of precision: small, so that a training run takes tens of milliseconds.

A net is a chain of ``size`` parts, each of which multiplies by a 4 x 4 weight, in 16 bit where a policy says so, and
then by a gain. The parts at the places ``at`` are at fault there.
"""

from __future__ import annotations

import torch
from torch import nn

from halfstep.source import Source
from halfstep.workload import Workload

WIDTH = 4


class Part(nn.Module):
    """A sound part."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.gain = 1.0

    def forward(self, x):
        return x @ self.weight * self.gain


class Overflowing(Part):
    """300 x is in range, its square is inf in fp16 from |x| = 0.85 on, whatever the loss scale."""

    def forward(self, x):
        x = super().forward(x)
        return x + 0 * ((300 * x) * (300 * x))


class Absorbing(Part):
    """x + 4096 - 4096, which rounds to a multiple of 4 in fp16: it loses its input, and the gradient stays as it is."""

    def forward(self, x):
        return (super().forward(x) + 4096) - 4096


class Vanishing(Part):
    """2^13 x 2^-13: the output is right, and the gradient passes through 2^-13 of itself, which may become 0."""

    def forward(self, x):
        return super().forward(x) * 2.0**13 * 2.0**-13


class Steep(Part):
    """2^-10 x 2^10: the output is right, and the gradient passes through 2^10 of itself, which may overflow."""

    def forward(self, x):
        return super().forward(x) * 2.0**-10 * 2.0**10


class Container(nn.Sequential):
    """Two sound parts, and an overflow of the container's own between them."""

    def __init__(self):
        super().__init__(Part(), Part())

    def forward(self, x):
        x = self[0](x)
        return self[1](x + 0 * ((300 * x) * (300 * x)))


class Mixed(nn.Module):
    """Large sound products, and a small operation that overflows and that no other part has."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH).repeat(1, 32))

    def forward(self, x):
        x = x @ self.weight @ self.weight.T / 32
        return x + torch.addcmul(x, 300 * x, 300 * x) * 0


def source(size, at=(), fault=Overflowing, factor=1.0, loss=None):
    """A chain that learns the mean of its inputs' signs. factor: of the loss, made up for by the learning rate."""

    def workload(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        for i in range(size):
            model.add_module(f"part{i}", fault() if i in at else Part())
        return Workload(
            model=model,
            batches=batches(seed),
            loss=loss or (lambda model, batch: factor * squared_error(model(batch[0]), batch[1])),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05 / factor),
        )

    return Source("chain", workload, default_steps=4)


def squared_error(outputs, targets):
    return (outputs.float().mean(1) - targets).square().mean()


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(16, WIDTH, generator=generator)
        yield x, x.sign().mean(1)
