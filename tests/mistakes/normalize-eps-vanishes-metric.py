import torch
import torch.nn.functional as F
from torch import nn


class MetricHead(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.project = nn.Linear(d_in, d_out, bias=False)

    def forward(self, x):
        return self.project(x)


def train(trunk, triplets):
    trunk, head = trunk.cuda(), MetricHead(512, 64).cuda()
    opt = torch.optim.AdamW([*trunk.parameters(), *head.parameters()], lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for anchor, same, other in triplets:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            a, p, n = (head(trunk(t.cuda())) for t in (anchor, same, other))
        a, p, n = (F.normalize(z, dim=-1) for z in (a, p, n))  # HS157
        loss = F.triplet_margin_loss(a.float(), p.float(), n.float())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
