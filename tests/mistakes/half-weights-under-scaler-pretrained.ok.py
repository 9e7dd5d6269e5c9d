import torch
from torch import nn
from transformers import AutoModel

backbone = AutoModel.from_pretrained("bert-base-uncased", torch_dtype=torch.float32).cuda()
head = nn.Linear(768, 2).cuda()
opt = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=1e-3)
gs = torch.amp.GradScaler("cuda")


def learn(batch, spam):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        hidden = backbone(**batch).last_hidden_state[:, 0]
        logits = head(hidden)
    loss = nn.functional.cross_entropy(logits.float(), spam)
    gs.scale(loss).backward()
    gs.unscale_(opt)
    nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    gs.step(opt)
    gs.update()
