import torch


def critic_loss(critic, real, fake):
    mix = torch.rand(len(real), 1, device=real.device)
    blend = (mix * real + (1 - mix) * fake).requires_grad_()
    with torch.autocast("cuda", enabled=False):
        score = critic(blend.float())
        (slope,) = torch.autograd.grad(score.sum(), blend, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
    with torch.autocast("cuda", dtype=torch.float16):
        a, b = critic(real), critic(fake)
    return b.float().mean() - a.float().mean() + 10 * penalty


def train(critic, pairs):
    critic = critic.cuda()
    opt = torch.optim.Adam(critic.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for real, fake in pairs:
        opt.zero_grad()
        scaler.scale(critic_loss(critic, real.cuda(), fake.cuda())).backward()
        scaler.step(opt)
        scaler.update()
