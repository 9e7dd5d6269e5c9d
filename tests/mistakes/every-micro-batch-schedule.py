import torch
from torch import nn


def train(model, loader, num_epochs, accumulation=8):
    model.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    windows = num_epochs * -(-len(loader) // accumulation)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=windows)
    for _ in range(num_epochs):
        for i, (x, y) in enumerate(loader):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                prediction = model(x.cuda())
            loss = nn.functional.l1_loss(prediction.float(), y.cuda()) / accumulation
            loss.backward()
            if (i + 1) % accumulation == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
            cosine.step()  # HS122
