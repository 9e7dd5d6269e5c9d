import torch
from torch import nn


class Fitter:
    def __init__(self, net, use_amp):
        self.net = net.cuda()
        self.opt = torch.optim.SGD(net.parameters(), lr=0.1)
        self.use_amp = use_amp
        self.scaler = torch.amp.GradScaler("cuda") if use_amp else None

    def batch(self, x, y):
        self.opt.zero_grad()
        if self.use_amp:
            with torch.autocast("cuda", dtype=torch.float16):
                out = self.net(x)
            loss = nn.functional.cross_entropy(out.float(), y)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.opt)
        else:
            loss = nn.functional.cross_entropy(self.net(x), y)
            loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        if self.use_amp:
            self.scaler.step(self.opt)
            self.scaler.update()
        else:
            self.opt.step()
