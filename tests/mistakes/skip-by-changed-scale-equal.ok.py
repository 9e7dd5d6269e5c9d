import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(23)
net = nn.Linear(8, 3).to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.2)
decay = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.99)
scaler = torch.amp.GradScaler(device, init_scale=512.0, growth_interval=4)

for _ in range(12):
    x, y = torch.randn(32, 8, device=device), torch.randint(0, 3, (32,), device=device)
    opt.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        logits = net(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scale_before = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    if scaler.get_scale() >= scale_before:
        decay.step()
