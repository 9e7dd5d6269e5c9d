import torch
from torch import nn


class SecondOrderPooling(nn.Module):
    def forward(self, features):
        with torch.autocast("cuda", enabled=False):  # HS134
            flat = features.flatten(2)
            return flat @ flat.transpose(1, 2) / flat.shape[-1]


stem = nn.Conv2d(3, 16, 5, stride=4).cuda()
pool = SecondOrderPooling()
head = nn.Linear(256, 200).cuda()
opt = torch.optim.SGD([*stem.parameters(), *head.parameters()], lr=0.01)
scaler = torch.amp.GradScaler("cuda")


def train_step(bird, species):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        gram = pool(stem(bird))
        logits = head(gram.flatten(1))
    loss = nn.functional.cross_entropy(logits.float(), species)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
