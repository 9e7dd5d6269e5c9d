"""Overflow in micro-batch 2 of 4."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from peers.columns import OURS, THEIRS, Seen, accelerate_in_fp16, batch, fabric_in_fp16, net, weights_of
from torch import nn

from halfstep import Stepper

N = 4
LOW = 2.0**8


def micro_batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The second one has targets so far off that its gradient times 2^16 is beyond fp16; times 2^12 it is not."""
    x, y = batch(i)
    return x, (y * 100 if i == 1 else y)


def loss_of(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.float(), y)


def judge(before: torch.Tensor, model: nn.Module, scale: float) -> Seen:
    """Against a run that began at a scale that no micro-batch overflows."""
    after, low = weights_of(model), at_a_low_scale()
    if torch.equal(after, before):
        return Seen(True, f"all {N} micro-batches dropped")
    if torch.equal(after, low):
        return Seen(False, f"micro-batch 2 runs again at {scale:g}; weights as from {LOW:g} on, to the bit")
    return Seen(True, f"weights off by {float((after - low).abs().max()):.1g}")


def at_a_low_scale() -> torch.Tensor:
    model = net(8, 16, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = Stepper(model, optimizer, f"fp16 scale.init={LOW:g}", accumulate=N)
    for i in range(N):
        x, y = micro_batch(i)
        report = trainer.step(lambda x=x, y=y: loss_of(model(x), y))
    assert report is not None
    assert (report.num_replays, report.scale) == (0, LOW)
    return weights_of(model)


def loop(amp: SimpleNamespace) -> Seen:
    model = net(8, 16, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = amp.GradScaler("cpu")
    before = weights_of(model)
    for i in range(N):
        x, y = micro_batch(i)
        with amp.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model(x), y) / N
        scaler.scale(loss).backward()
        if (i + 1) % N == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return judge(before, model, scaler.get_scale())


def torch_amp() -> Seen:
    return loop(THEIRS)


def drop_in() -> Seen:
    return loop(OURS)


def fabric() -> Seen:
    engine = fabric_in_fp16()
    model = net(8, 16, 2)
    before = weights_of(model)
    prepared, optimizer = engine.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for i in range(N):
        x, y = micro_batch(i)
        is_accumulating = (i + 1) % N != 0
        with engine.no_backward_sync(prepared, enabled=is_accumulating):
            engine.backward(loss_of(prepared(x), y) / N)
        if not is_accumulating:
            optimizer.step()
            optimizer.zero_grad()
    return judge(before, model, engine.strategy.precision.scaler.get_scale())


accelerate = accelerate_in_fp16


def stepper() -> Seen:
    model = net(8, 16, 2)
    trainer = Stepper(model, torch.optim.AdamW(model.parameters(), lr=0.01), "fp16", accumulate=N)
    before = weights_of(model)
    for i in range(N):
        x, y = micro_batch(i)
        report = trainer.step(lambda x=x, y=y: loss_of(model(x), y))
    assert report is not None
    return judge(before, model, report.scale)
