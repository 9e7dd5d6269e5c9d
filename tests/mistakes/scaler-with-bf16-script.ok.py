import torch
from torch import nn
from torch.amp import GradScaler, autocast

net = nn.Sequential(nn.Linear(30, 60), nn.ReLU(), nn.Linear(60, 5)).cuda()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
grad_scaler = GradScaler("cuda", enabled=False)
for _ in range(100):
    x, y = torch.randn(64, 30, device="cuda"), torch.randint(0, 5, (64,), device="cuda")
    with autocast("cuda", dtype=torch.bfloat16):
        out = net(x)
    loss = nn.functional.cross_entropy(out.float(), y)
    opt.zero_grad()
    grad_scaler.scale(loss).backward()
    grad_scaler.step(opt)
    grad_scaler.update()
