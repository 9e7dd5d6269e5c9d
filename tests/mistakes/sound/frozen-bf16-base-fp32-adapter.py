import torch
from torch import nn
from transformers import AutoModel


def train(name, loader):
    base = AutoModel.from_pretrained(name, torch_dtype=torch.bfloat16).cuda().eval().requires_grad_(False)
    head = nn.Linear(base.config.hidden_size, 5).cuda()
    opt = torch.optim.AdamW(head.parameters(), lr=1e-3)
    for batch, label in loader:
        with torch.no_grad():
            hidden = base(**batch).last_hidden_state[:, 0]
        loss = nn.functional.cross_entropy(head(hidden.float()), label.cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()
