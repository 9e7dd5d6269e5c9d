import torch
from torch import nn


class Pretraining:
    def __init__(self, net: nn.Module) -> None:
        self.net = net.cuda()
        self.opt = torch.optim.AdamW(net.parameters(), lr=3e-4)
        self.scaler = torch.amp.GradScaler("cuda")  # HS201

    def step(self, tokens):
        self.opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = self.net(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.detach()
