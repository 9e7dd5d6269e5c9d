import torch
from torch import nn


class Contrast(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.left, self.right = nn.Linear(d, 64), nn.Linear(d, 64)

    def forward(self, a, b):
        u, v = self.left(a), self.right(b)
        with torch.amp.autocast("cuda", enabled=False):
            logits = u.float() @ v.float().T / 0.07
        return logits


def train(net, pairs):
    net = net.cuda()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for a, b in pairs:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = net(a.cuda(), b.cuda())
        loss = nn.functional.cross_entropy(logits.float(), torch.arange(len(a), device="cuda"))
        opt.zero_grad()
        loss.backward()
        opt.step()
