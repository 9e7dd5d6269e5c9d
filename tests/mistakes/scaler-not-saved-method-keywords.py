import os

import torch
from torch import nn


class Job:
    def __init__(self, net: nn.Module, folder: str) -> None:
        self.net, self.folder = net.cuda(), folder
        self.optimiser = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.amp_scaler = torch.amp.GradScaler("cuda")

    def save(self, epoch: int) -> None:
        state = dict(weights=self.net.state_dict(), optimiser=self.optimiser.state_dict(), epoch=epoch)
        torch.save(state, os.path.join(self.folder, f"{epoch:03d}.ckpt"))  # HS162

    def train_step(self, x, y):
        self.optimiser.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(x)
        loss = nn.functional.cross_entropy(out.float(), y)
        self.amp_scaler.scale(loss).backward()
        self.amp_scaler.step(self.optimiser)
        self.amp_scaler.update()
