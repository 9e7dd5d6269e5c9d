import torch
from torch import nn
from torch.amp import GradScaler, autocast


class Fitter:
    def __init__(self, net, writer):
        self.net, self.writer = net.cuda(), writer
        self.opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
        self.gs = GradScaler("cuda")
        self.count = 0

    def batch(self, x, y):
        self.opt.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            prediction = self.net(x)
        loss = nn.functional.huber_loss(prediction.float(), y)
        big = self.gs.scale(loss)
        big.backward()
        self.gs.step(self.opt)
        self.gs.update()
        self.count += 1
        if self.count % 50 == 0:
            self.writer.add_scalar("train/loss", big.item(), self.count)  # HS160
