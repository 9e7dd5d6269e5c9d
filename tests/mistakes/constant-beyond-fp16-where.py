import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(40)
NEG_INF = -1e6
scorer = nn.Linear(24, 15).to(device)
opt = torch.optim.SGD(scorer.parameters(), lr=0.1)
gs = torch.amp.GradScaler(device)

for _ in range(6):
    board = torch.randn(32, 24, device=device)
    legal = torch.rand(32, 15, device=device) > 0.3
    legal[:, 0] = True
    opt.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        moves = scorer(board)
        moves = torch.where(legal, moves, torch.full_like(moves, NEG_INF))  # HS140
    loss = nn.functional.cross_entropy(moves.float(), torch.zeros(32, dtype=torch.long, device=device))
    gs.scale(loss).backward()
    gs.step(opt)
    gs.update()
