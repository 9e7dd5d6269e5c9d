import torch
from torch import nn


def train(net, loader, device):
    net.to(device)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device)
    for i, (x, y) in enumerate(loader):
        opt.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.float16):
            out = net(x.to(device))
        loss = nn.functional.mse_loss(out.float(), y.to(device))
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
