import torch
from torch import nn
from torch.amp import GradScaler, autocast


def run(net, loader):
    net = net.cuda()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = GradScaler("cuda")
    for x, y in loader:
        opt.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            out = net(x.cuda())
            loss = nn.functional.cross_entropy(out.float(), y.cuda())
            scaler.scale(loss).backward()  # HS204
        scaler.step(opt)
        scaler.update()
