import torch
from torch import nn


class LogDet(nn.Module):
    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            x = x.float()
            gram = x @ x.mT + 1e-6 * torch.eye(x.shape[-2], device=x.device)
            return torch.linalg.slogdet(gram)[1]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.logdet = nn.Linear(64, 64), LogDet()

    def forward(self, x):
        return self.logdet(self.body(x))


net = Net().cuda()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
for _ in range(10):
    x = torch.randn(8, 16, 64, device="cuda")
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        volume = net(x)
    scaler.scale(-volume.float().mean()).backward()
    scaler.step(opt)
    scaler.update()
