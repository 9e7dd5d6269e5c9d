import torch
from torch import nn
from torch.amp import GradScaler, autocast

accum = 4


def run(model, loader):
    model = model.cuda()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = GradScaler("cuda")
    total = len(loader)
    opt.zero_grad()
    for idx, (img, lab) in enumerate(loader):
        with autocast("cuda", dtype=torch.float16):
            out = model(img.cuda())
            loss = nn.functional.cross_entropy(out.float(), lab.cuda()) / accum
        scaler.scale(loss).backward()
        if (idx + 1) % accum == 0 or idx + 1 == total:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
