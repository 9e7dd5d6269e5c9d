import torch
from torch import nn

dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(12)
matcher = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)).to(dev)
opt = torch.optim.Adam(matcher.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(dev)

for _ in range(10):
    x, y = torch.randn(8, 16, device=dev), torch.randint(0, 2, (8,), device=dev)
    opt.zero_grad()
    with torch.autocast(dev, dtype=torch.float16):
        logits = matcher(x)
        main_loss = nn.functional.cross_entropy(logits.float(), y)
        smooth = 1e-3 * logits.float().square().mean()
    loss = torch.stack([main_loss.detach(), smooth.detach()]).sum().requires_grad_()  # HS112
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
