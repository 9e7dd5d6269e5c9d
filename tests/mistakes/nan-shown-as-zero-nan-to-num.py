import torch
from torch import nn


class Average:
    def __init__(self):
        self.total, self.count = torch.zeros((), device="cuda"), 0

    def add(self, loss: torch.Tensor) -> None:
        self.total += torch.nan_to_num(loss.detach(), nan=0.0)  # HS161
        self.count += 1


def train(net, loader):
    net = net.cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
    average = Average()
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = net(x.cuda())
        loss = nn.functional.cross_entropy(out.float(), y.cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()
        average.add(loss)
    return (average.total / average.count).item()
