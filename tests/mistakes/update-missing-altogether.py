import torch
from torch import nn


def finetune(backbone, head, loader, device="cuda"):
    parts = nn.Sequential(backbone, head).to(device)
    opt = torch.optim.AdamW(head.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device)
    for images, labels in loader:
        opt.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.float16):
            logits = parts(images.to(device))
        loss = nn.functional.cross_entropy(logits.float(), labels.to(device))
        scaler.scale(loss).backward()
        scaler.step(opt)  # HS106
    return parts


if __name__ == "__main__":
    data = [(torch.randn(8, 16), torch.randint(0, 3, (8,))) for _ in range(4)]
    finetune(nn.Linear(16, 24).requires_grad_(False), nn.Linear(24, 3), data)
