import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(3)
net = nn.Linear(5, 2).to(device)
sgd = torch.optim.SGD(net.parameters(), lr=0.5)
poly = torch.optim.lr_scheduler.PolynomialLR(sgd, total_iters=40)
S = torch.amp.GradScaler(device)
for _ in range(40):
    x, y = torch.randn(16, 5, device=device), torch.randint(0, 2, (16,), device=device)
    sgd.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        z = net(x)
    loss = nn.functional.cross_entropy(z.float(), y)
    S.scale(loss).backward()
    scale = S.get_scale()
    S.step(sgd)
    S.update()
    skipped = S.get_scale() < scale
    if not skipped:
        poly.step()
