import torch
from torch import nn


def train_epoch(epoch, unet, optimizer, loader, device, scaler):
    unet.train()
    for scan, mask in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            logits = unet(scan.to(device))
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), mask.to(device))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(f"epoch {epoch}: {loss.item():.4f}")
