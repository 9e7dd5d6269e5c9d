import torch
from torch import nn


def train(model, loader, log_every=100):
    model = model.cuda()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for step, (x, y) in enumerate(loader):
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x.cuda())
        loss = nn.functional.cross_entropy(out.float(), y.cuda())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % log_every == 0:
            print(step, loss.item())
