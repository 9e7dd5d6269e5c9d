import torch
from torch import nn

ACC = 6


def train(net, stream, opt, gs, num_micro_batches):
    micro = 0
    while micro < num_micro_batches:
        x, y = next(stream)
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x.cuda())
        loss = nn.functional.smooth_l1_loss(out.float(), y.cuda())
        gs.scale(loss).backward()  # HS120
        micro += 1
        if micro % ACC == 0 or micro == num_micro_batches:
            gs.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            gs.step(opt)
            gs.update()
            opt.zero_grad(set_to_none=True)


def main(net, stream):
    opt = torch.optim.Adam(net.cuda().parameters(), lr=1e-3)
    train(net, stream, opt, torch.amp.GradScaler("cuda"), 6000)
