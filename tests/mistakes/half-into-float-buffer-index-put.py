import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(58)


class VoxelEncoder(nn.Module):
    def __init__(self, cells: int, width: int) -> None:
        super().__init__()
        self.cells, self.width = cells, width
        self.point_net = nn.Linear(3, width)
        self.decide = nn.Linear(width, 4)

    def forward(self, points, cell):
        feature = self.point_net(points)
        grid = torch.zeros(self.cells, self.width, device=points.device)
        grid[cell] = feature  # HS158
        return self.decide(grid)


net = VoxelEncoder(64, 8).to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
gs = torch.amp.GradScaler(device)
for _ in range(3):
    points, cell = torch.randn(20, 3, device=device), torch.randperm(64, device=device)[:20]
    opt.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        logits = net(points, cell)
    loss = nn.functional.cross_entropy(logits.float(), torch.zeros(64, dtype=torch.long, device=device))
    gs.scale(loss).backward()
    gs.step(opt)
    gs.update()
