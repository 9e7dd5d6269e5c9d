import torch
from torch import nn


def train(net, loader, accum=4):
    net = net.cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    batches = list(loader)
    for start in range(0, len(batches), accum):
        window = batches[start : start + accum]
        opt.zero_grad(set_to_none=True)
        for x, y in window:
            with torch.autocast("cuda", dtype=torch.float16):
                out = net(x.cuda())
            loss = nn.functional.mse_loss(out.float(), y.cuda())
            scaler.scale(loss / len(window)).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
