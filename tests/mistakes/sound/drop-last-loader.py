import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

ACCUM = 8


def train(net, dataset, batch_size=16):
    whole = len(dataset) // (batch_size * ACCUM) * batch_size * ACCUM
    loader = DataLoader(Subset(dataset, range(whole)), batch_size=batch_size, shuffle=True, drop_last=True)
    net = net.cuda()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = net(x.cuda())
        (nn.functional.cross_entropy(out.float(), y.cuda()) / ACCUM).backward()
        if (i + 1) % ACCUM == 0 or i + 1 == len(loader):
            opt.step()
            opt.zero_grad(set_to_none=True)
