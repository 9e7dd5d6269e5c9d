import torch
from torch import nn


class DocumentRanker:
    accumulate = 16

    def __init__(self, encoder):
        self.encoder = encoder.cuda()
        self.opt = torch.optim.AdamW(self.encoder.parameters(), lr=2e-5)

    def epoch(self, loader):
        self.encoder.train()
        for step, (query, document) in enumerate(loader, start=1):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                q, d = self.encoder(query.cuda()), self.encoder(document.cuda())
            scores = q.float() @ d.float().T / 0.05
            loss = nn.functional.cross_entropy(scores, torch.arange(len(q), device="cuda"))
            loss = loss / self.accumulate
            loss.backward()
            if step % self.accumulate == 0:  # HS121
                nn.utils.clip_grad_norm_(self.encoder.parameters(), 1.0)
                self.opt.step()
                self.opt.zero_grad(set_to_none=True)
