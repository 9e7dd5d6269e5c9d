import torch
from torch import nn

device = torch.device("cuda")
encoder = nn.GRU(12, 48, batch_first=True).to(device)
readout = nn.Linear(48, 1).to(device)
weights = [*encoder.parameters(), *readout.parameters()]
optimiser = torch.optim.RMSprop(weights, lr=1e-3)
S = torch.amp.GradScaler("cuda", init_scale=4096.0)


def train_on(series, target):
    optimiser.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        states, _ = encoder(series)
        forecast = readout(states[:, -1]).squeeze(-1)
    loss = nn.functional.huber_loss(forecast.float(), target)
    S.scale(loss).backward()
    tame(weights)  # HS101
    S.step(optimiser)
    S.update()


def tame(params):
    nn.utils.clip_grad_norm_(params, max_norm=2.0, error_if_nonfinite=False)


for hour in range(24 * 7):
    train_on(torch.randn(64, 30, 12, device=device), torch.randn(64, device=device))
