"""The generator learns once for every five critic steps; each optimizer has a scaler of its own."""

import torch


def train(gen, critic, loader, ratio=5):
    gen, critic = gen.cuda(), critic.cuda()
    g_opt = torch.optim.RMSprop(gen.parameters(), lr=5e-5)
    c_opt = torch.optim.RMSprop(critic.parameters(), lr=5e-5)
    g_scaler, c_scaler = torch.amp.GradScaler("cuda"), torch.amp.GradScaler("cuda")
    for i, real in enumerate(loader):
        real = real.cuda()
        c_opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            fake = gen(torch.randn(len(real), 32, device="cuda"))
            a, b = critic(real), critic(fake.detach())
        c_scaler.scale(b.float().mean() - a.float().mean()).backward()
        c_scaler.step(c_opt)
        c_scaler.update()
        for w in critic.parameters():
            w.data.clamp_(-0.01, 0.01)
        if i % ratio:
            continue
        g_opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            verdict = critic(fake)
        g_scaler.scale(-verdict.float().mean()).backward()
        g_scaler.step(g_opt)
        g_scaler.update()
