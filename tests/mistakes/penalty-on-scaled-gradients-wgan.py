import torch


def lipschitz_term(critic, real, fake, scaler):
    mix = torch.rand(len(real), 1, 1, 1, device=real.device)
    blend = (mix * real + (1 - mix) * fake).requires_grad_()
    with torch.autocast("cuda", dtype=torch.float16):
        score = critic(blend)
    slope = torch.autograd.grad(scaler.scale(score.float().sum()), blend, create_graph=True)[0]
    return (slope.flatten(1).norm(dim=1) - 1).square().mean()  # HS114


def critic_step(critic, generator, opt, scaler, real):
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        fake = generator(torch.randn(len(real), 100, device="cuda"))
    fake = fake.float()
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        on_fake, on_real = critic(fake), critic(real)
    gap = on_fake.float().mean() - on_real.float().mean()
    loss = gap + 10.0 * lipschitz_term(critic, real, fake, scaler)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()


def train(critic, generator, loader):
    opt = torch.optim.Adam(critic.cuda().parameters(), lr=1e-4, betas=(0.0, 0.9))
    scaler = torch.amp.GradScaler("cuda")
    for real, _ in loader:
        critic_step(critic, generator, opt, scaler, real.cuda())
