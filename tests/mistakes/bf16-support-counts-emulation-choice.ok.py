import torch
from torch import nn


def pick_dtype() -> torch.dtype:
    if torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float16


def train(net, loader):
    dtype = pick_dtype()
    net = net.cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=dtype):
            out = net(x.cuda())
        loss = nn.functional.cross_entropy(out.float(), y.cuda())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
