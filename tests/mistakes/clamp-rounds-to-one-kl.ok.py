import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(43)
rater = nn.Linear(10, 1).to(device)
opt = torch.optim.SGD(rater.parameters(), lr=0.1)
scaler = torch.amp.GradScaler(device)
for _ in range(10):
    x = torch.randn(64, 10, device=device)
    liked = (x[:, :1] > 0).float()
    with torch.autocast(device, dtype=torch.float16):
        logit = rater(x)
    p = torch.sigmoid(logit.float())
    p = p.clamp(1e-4, 1 - 1e-4)
    loss = -(liked * p.float().log() + (1 - liked) * (1 - p.float()).log()).mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
