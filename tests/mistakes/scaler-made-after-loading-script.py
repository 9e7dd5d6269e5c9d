import torch
from torch import nn

net = nn.Linear(100, 10).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
saved = torch.load("last.pt", map_location="cuda")
net.load_state_dict(saved["net"])
opt.load_state_dict(saved["opt"])
scaler.load_state_dict(saved["scaler"])
scaler = torch.amp.GradScaler("cuda", growth_interval=500)  # HS164

for _ in range(100):
    x, y = torch.randn(64, 100, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        out = net(x)
    loss = nn.functional.cross_entropy(out.float(), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
