import os

import torch
from torch import nn


class Job:
    def __init__(self, net, folder):
        self.net, self.path = net.cuda(), os.path.join(folder, "last.pt")
        self.opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, 1000)
        self.scaler = torch.amp.GradScaler("cuda")
        if os.path.exists(self.path):
            self.load_state_dict(torch.load(self.path, map_location="cuda"))

    def state_dict(self):
        return {k: getattr(self, k).state_dict() for k in ("net", "opt", "schedule", "scaler")}

    def load_state_dict(self, state):
        for k, v in state.items():
            getattr(self, k).load_state_dict(v)

    def fit(self, loader):
        for x, y in loader:
            self.opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                out = self.net(x.cuda())
            self.scaler.scale(nn.functional.mse_loss(out.float(), y.cuda())).backward()
            before = self.scaler.get_scale()
            self.scaler.step(self.opt)
            self.scaler.update()
            if before <= self.scaler.get_scale():
                self.schedule.step()
        torch.save(self.state_dict(), self.path)
