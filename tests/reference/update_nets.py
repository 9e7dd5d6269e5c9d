"""16-bit nets and their steps, and an optimizer with fp32 masters, that the meter for lost updates is tested on."""

from __future__ import annotations

import torch
from torch import nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Holder(nn.Module):
    """Weights as parameters of a module, whose gradients a test gives."""

    def __init__(self, *weights):
        super().__init__()
        self.weights = nn.ParameterList(weight.clone() for weight in weights)


def step(optimizer, *gradients):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def net(dtype=torch.bfloat16, near_one=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
    if near_one:
        for parameter in model.parameters():
            nn.init.normal_(parameter, 1.0, 0.02)
    return model.to(dtype)


def train(model, optimizer, num_steps=1):
    x = torch.linspace(-1, 1, 16 * 32).reshape(16, 32).sin().to(next(model.parameters()).dtype)
    for _ in range(num_steps):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(model, lr, **options):
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True, **options)


class MasterSGD(torch.optim.Optimizer):
    """SGD whose weights are kept in fp32, and copied into the 16-bit parameters."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.masters = {p: p.detach().float() for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure=None):
        for parameter, master in self.masters.items():
            master.sub_(parameter.grad.float(), alpha=self.param_groups[0]["lr"])
            parameter.copy_(master)
            parameter.grad = None

    def exact(self, parameter, index):
        return self.masters[parameter].take(index)
