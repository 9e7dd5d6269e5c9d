import copy

import torch
from torch import nn


class Average:
    def __init__(self, net: nn.Module, decay: float = 0.999) -> None:
        self.decay = decay
        self.net = copy.deepcopy(net).float().requires_grad_(False)

    @torch.no_grad()
    def update(self, net: nn.Module) -> None:
        for mine, theirs in zip(self.net.parameters(), net.parameters()):
            mine.lerp_(theirs.float(), 1 - self.decay)

    def export(self, path: str) -> None:
        torch.save({k: v.to(torch.bfloat16) for k, v in self.net.state_dict().items()}, path)


def train(net, loader):
    net = net.cuda()
    average = Average(net)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = net(x.cuda())
        loss = nn.functional.mse_loss(out.float(), y.cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()
        average.update(net)
    average.export("average.pt")
