import torch
import torch.amp as amp
from torch import nn


def train(net, loader):
    net = net.cuda()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    gs = amp.GradScaler("cuda")
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x.cuda())
        loss = nn.functional.mse_loss(out.float(), y.cuda())
        gs.scale(loss).backward()
        gs.step(opt)
        gs.update()
