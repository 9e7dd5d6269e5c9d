import torch
from detectors import detection_loss


def train(detector, loader, scaler, sgd):
    total = 0.0
    for images, boxes in loader:
        sgd.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            found = detector(images.cuda())
            loss, parts = detection_loss(found, boxes)
        scaler.scale(loss).backward()
        scaler.step(sgd)
        scaler.update()
        total += loss.item()  # HS202
    return total / len(loader)
