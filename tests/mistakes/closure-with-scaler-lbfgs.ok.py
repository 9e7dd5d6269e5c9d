"""Fit the phase of a hologram; second-order optimizer."""

import torch
from torch import nn

device = "cuda"
phase = nn.Parameter(torch.zeros(1, 1, 64, 64, device=device))
optics = nn.Conv2d(1, 1, 7, padding=3, bias=False).to(device).requires_grad_(False)
wanted = torch.rand(1, 1, 64, 64, device=device)
solver = torch.optim.LBFGS([phase], lr=0.5, max_iter=10)


def closure():
    solver.zero_grad()
    image = optics(phase.cos())
    loss = nn.functional.mse_loss(image, wanted)
    loss.backward()
    return loss


for _ in range(20):
    solver.step(closure)
