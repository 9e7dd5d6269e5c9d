import torch
from torch import nn


class Trainer:
    def __init__(self, net, lr):
        self.net = net.cuda()
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=lr, fused=True)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1000)
        self.scaler = torch.amp.GradScaler("cuda")
        self.num_skipped = 0

    def step(self, x, y):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(x)
        loss = nn.functional.mse_loss(out.float(), y)
        self.scaler.scale(loss).backward()
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        skipped = self.scaler.get_scale() < scale
        if skipped:
            self.num_skipped += 1
        else:
            self.scheduler.step()
