import torch
from torch import nn


class ChannelNorm(nn.Module):
    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels, 1, 1))
        self.eps = eps

    def forward(self, x):
        power = (x * x).mean(dim=1, keepdim=True)  # HS145
        return self.gain * x * torch.rsqrt(power + self.eps)


net = nn.Sequential(nn.Conv2d(3, 32, 3), ChannelNorm(32), nn.ReLU(), nn.Conv2d(32, 3, 3)).cuda()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
gs = torch.amp.GradScaler("cuda")


def step(dark, bright):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        lit = net(dark)
    loss = nn.functional.l1_loss(lit.float(), bright)
    gs.scale(loss).backward()
    gs.step(opt)
    gs.update()
