import torch
from torch import nn
from torch.amp import GradScaler

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(5)
speaker = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 16)).to(device)
phoneme = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 42)).to(device)
opt_speaker = torch.optim.Adam(speaker.parameters(), lr=1e-3)
opt_phoneme = torch.optim.Adam(phoneme.parameters(), lr=1e-3)
scaler = GradScaler(device)

for _ in range(5):
    frames = torch.randn(64, 40, device=device)
    who, what = torch.randint(0, 16, (64,), device=device), torch.randint(0, 42, (64,), device=device)
    opt_speaker.zero_grad()
    opt_phoneme.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        a, b = speaker(frames), phoneme(frames)
    loss = nn.functional.cross_entropy(a.float(), who) + nn.functional.cross_entropy(b.float(), what)
    scaler.scale(loss).backward()
    scaler.step(opt_speaker)
    scaler.step(opt_speaker)  # HS108
    scaler.update()
