import torch
from torch import nn

net = nn.GRU(32, 64, num_layers=2).cuda()
head = nn.Linear(64, 8).cuda()
opt = torch.optim.AdamW([*net.parameters(), *head.parameters()], lr=1e-3)


def step(series, label):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):  # HS205
        hidden, _ = net(series)
        logits = head(hidden[-1])
    loss = nn.functional.cross_entropy(logits.float(), label)
    loss.backward()
    opt.step()
