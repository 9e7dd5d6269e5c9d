import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(11)
chess = nn.Sequential(nn.Linear(768, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
opt = torch.optim.SGD(chess.parameters(), lr=0.01)
scaler = torch.amp.GradScaler(device)


def study(position, outcome, num_seen):
    opt.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        value = chess(position)
    loss = nn.functional.binary_cross_entropy_with_logits(value.float(), outcome)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    if num_seen % 1000 == 999 and not all(torch.isfinite(w.grad).all() for w in chess.parameters()):
        scaler.update()
        return False
    scaler.step(opt)
    scaler.update()
    return True


for n in range(25):
    study(torch.randn(16, 768, device=device), torch.rand(16, 1, device=device), n)
