import torch
from torch import nn


def train(net, batches):
    net = net.cuda()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    num_skipped = 0
    for x, y in batches:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x.cuda())
        loss = nn.functional.mse_loss(out.float(), y.cuda())
        scaler.scale(loss).backward()
        result = scaler.step(opt)
        if result is None:  # HS124
            num_skipped += 1
        scaler.update()
    return num_skipped
