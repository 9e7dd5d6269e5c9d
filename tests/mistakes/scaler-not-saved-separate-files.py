from pathlib import Path

import torch
from torch import nn


class Tagger:
    def __init__(self, net, folder):
        self.net = net.cuda()
        self.folder = Path(folder)

    def fit(self, batches, lr):
        adam = torch.optim.AdamW(self.net.parameters(), lr=lr)
        scaler = torch.amp.GradScaler("cuda")
        for number, (words, tags) in enumerate(batches):
            with torch.autocast("cuda", dtype=torch.float16):
                scores = self.net(words.cuda())
            loss = nn.functional.cross_entropy(scores.float().flatten(0, 1), tags.cuda().flatten())
            scaler.scale(loss).backward()
            scaler.step(adam)
            scaler.update()
            adam.zero_grad()
            if number % 500 == 0:
                self.keep(adam, scaler)

    def keep(self, adam, scaler):
        torch.save(self.net.state_dict(), self.folder / "weights.pt")
        torch.save(adam.state_dict(), self.folder / "adam.pt")  # HS162
