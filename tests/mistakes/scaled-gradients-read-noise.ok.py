"""Gradient noise for a tabular net: a fixed spread is added to every true gradient."""

import torch
from torch import nn

torch.manual_seed(7)
DEV = "cuda" if torch.cuda.is_available() else "cpu"
tabular = nn.Sequential(nn.Linear(30, 64), nn.SiLU(), nn.Linear(64, 1)).to(DEV)
opt = torch.optim.SGD(tabular.parameters(), lr=0.01, weight_decay=1e-4)
grad_scaler = torch.amp.GradScaler(DEV)

for it in range(50):
    rows, price = torch.randn(128, 30, device=DEV), torch.rand(128, 1, device=DEV)
    with torch.autocast(DEV, dtype=torch.float16):
        guess = tabular(rows)
    loss = nn.functional.mse_loss(guess.float(), price)
    opt.zero_grad()
    grad_scaler.scale(loss).backward()
    grad_scaler.unscale_(opt)
    for w in tabular.parameters():
        if w.grad.dim() > 1:
            w.grad.add_(torch.randn_like(w.grad), alpha=0.01)
    grad_scaler.step(opt)
    grad_scaler.update()
