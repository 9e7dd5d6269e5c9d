import contextlib

import torch
from torch import nn
from torch.amp import GradScaler, autocast


def train(args, model, loader, log):
    device = torch.device(args.device)
    model.to(device)
    optimiser_d = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scaler = GradScaler(device.type, enabled=args.use_amp)
    region = autocast(device.type, dtype=torch.float16) if args.use_amp else contextlib.nullcontext()
    try:
        for image, text in loader:
            optimiser_d.zero_grad(set_to_none=True)
            with region:
                score = model(image.to(device), text.to(device))
            loss = nn.functional.softplus(-score.float()).mean()
            scaler.scale(loss).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)  # HS101
            scaler.step(optimiser_d)
            scaler.update()
            log.append(norm)
    finally:
        torch.save(model.state_dict(), args.out)
