import copy

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(22)
N = 3
unet = nn.Sequential(nn.Conv1d(4, 16, 3, padding=1), nn.SiLU(), nn.Conv1d(16, 4, 3, padding=1)).to(device)
ema = copy.deepcopy(unet).requires_grad_(False)
opt = torch.optim.Adam(unet.parameters(), lr=2e-4)
gs = torch.amp.GradScaler(device)


@torch.no_grad()
def follow(average, model, decay=0.999):
    for a, w in zip(average.parameters(), model.parameters()):
        a.lerp_(w, 1 - decay)


signals = torch.randn(9, 8, 4, 32)
for i, clean in enumerate(signals):
    clean = clean.to(device)
    noise = torch.randn_like(clean)
    with torch.autocast(device, dtype=torch.float16):
        guess = unet(clean + noise)
    loss = nn.functional.mse_loss(guess.float(), noise)
    gs.scale(loss / N).backward()
    if (i + 1) % N == 0 or i + 1 == len(signals):
        gs.step(opt)
        gs.update()
        opt.zero_grad(set_to_none=True)
    follow(ema, unet)  # HS122
