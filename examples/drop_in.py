"""A loop written for torch.amp, with clipping and a scheduler, on other classes: only the imports have changed."""

import torch
import torch.nn.functional as F

from halfstep import GradScaler, autocast  # before: from torch.amp import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
teacher = torch.randn(16, 4)
inputs = torch.randn(512, 16)
targets = (inputs @ teacher).argmax(dim=1)
inputs, targets = inputs.to(device), targets.to(device)

model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.LayerNorm(64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
model.to(device)
optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=120)
scaler = GradScaler(device, init_scale=2.0**24)  # too high: the first steps overflow
num_skipped = 0

for _ in range(8):
    for x, y in zip(inputs.split(32), targets.split(32), strict=True):
        optimizer.zero_grad()
        with autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if scaler.last_step_applied:  # torch.amp does not say it
            scheduler.step()
        else:
            num_skipped += 1

with torch.no_grad(), autocast(device, dtype=torch.float16):
    accuracy = (model(inputs).argmax(dim=1) == targets).float().mean().item()
print(f"accuracy {accuracy:.2f}, {num_skipped} steps skipped, scale {scaler.get_scale():g}")
