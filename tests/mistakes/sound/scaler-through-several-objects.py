from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class Precision:
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler("cuda"))

    def region(self):
        return torch.autocast("cuda", dtype=torch.float16)


class Stepper:
    def __init__(self, precision: Precision, opt, params):
        self.precision, self.opt, self.params = precision, opt, list(params)

    def __call__(self, loss):
        gs = self.precision.scaler
        gs.scale(loss).backward()
        gs.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.params, 1.0)
        gs.step(self.opt)
        gs.update()
        self.opt.zero_grad(set_to_none=True)


class Trainer:
    def __init__(self, net):
        self.net = net.cuda()
        self.precision = Precision()
        self.step = Stepper(self.precision, torch.optim.Adam(net.parameters(), lr=1e-3), net.parameters())

    def fit(self, loader):
        for x, y in loader:
            with self.precision.region():
                out = self.net(x.cuda())
            self.step(nn.functional.mse_loss(out.float(), y.cuda()))
