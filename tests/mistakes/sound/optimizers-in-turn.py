import torch
from torch.nn.utils import clip_grad_norm_


def turn(vocoder, batch, optimizers, scaler, index, limit):
    for name in ["generator"]:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = vocoder.loss(name, batch)
        scaler.scale(loss).backward()
        for number, optimizer in enumerate(optimizers):
            if index is not None and number != index:
                continue
            scaler.unscale_(optimizer)
        if limit > 0:
            clip_grad_norm_(vocoder.parameters(), limit)
        for number, optimizer in enumerate(optimizers):
            if index is not None and number != index:
                continue
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
