import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(42)
mixer = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 6)).to(device)
opt = torch.optim.Adam(mixer.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device)

for _ in range(8):
    x = torch.randn(32, 20, device=device)
    y = torch.randint(0, 6, (32,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        gate = torch.relu(mixer(x))
    log_gate = torch.log(gate.float().clamp(min=1e-4))
    loss = nn.functional.nll_loss(log_gate.float().log_softmax(-1), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
