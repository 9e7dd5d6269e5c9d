"""Two tasks on one trunk: large entries of its gradient are squashed, so that neither task drowns the other."""

import torch
from torch import nn


class MultiTask:
    def __init__(self, trunk, tasks):
        self.trunk, self.tasks = trunk.cuda(), tasks.cuda()
        self.opt = torch.optim.Adam([*trunk.parameters(), *tasks.parameters()], lr=1e-3)
        self.gs = torch.amp.GradScaler("cuda")

    def train_step(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.tasks(self.trunk(x))
        loss = nn.functional.mse_loss(out.float(), y)
        self.gs.scale(loss).backward()
        shrink_large(self.trunk)  # HS102
        self.gs.step(self.opt)
        self.gs.update()


def shrink_large(module, limit=0.01):
    for w in module.parameters():
        if w.grad is not None:
            w.grad.div_(1 + w.grad.abs() / limit)
