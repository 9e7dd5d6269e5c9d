import torch
from torch import nn


class Base:
    def __init__(self, net, max_norm):
        self.net, self.max_norm = net.cuda(), max_norm
        self.opt = torch.optim.RAdam(net.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cuda")

    def clip(self):
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.net.parameters(), self.max_norm)

    def train_step(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(x)
        loss = nn.functional.l1_loss(out.float(), y)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        self.clip()  # HS103
        self.scaler.step(self.opt)
        self.scaler.update()
