import math

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(61)
net = nn.Linear(14, 3).to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler(device)
for epoch in range(4):
    seen = []
    for _ in range(10):
        x, y = torch.randn(32, 14, device=device), torch.randint(0, 3, (32,), device=device)
        opt.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            logits = net(x)
        loss = nn.functional.cross_entropy(logits.float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        seen.append(loss.detach())
    mean = torch.stack(seen).mean().item()
    shown = f"{mean:.4f}" if math.isfinite(mean) else "not finite"
    print("epoch", epoch, "loss", shown)
