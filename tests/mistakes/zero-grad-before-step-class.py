import torch
from torch import nn


class DepthTrainer:
    def __init__(self, net, lr=1e-4):
        self.net = net.to("cuda")
        self.opt = torch.optim.AdamW(net.parameters(), lr=lr)
        self.grad_scaler = torch.amp.GradScaler("cuda")

    def apply(self):
        self.grad_scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.grad_scaler.step(self.opt)
        self.grad_scaler.update()

    def train_step(self, left, right, disparity):
        with torch.autocast("cuda", dtype=torch.float16):
            guess = self.net(left, right)
        loss = nn.functional.smooth_l1_loss(guess.float(), disparity)
        self.grad_scaler.scale(loss).backward()
        self.opt.zero_grad(set_to_none=False)  # HS109
        self.apply()
        return loss.detach()
