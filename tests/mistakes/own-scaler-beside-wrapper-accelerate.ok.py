import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(mixed_precision="fp16")
net = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 2))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
net, opt = accelerator.prepare(net, opt)

for _ in range(50):
    x = torch.randn(32, 20, device=accelerator.device)
    y = torch.randint(0, 2, (32,), device=accelerator.device)
    loss = nn.functional.cross_entropy(net(x).float(), y)
    accelerator.backward(loss)
    opt.step()
    opt.zero_grad()
