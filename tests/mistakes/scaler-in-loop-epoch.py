import torch
from torch import nn
from torch.amp import GradScaler, autocast


def train_one_epoch(model, criterion, optimizer, loader, scaler):
    model.train()
    for clip, action in loader:
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            logits = model(clip.cuda(non_blocking=True))
            loss = criterion(logits.float(), action.cuda(non_blocking=True))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def main(model, loader, num_epochs=30):
    model = model.cuda()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(num_epochs):
        scaler = GradScaler("cuda")  # HS111
        train_one_epoch(model, criterion, optimizer, loader, scaler)
        print("epoch", epoch, "done")
