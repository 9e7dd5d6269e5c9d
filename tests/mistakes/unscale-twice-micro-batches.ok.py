import torch
from torch import nn
from torch.amp import GradScaler, autocast

ACCUMULATE = 8


def one_epoch(speech_model, loader, optimizer, scaler: GradScaler, max_norm=5.0):
    speech_model.train()
    last = len(loader) - 1
    optimizer.zero_grad(set_to_none=True)
    for index, batch in enumerate(loader):
        with autocast("cuda", dtype=torch.float16):
            loss = speech_model(batch["audio"].cuda(), batch["text"].cuda()).float() / ACCUMULATE
        scaler.scale(loss).backward()
        if index % ACCUMULATE == ACCUMULATE - 1 or index == last:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(speech_model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)


def main(speech_model, loader):
    optimizer = torch.optim.AdamW(speech_model.cuda().parameters(), lr=3e-4)
    scaler = GradScaler("cuda")
    for _ in range(10):
        one_epoch(speech_model, loader, optimizer, scaler)
