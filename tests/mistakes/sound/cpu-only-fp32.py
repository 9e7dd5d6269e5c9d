import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.LBFGS(net.parameters(), lr=0.5)
x = torch.randn(256, 4)
y = x.prod(-1, keepdim=True)


def closure():
    opt.zero_grad()
    loss = ((net(x) - y) ** 2).mean()
    loss.backward()
    return loss


for _ in range(10):
    opt.step(closure)
print(closure().item())
