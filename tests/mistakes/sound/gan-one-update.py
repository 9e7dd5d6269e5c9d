import torch
import torch.nn.functional as F
from torch import nn


def play(gen, disc, opts, scaler, real):
    opt_g, opt_d = opts
    noise = torch.randn(len(real), 32, device="cuda")
    opt_d.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        fake = gen(noise)
        r, f = disc(real), disc(fake.detach())
    scaler.scale(F.relu(1 - r.float()).mean() + F.relu(1 + f.float()).mean()).backward()
    scaler.unscale_(opt_d)
    nn.utils.clip_grad_norm_(disc.parameters(), 1.0)
    scaler.step(opt_d)

    opt_g.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        verdict = disc(fake)
    scaler.scale(-verdict.float().mean()).backward()
    scaler.step(opt_g)
    scaler.update()


def train(gen, disc, loader):
    gen, disc = gen.cuda(), disc.cuda()
    opts = torch.optim.Adam(gen.parameters(), lr=1e-4), torch.optim.Adam(disc.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for real in loader:
        play(gen, disc, opts, scaler, real.cuda())
