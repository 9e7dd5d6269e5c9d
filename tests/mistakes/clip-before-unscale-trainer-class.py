"""Denoise short audio clips with a small 1-d U-shaped net."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler


class ClipTrainer:
    def __init__(self, net: nn.Module, lr: float, max_norm: float = 0.5) -> None:
        self.net = net.cuda()
        self.optim = torch.optim.AdamW(self.net.parameters(), lr=lr)
        self.amp_scaler = GradScaler("cuda")
        self.max_norm = max_norm

    def _run_batch(self, noisy: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
        self.optim.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            estimate = self.net(noisy)
            loss = F.l1_loss(estimate.float(), clean)
        self.amp_scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), self.max_norm)  # HS101
        self.amp_scaler.step(self.optim)
        self.amp_scaler.update()
        return loss.detach()

    def fit(self, loader, epochs: int) -> None:
        for epoch in range(epochs):
            total = torch.zeros((), device="cuda")
            for noisy, clean in loader:
                total += self._run_batch(noisy.cuda(), clean.cuda())
            print(epoch, (total / len(loader)).item())
