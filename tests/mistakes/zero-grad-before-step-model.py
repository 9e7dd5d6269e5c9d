import torch
from torch import nn


def train(net, loader):
    net = net.cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = net(x.cuda())
        loss = nn.functional.mse_loss(out.float(), y.cuda())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        net.zero_grad()  # HS109
        opt.step()
