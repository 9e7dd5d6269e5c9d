import torch
from torch import autocast as cast
from torch import nn


def learn(net, stream, lr):
    optim = torch.optim.SGD(net.parameters(), lr=lr)
    gs = torch.amp.GradScaler("cuda")
    for x, y in stream:
        optim.zero_grad()
        with cast("cuda", torch.float16):
            logits = net(x)
        loss = nn.functional.cross_entropy(logits.float(), y)
        gs.scale(loss).backward()
        gs.step(optim)
        gs.update()
        yield loss.detach()
