import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(21)
EVERY = 4
radar = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1)).to(device)
adam = torch.optim.Adam(radar.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device)
frames = [(torch.randn(2, 2, 16, 16), torch.rand(2, 1, 16, 16)) for _ in range(11)]

for epoch in range(3):
    adam.zero_grad(set_to_none=True)
    for k, (echo, rain) in enumerate(frames):
        with torch.autocast(device, dtype=torch.float16):
            nowcast = radar(echo.to(device))
        loss = nn.functional.mse_loss(nowcast.float(), rain.to(device))
        scaler.scale(loss / EVERY).backward()
        if k % EVERY == EVERY - 1:  # HS121
            scaler.step(adam)
            scaler.update()
            adam.zero_grad(set_to_none=True)
