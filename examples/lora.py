"""Low-rank adapters in fp32 on a frozen base in bf16, which stays as it is to the bit."""

import torch
import torch.nn.functional as F

import halfstep


class Adapted(torch.nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


torch.manual_seed(0)
layers = [Adapted(torch.nn.Linear(16, 16).bfloat16()) for _ in range(2)]
model = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1])
base = [layer.base.weight.clone() for layer in layers]

x = torch.randn(256, 16)
y = torch.tanh(x @ torch.randn(16, 16) / 4)
adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
stepper = halfstep.Stepper(model, torch.optim.AdamW(adapters, lr=1e-2), "bf16", max_norm=1.0)
for _ in range(100):
    report = stepper.step(lambda: F.mse_loss(model(x).float(), y))
print(report)
print("the base is untouched:", all(map(torch.equal, base, (layer.base.weight for layer in layers))))
