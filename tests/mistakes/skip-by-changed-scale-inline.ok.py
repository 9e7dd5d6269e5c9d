import torch
from torch import nn


class Ticker:
    def __init__(self, net):
        self.net = net.cuda()
        self.opt = torch.optim.Adam(net.parameters(), lr=1e-3)
        self.gs = torch.amp.GradScaler("cuda")
        self.applied = 0

    def tick(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(x)
        self.gs.scale(nn.functional.mse_loss(out.float(), y)).backward()
        scale = self.gs.get_scale()
        self.gs.step(self.opt)
        self.gs.update()
        self.applied += int(scale <= self.gs.get_scale())
