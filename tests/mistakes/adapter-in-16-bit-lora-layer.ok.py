import torch
from torch import nn
import torch.nn.functional as F


class LowRank(nn.Module):
    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) * 0.01)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x):
        return self.frozen(x) + F.linear(F.linear(x, self.down), self.up)


def wrap(model: nn.Module, rank: int = 8) -> list[nn.Parameter]:
    for block in model.blocks:
        block.query = LowRank(block.query, rank)
    return [w for w in model.parameters() if w.requires_grad]


def train(path, loader):
    model = torch.load(path, weights_only=False).to(torch.bfloat16).cuda()
    for w in model.parameters():
        w.requires_grad_(False)
    opt = torch.optim.AdamW(wrap(model), lr=1e-4)
    model.cuda()
    for tokens, answer in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens.cuda())
        loss = F.cross_entropy(logits.float(), answer.cuda())
        loss.backward()
        opt.step()
