import torch
from torch import nn


def train_epoch(net, loader, opt, gs):
    net.train()
    running = torch.zeros((), device="cuda")
    for x, y in loader:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x.cuda(non_blocking=True))
        loss = nn.functional.cross_entropy(out.float(), y.cuda(non_blocking=True))
        gs.scale(loss).backward()
        gs.step(opt)
        gs.update()
        running += loss.detach()
    return (running / len(loader)).item()


def main(net, loader):
    net = net.cuda()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    gs = torch.amp.GradScaler("cuda")
    for epoch in range(20):
        print(epoch, train_epoch(net, loader, opt, gs))
