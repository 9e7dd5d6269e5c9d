"""A small net whose body gets a multiple of its gradient."""

import torch
from torch import nn


class _Multiply(torch.autograd.Function):
    """Passes on what it gets, and a multiple of the gradient."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class Net(nn.Module):
    """[batch, width] to [batch, 1]. factor: what the gradient of ``body`` is multiplied by."""

    def __init__(self, width):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(width, 2 * width), nn.Linear(2 * width, 1)
        self.factor = 1.0

    def forward(self, x):
        return self.head(_Multiply.apply(self.body(x), self.factor).tanh())
