"""bf16 weights for the forward pass, fp32 masters under the optimizer."""

import copy

import torch
from torch import nn


def train(net, loader):
    master = net.cuda().float()
    fast = copy.deepcopy(master).to(torch.bfloat16)
    opt = torch.optim.AdamW(master.parameters(), lr=1e-4)
    for x, y in loader:
        out = fast(x.cuda().to(torch.bfloat16))
        loss = nn.functional.cross_entropy(out.float(), y.cuda())
        loss.backward()
        for slow, quick in zip(master.parameters(), fast.parameters()):
            slow.grad = quick.grad.float()
            quick.grad = None
        nn.utils.clip_grad_norm_(master.parameters(), 1.0)
        opt.step()
        with torch.no_grad():
            for slow, quick in zip(master.parameters(), fast.parameters()):
                quick.copy_(slow)
