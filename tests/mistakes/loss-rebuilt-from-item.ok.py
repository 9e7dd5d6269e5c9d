import torch
from torch import nn
from torch.amp import GradScaler


def train_captioner(model: nn.Module, loader, epochs: int) -> None:
    model.cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-5)
    scaler = GradScaler("cuda")
    ce = nn.CrossEntropyLoss(ignore_index=0)
    for _ in range(epochs):
        for picture, caption in loader:
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                logits = model(picture.cuda(), caption[:, :-1].cuda())
            loss = ce(logits.float().flatten(0, 1), caption[:, 1:].cuda().flatten())
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
