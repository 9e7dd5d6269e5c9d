import torch
from torch import nn

dev = "cuda" if torch.cuda.is_available() else "cpu"
pde = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).to(dev)
opt = torch.optim.Adam(pde.parameters(), lr=1e-3)
for _ in range(5):
    at = torch.rand(64, 2, device=dev)
    with torch.autocast(device_type=dev, dtype=torch.bfloat16):
        u = pde(at)
    loss = nn.functional.mse_loss(u.float(), at.prod(-1, keepdim=True))
    opt.zero_grad()
    loss.backward()
    opt.step()
