import itertools

import torch
from torch import nn
from torch.amp import GradScaler

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(4)
folding = nn.Sequential(nn.Linear(21, 96), nn.GELU(), nn.Linear(96, 3)).to(device)
adam = torch.optim.Adam(folding.parameters(), lr=1e-3)
my_scaler = GradScaler(device)
stream = itertools.cycle([(torch.randn(64, 21), torch.randn(64, 3)) for _ in range(4)])

done = 0
while done < 12:
    residues, angles = next(stream)
    adam.zero_grad(set_to_none=True)
    with torch.autocast(device, dtype=torch.float16):
        predicted = folding(residues.to(device))
    objective = nn.functional.mse_loss(predicted.float(), angles.to(device))
    objective.backward()  # HS104
    my_scaler.step(adam)
    my_scaler.update()
    done += 1
