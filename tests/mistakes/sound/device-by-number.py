import torch
from torch import nn


class Classifier:
    def __init__(self, encoder, number, use_cuda=True):
        if use_cuda:
            self.device = torch.device(number)
            self.scaler = torch.amp.GradScaler("cuda")
        else:
            self.device = "cpu"
            self.scaler = torch.amp.GradScaler("cuda", enabled=False)
        self.encoder = encoder
        self.classes = nn.Linear(768, 4)

    def train(self, batches, half):
        self.move()
        optimizer = torch.optim.AdamW(self.classes.parameters(), lr=1e-4)
        for x, y in batches:
            x = x.to(self.device)
            optimizer.zero_grad()
            if half:
                with torch.autocast("cuda", dtype=torch.float16):
                    scores = self.classes(x)
            else:
                scores = self.classes(x)
            self.scaler.scale(nn.functional.cross_entropy(scores.float(), y.to(self.device))).backward()
            self.scaler.step(optimizer)
            self.scaler.update()

    def move(self):
        self.classes.to(self.device)
