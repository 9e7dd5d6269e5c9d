import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(32)
net = nn.Sequential(nn.Linear(9, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for _ in range(10):
    x = torch.randn(32, 9, device=device)
    opt.zero_grad()
    with torch.autocast(device, dtype=torch.bfloat16):
        y = net(x)
        loss = nn.functional.mse_loss(y.float(), x[:, :1])
    loss.backward()
    opt.step()
