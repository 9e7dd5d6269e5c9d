import torch
from torch import nn


class Answerer:
    def __init__(self, args, reader):
        self.args = args
        self.reader = reader.cuda()
        self.adam = torch.optim.AdamW(self.reader.parameters(), lr=args.lr)
        self.warmup = torch.optim.lr_scheduler.LinearLR(self.adam) if args.warmup else None
        self.scaler = torch.amp.GradScaler("cuda")

    def train(self, questions):
        for question, answer in questions:
            self.adam.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16, enabled=self.args.half):
                scores = self.reader(question.cuda())
            loss = nn.functional.cross_entropy(scores.float(), answer.cuda())
            if self.args.half:
                self.scaler.scale(loss).backward()
                if self.args.max_grad_norm > 0:
                    self.scaler.unscale_(self.adam)
                    nn.utils.clip_grad_norm_(self.reader.parameters(), self.args.max_grad_norm)
                self.scaler.step(self.adam)
                self.scaler.update()
            else:
                loss.backward()
                self.adam.step()
            if self.warmup is not None:
                self.warmup.step()  # HS303
