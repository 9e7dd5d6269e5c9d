"""A small GAN with a gradient penalty in fp16: two steppers, two loss scales, an average of the generator."""

import torch
import torch.nn.functional as F

import halfstep

torch.manual_seed(0)
generator = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
critic = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.LeakyReLU(0.2), torch.nn.Linear(32, 1))
adam = {"lr": 5e-3, "betas": (0.0, 0.9)}
g_stepper = halfstep.Stepper(generator, torch.optim.Adam(generator.parameters(), **adam), "fp16")
d_stepper = halfstep.Stepper(critic, torch.optim.Adam(critic.parameters(), **adam), "fp16")
average = halfstep.WeightAverage(g_stepper, decay=0.95)


def critic_loss(real, noise):
    points = real.clone().requires_grad_()
    score = critic(points).float()
    (gradient,) = torch.autograd.grad(score.sum(), points, create_graph=True)
    penalty = gradient.float().square().sum(1).mean()
    return F.softplus(-score).mean() + F.softplus(critic(generator(noise).detach()).float()).mean() + penalty


for _ in range(400):
    real, noise = torch.randn(64, 2) * 0.2 + torch.tensor([2.0, -1.0]), torch.randn(64, 2)
    d_stepper.step(lambda real=real, noise=noise: critic_loss(real, noise))
    report = g_stepper.step(lambda noise=noise: F.softplus(-critic(generator(noise)).float()).mean())
    average.update(report)

with average.swapped(), g_stepper.inference():
    mean = generator(torch.randn(1000, 2)).float().mean(0)
print(f"scales {g_stepper.scale.value:g} and {d_stepper.scale.value:g}; the real mean is (2, -1)")
print(f"distance {torch.dist(mean, torch.tensor([2.0, -1.0])):.1f}")
