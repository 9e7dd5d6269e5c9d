import torch
from torch import nn


def train(net, loader):
    net = net.cuda()
    opt = torch.optim.Adam(net.parameters(), lr=2e-4)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x.cuda())
        loss = nn.functional.mse_loss(out.float(), y.cuda())
        with torch.autograd.detect_anomaly():  # HS203
            scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
