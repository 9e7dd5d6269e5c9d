import torch
from torch import nn

dev = "cuda"


class CellCounter(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.Conv2d(32, 1, 1))

    @torch.autocast("cuda", dtype=torch.float16)  # HS115
    def forward(self, image):
        return self.features(image)


counter = CellCounter().to(dev)
adam = torch.optim.Adam(counter.parameters(), lr=1e-3)
for _ in range(100):
    image = torch.rand(8, 1, 96, 96, device=dev)
    density = torch.rand(8, 1, 96, 96, device=dev)
    adam.zero_grad()
    loss = nn.functional.mse_loss(counter(image).float(), density)
    loss.backward()
    adam.step()
