import torch
from torch import nn


class PointerHead(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, state, options, used):
        q = self.query(state) * state.shape[-1] ** -0.5
        scores = torch.einsum("bd,bnd->bn", q, self.key(options))
        return scores.masked_fill(used, -1e9)  # HS140


head = PointerHead(64).cuda()
opt = torch.optim.Adam(head.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda")


def learn(state, options, used, choice):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        scores = head(state, options, used)
    loss = nn.functional.cross_entropy(scores.float(), choice)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
