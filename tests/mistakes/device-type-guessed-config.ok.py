from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Settings:
    device: str = "cuda:0"
    lr: float = 1e-3


def train(settings: Settings, net: nn.Module, loader) -> None:
    device_type = torch.device(settings.device).type
    region = torch.autocast(device_type, dtype=torch.bfloat16) if device_type != "cpu" else nullcontext()
    net.to(settings.device)
    opt = torch.optim.AdamW(net.parameters(), lr=settings.lr)
    for x, y in loader:
        x, y = x.to(settings.device), y.to(settings.device)
        opt.zero_grad()
        with region:
            logits = net(x)
        loss = nn.functional.cross_entropy(logits.float(), y)
        loss.backward()
        opt.step()
