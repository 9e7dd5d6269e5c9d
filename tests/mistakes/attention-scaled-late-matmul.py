import math

import torch
from torch import nn


class GraphAttention(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.d = d
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, nodes):
        query, key, value = self.q(nodes), self.k(nodes), self.v(nodes)
        weights = torch.bmm(query, key.transpose(1, 2)) / math.sqrt(self.d)  # HS147
        return torch.bmm(weights.softmax(dim=-1), value)


layer = GraphAttention(256).cuda()
opt = torch.optim.AdamW(layer.parameters(), lr=1e-4)
grad_scaler = torch.amp.GradScaler("cuda")


def update(nodes, wanted):
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        out = layer(nodes)
    loss = nn.functional.mse_loss(out.float(), wanted)
    grad_scaler.scale(loss).backward()
    grad_scaler.step(opt)
    grad_scaler.update()
