import torch
from torch import nn

device = "cpu"
torch.manual_seed(31)


class Whitening(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        h = self.mix(x)
        with torch.autocast("cpu", enabled=False):
            wide = h.float()
            covariance = wide.T @ wide / len(wide)
        return h, covariance


net = Whitening(12).to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(5):
    x = torch.randn(64, 12, device=device)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, cov = net(x)
    loss = nn.functional.mse_loss(cov.float(), torch.eye(12, device=device))
    opt.zero_grad()
    loss.backward()
    opt.step()
