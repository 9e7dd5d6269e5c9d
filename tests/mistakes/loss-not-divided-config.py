from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Config:
    lr: float = 1e-3
    grad_accum: int = 2
    use_amp: bool = True


def fit(cfg: Config, net: nn.Module, loader) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net.to(device)
    optim = torch.optim.Adam(net.parameters(), lr=cfg.lr)
    gs = torch.amp.GradScaler(device, enabled=cfg.use_amp)
    pending = 0
    for image, mask in loader:
        with torch.autocast(device, dtype=torch.float16, enabled=cfg.use_amp):
            logits = net(image.to(device))
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), mask.to(device))
        gs.scale(loss).backward()  # HS120
        pending += 1
        if pending == cfg.grad_accum:
            gs.step(optim)
            gs.update()
            optim.zero_grad()
            pending = 0
    if pending:
        gs.step(optim)
        gs.update()
        optim.zero_grad()
