import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(2)
tower = nn.ModuleDict({"user": nn.Linear(20, 16), "item": nn.Linear(30, 16)}).to(device)
opt = torch.optim.Adam(
    [{"params": tower["user"].parameters()}, {"params": tower["item"].parameters(), "lr": 1e-4}], lr=1e-3
)
gs = torch.amp.GradScaler(device)

for _ in range(20):
    users, items = torch.randn(32, 20, device=device), torch.randn(32, 30, device=device)
    clicked = torch.randint(0, 2, (32,), device=device).float()
    opt.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        u, v = tower["user"](users), tower["item"](items)
    affinity = (u.float() * v.float()).sum(-1)
    loss = nn.functional.binary_cross_entropy_with_logits(affinity, clicked)
    gs.scale(loss).backward()
    gs.unscale_(opt)
    nn.utils.clip_grad_norm_(tower["user"].parameters(), 1.0)
    gs.unscale_(opt)  # HS103
    nn.utils.clip_grad_norm_(tower["item"].parameters(), 0.1)
    gs.step(opt)
    gs.update()
