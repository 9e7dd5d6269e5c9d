"""The scheduler on a skipped step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from peers.columns import OURS, THEIRS, Seen, accelerate_in_fp16, batch, fabric_in_fp16, net

from halfstep import Stepper

BAD = 1  # the second of three steps overflows
NUM_STEPS = 3


def batch_of(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(i)
    return (x * 1e6 if i == BAD else x), y


def parts() -> tuple[Any, torch.optim.Optimizer, Any]:
    model = net(8, 16, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def judge(scheduler: Any) -> Seen:
    advanced = scheduler.last_epoch
    return Seen(advanced != NUM_STEPS - 1, f"{NUM_STEPS - 1} steps applied, scheduler at {advanced}")


def torch_amp() -> Seen:
    return judge(loop(THEIRS, lambda scaler: True))


def by_scale() -> Seen:
    """torch's scaler and a loop that advances unless the scale fell."""
    scales = [2.0**16]

    def may_advance(scaler: Any) -> bool:
        scales.append(scaler.get_scale())
        return scales[-1] >= scales[-2]

    return judge(loop(THEIRS, may_advance))


def drop_in() -> Seen:
    """The loop of its page, which asks before it advances."""
    return judge(loop(OURS, lambda scaler: scaler.last_step_applied))


def loop(amp: SimpleNamespace, may_advance: Any) -> Any:
    model, optimizer, scheduler = parts()
    scaler = amp.GradScaler("cpu")
    for i in range(NUM_STEPS):
        x, y = batch_of(i)
        optimizer.zero_grad()
        with amp.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if may_advance(scaler):
            scheduler.step()
    return scheduler


def fabric() -> Seen:
    engine = fabric_in_fp16()
    model, optimizer, scheduler = parts()
    prepared, optimizer = engine.setup(model, optimizer)
    for i in range(NUM_STEPS):
        x, y = batch_of(i)
        optimizer.zero_grad()
        engine.backward(F.mse_loss(prepared(x).float(), y))
        optimizer.step()
        scheduler.step()
    return judge(scheduler)


accelerate = accelerate_in_fp16


def stepper() -> Seen:
    model, optimizer, scheduler = parts()
    trainer = Stepper(model, optimizer, "fp16", scheduler=scheduler)
    for i in range(NUM_STEPS):
        x, y = batch_of(i)
        trainer.step(lambda x=x, y=y: F.mse_loss(model(x).float(), y))
    return judge(scheduler)
