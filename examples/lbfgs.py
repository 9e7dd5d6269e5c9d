"""Fit a curve with LBFGS in fp16: the optimizer evaluates the loss itself, at true fp32 gradients."""

import torch
import torch.nn.functional as F

import halfstep

torch.manual_seed(0)
x = torch.linspace(-1, 1, 128).reshape(-1, 1)
y = torch.sin(3 * x)
model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
stepper = halfstep.Stepper(model, optimizer, "fp16")

for _ in range(4):
    report = stepper.step(lambda: F.mse_loss(model(x).float(), y))
    print(report)
print("fits:", report.loss < 1e-3)
