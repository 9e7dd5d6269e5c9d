"""A net over ranks whose gradient is finite up to a loss scale that a plan names, and its data, alike on every rank."""

from __future__ import annotations

import math
import random

import torch
from reference.loop import PlainLoop
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class PlantedNet(nn.Module):
    """[batch, 4] to [batch, 1]: two linear layers side by side; the gradient of ``body`` is inf above ``limit``.

    limit: the largest loss scale (divided by the stepper's unit) that it stands, 0 for none; NaN makes the loss NaN.
    calls: how often it ran forward.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.body, self.head = nn.Linear(4, 1), nn.Linear(4, 1)
        self.limit, self.start, self.calls = math.inf, 0.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(x) + _Spoil.apply(self.body(x), self)

    def finish(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` as the plan has it; its backward pass notes the loss scale, which is where the gradient starts."""
        return _Start.apply(loss * math.nan if math.isnan(self.limit) else loss, self)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, net):
        ctx.net = net
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.net.start = gradient.item()
        return gradient, None


class _Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, net):
        ctx.net = net
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + math.inf if ctx.net.start > ctx.net.limit else gradient.clone(), None


def engine_over(net: nn.Module, engine: str, **options: object) -> nn.Module:
    """``net`` under ``ddp`` or ``fsdp``, or as it is."""
    if engine == "ddp":
        return DistributedDataParallel(net, **options)
    if engine == "fsdp":
        for child in net.children():
            if any(True for _ in child.parameters()):
                fully_shard(child)
        return fully_shard(net)
    return net


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it, of a sharded one; a copy."""
    full = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach().clone()


def batches(num_windows: int, accumulate: int, num_ranks: int, seed: int = 0):
    """x and y by window, micro-batch and rank; from 1 to 5 samples each, of numbers between -1 and 1."""
    generator = torch.Generator().manual_seed(seed)

    def draw():
        num = int(torch.randint(1, 6, (), generator=generator))
        x = torch.rand(num, 4, generator=generator) * 2 - 1
        return x, x.sum(1, keepdim=True).sin() + torch.rand(num, 1, generator=generator) * 0.2

    return [[[draw() for _ in range(num_ranks)] for _ in range(accumulate)] for _ in range(num_windows)]


def square_loss(net, x, y):
    """Sum over the samples, and their number."""
    return (net(x) - y).square().sum(), float(len(x))


def plans(num_windows: int, accumulate: int, num_ranks: int, seed: int, shares: tuple[float, float, float]):
    """A plan for each window: limits by rank and micro-batch.

    shares: of micro-batches that overflow until the scale is low enough, that no scale mends, and with a NaN loss.
    """
    rng = random.Random(seed)

    def limit():
        number = rng.random()
        for share, draw in zip(shares, (lambda: 2.0 ** rng.randint(0, 9), lambda: 0.0, lambda: math.nan), strict=True):
            if number < share:
                return draw()
            number -= share
        return math.inf

    return [[[limit() for _ in range(accumulate)] for _ in range(num_ranks)] for _ in range(num_windows)]


class OneProcess:
    """The run of one process in fp64 over the samples of all ranks, by plain SGD, and how far fp32 may be from it.

    The net is linear and its loss a mean of squares, so that it is convex, with a curvature below 2 x 2 x (4 + 1) = 20
    for inputs within -1 and 1. For lr < 2 / 20 a step brings two sets of weights no further apart than they were, and
    the rounding errors of the steps add up at most. One step rounds

    - the gradient: an element is a mean of 2 (output - y) x. Each output takes 9 products and sums, and the mean a sum
      for each sample, so that it is off by at most (10 + samples) eps max |2 (output - y)|;
    - the weight, by eps / 2 of itself.
    """

    def __init__(self, lr: float) -> None:
        assert lr < 2 / 20
        names = [name for name, _ in PlantedNet().named_parameters()]
        self.loop = PlainLoop(PlantedNet(), "sgd", [{"names": names, "lr": lr}])
        self.lr, self.num_steps, self._gradient = lr, 0, 0.0

    def window(self, samples) -> None:
        with torch.no_grad():
            miss = max((self.loop.model(x.double()) - y).abs().max().item() for x, y in samples)
        self._gradient = max(self._gradient, (10 + sum(len(x) for x, _ in samples)) * 2 * miss)
        self.loop.window([lambda net, x=x, y=y: square_loss(net, x.double(), y.double()) for x, y in samples])
        self.num_steps += 1

    def check(self, weights) -> None:
        """Weights of a run over ranks, in the order of ``PlantedNet().parameters()``, are within that room."""
        largest = max(float(weight.abs().max()) for weight in weights)
        eps = torch.finfo(torch.float32).eps
        room = self.num_steps * (self.lr * eps * self._gradient + eps / 2 * largest)
        for own, weight in zip(self.loop.model.parameters(), weights, strict=True):
            assert float((own.detach() - weight.double()).abs().max()) <= room
