"""Gradients are divided by the scale by hand, then clipped; the optimizer is stepped by hand too."""

import torch
from torch import nn

STATIC_SCALE = 1024.0
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(6)
net = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 3)).to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.1)

for _ in range(20):
    x, y = torch.randn(32, 12, device=device), torch.randint(0, 3, (32,), device=device)
    opt.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        out = net(x)
    loss = nn.functional.cross_entropy(out.float(), y)
    (loss * STATIC_SCALE).backward()
    for w in net.parameters():
        w.grad.div_(STATIC_SCALE)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if torch.isfinite(norm):
        opt.step()
