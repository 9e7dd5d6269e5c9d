import argparse

import torch
from torch import autocast, nn


class Recogniser:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.ocr = nn.LSTM(64, 128, batch_first=True).to("cuda")
        self.head = nn.Linear(128, 80).to("cuda")
        self.optimiser = torch.optim.AdamW([*self.ocr.parameters(), *self.head.parameters()], lr=args.lr)
        self.scaler = torch.amp.GradScaler("cuda", enabled=args.amp)

    def train_step(self, strips, characters):
        with autocast("cuda", dtype=torch.float16, enabled=self.args.amp):
            hidden, _ = self.ocr(strips)
            logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits.float().transpose(1, 2), characters)
        self.optimiser.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        for group in self.optimiser.param_groups:
            for p in group["params"]:
                torch.nan_to_num_(p.grad, nan=0.0, posinf=0.0, neginf=0.0)  # HS102
        self.scaler.step(self.optimiser)
        self.scaler.update()
        return loss.detach()
