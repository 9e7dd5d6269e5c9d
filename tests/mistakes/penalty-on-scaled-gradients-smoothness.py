import torch
from torch import nn

dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(14)
field = nn.Sequential(nn.Linear(2, 64), nn.Softplus(), nn.Linear(64, 1)).to(dev)
opt = torch.optim.Adam(field.parameters(), lr=1e-3)
gs = torch.amp.GradScaler(dev, init_scale=256.0)

for _ in range(15):
    xy = torch.rand(128, 2, device=dev, requires_grad=True)
    height = xy.detach().sum(-1, keepdim=True)
    opt.zero_grad()
    with torch.autocast(dev, dtype=torch.float16):
        z = field(xy)
    fit = nn.functional.mse_loss(z.float(), height)
    (grads,) = torch.autograd.grad(gs.scale(fit), xy, create_graph=True)
    rough = grads.pow(2).sum(dim=-1).mean()  # HS114
    gs.scale(fit + 0.01 * rough).backward()
    gs.step(opt)
    gs.update()
