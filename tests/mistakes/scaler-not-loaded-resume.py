import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--resume", default=None)
args = parser.parse_args()

net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).cuda()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
gs = torch.amp.GradScaler("cuda")
first = 0
if args.resume:
    saved = torch.load(args.resume, map_location="cuda")
    net.load_state_dict(saved["net"])
    opt.load_state_dict(saved["opt"])  # HS163
    first = saved["epoch"] + 1

for epoch in range(first, 10):
    for _ in range(100):
        x, y = torch.randn(64, 32, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            logits = net(x)
        loss = nn.functional.cross_entropy(logits.float(), y)
        gs.scale(loss).backward()
        gs.step(opt)
        gs.update()
    torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "gs": gs.state_dict(), "epoch": epoch}, "last.pt")
