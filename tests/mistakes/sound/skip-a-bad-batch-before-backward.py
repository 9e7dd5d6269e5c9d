import torch
from torch import nn


def train(net, loader):
    net = net.cuda()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for x, boxes in loader:
        if not len(boxes):
            continue
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x.cuda())
        loss = nn.functional.smooth_l1_loss(out.float(), boxes.cuda())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if len(boxes) > 1000:
            break
