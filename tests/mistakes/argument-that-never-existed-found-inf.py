import torch
from torch import nn


def step(net, opt, scaler, x, y):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = net(x)
    loss = nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    overflow = bool(scaler._found_inf)  # HS136
    scaler.update()
    return overflow


def train(net, batches):
    net = net.cuda()
    opt = torch.optim.Adam(net.parameters())
    scaler = torch.amp.GradScaler("cuda")
    return sum(step(net, opt, scaler, x.cuda(), y.cuda()) for x, y in batches)
