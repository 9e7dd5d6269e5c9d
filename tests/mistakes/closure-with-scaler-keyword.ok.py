import torch
from torch import nn

dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(13)
net = nn.Linear(6, 1).to(dev)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler(dev)

for _ in range(5):
    x, y = torch.randn(64, 6, device=dev), torch.randn(64, 1, device=dev)

    def compute():
        opt.zero_grad()
        with torch.autocast(dev, dtype=torch.float16):
            out = net(x)
        loss = nn.functional.mse_loss(out.float(), y)
        scaler.scale(loss).backward()
        return loss

    compute()
    scaler.step(opt)
    scaler.update()
