import torch
from torch import nn


class Base:
    def __init__(self, net):
        self.net = net.cuda()
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cuda")

    def backward(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)

    def apply(self):
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad(set_to_none=True)


class WithClipping(Base):
    def train_step(self, x, y):
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(x)
        self.backward(nn.functional.mse_loss(out.float(), y))
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.apply()


class WithCensus(Base):
    def train_step(self, x, y):
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(x)
        self.backward(nn.functional.l1_loss(out.float(), y))
        norms = [w.grad.norm() for w in self.net.parameters()]
        self.apply()
        return torch.stack(norms)
