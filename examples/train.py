"""Train a small classifier in the policy that suits this machine, with accumulation, clipping and a scheduler."""

import torch
import torch.nn.functional as F

import halfstep

torch.manual_seed(0)
teacher = torch.randn(16, 4)
inputs = torch.randn(512, 16)
data = torch.utils.data.TensorDataset(inputs, (inputs @ teacher).argmax(dim=1))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)

model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=48)
stepper = halfstep.Stepper(model, optimizer, "auto", accumulate=4, max_norm=1.0, scheduler=scheduler)
print(f"{stepper.info.effective}: {stepper.info.reason}")

for _ in range(6):
    for x, y in loader:
        report = stepper.step(lambda x=x, y=y: F.cross_entropy(model(x).float(), y))
    print(report)
stepper.flush()

model.eval()
with stepper.inference():
    accuracy = (model(inputs).argmax(dim=1) == data.tensors[1]).float().mean().item()
print(f"accuracy {accuracy:.2f}")
