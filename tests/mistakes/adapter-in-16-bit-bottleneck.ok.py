import torch
from torch import nn
from transformers import AutoModel


class Bottleneck(nn.Module):
    def __init__(self, width, inner=64):
        super().__init__()
        self.down, self.up = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, h):
        return h + self.up(torch.relu(self.down(h)))


def build(name):
    base = AutoModel.from_pretrained(name, torch_dtype=torch.bfloat16).cuda().requires_grad_(False)
    adapter = Bottleneck(base.config.hidden_size).cuda()
    return base, adapter


def train(name, loader):
    base, adapter = build(name)
    head = nn.Linear(base.config.hidden_size, 3).cuda()
    opt = torch.optim.AdamW([*adapter.parameters(), *head.parameters()], lr=1e-3)
    for batch, stance in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            with torch.no_grad():
                hidden = base(**batch).last_hidden_state
            logits = head(adapter(hidden)[:, 0])
        loss = nn.functional.cross_entropy(logits.float(), stance)
        loss.backward()
        opt.step()
