import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

device = "cuda" if torch.cuda.is_available() else "cpu"


class Scans(Dataset):
    def __init__(self, volumes: torch.Tensor, ages: torch.Tensor) -> None:
        self.volumes, self.ages = volumes, ages

    def __len__(self) -> int:
        return len(self.ages)

    def __getitem__(self, index):
        return self.volumes[index], self.ages[index]


torch.manual_seed(33)
scans = Scans(torch.rand(24, 1, 8, 8, 8), 90 * torch.rand(24, 1))
net = nn.Sequential(nn.Conv3d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 216, 1)).to(device)
opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
gs = torch.amp.GradScaler(device)
for volume, age in DataLoader(scans, batch_size=8, shuffle=True):
    opt.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        guess = net(volume.to(device))
    loss = nn.functional.l1_loss(guess.float(), age.to(device))
    gs.scale(loss).backward()
    gs.step(opt)
    gs.update()
