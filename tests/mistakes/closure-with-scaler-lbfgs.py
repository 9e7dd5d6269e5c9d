"""Fit the phase of a hologram; second-order optimizer."""

import torch
from torch import nn

device = "cuda"
phase = nn.Parameter(torch.zeros(1, 1, 64, 64, device=device))
optics = nn.Conv2d(1, 1, 7, padding=3, bias=False).to(device).requires_grad_(False)
wanted = torch.rand(1, 1, 64, 64, device=device)
solver = torch.optim.LBFGS([phase], lr=0.5, max_iter=10)
scaler = torch.amp.GradScaler(device)


def closure():
    solver.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        image = optics(phase.cos())
    loss = nn.functional.mse_loss(image.float(), wanted)
    scaler.scale(loss).backward()
    return loss


for _ in range(20):
    scaler.step(solver, closure)  # HS113
    scaler.update()
