"""A scaler as a guard for bf16: scale 1, no growth, 3 bad batches of 7."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from peers.columns import OURS, THEIRS, Seen, accelerator, batch, fabric_in, fate, net, weights_of
from torch import nn

from halfstep import Stepper

BAD = (1, 3, 5)
NUM_STEPS = 7


def batch_of(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(i)
    return (x * float("inf") if i in BAD else x), y


def loop(amp: SimpleNamespace) -> Seen:
    model = net(8, 16, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**9)
    for i in range(NUM_STEPS):
        x, y = batch_of(i)
        optimizer.zero_grad()
        with amp.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert weights_of(model).isfinite().all()
    scale = scaler.get_scale()
    return Seen(scale != 1.0, f"skips the bad ones, scale {scale:g}")


def torch_amp() -> Seen:
    return loop(THEIRS)


def drop_in() -> Seen:
    return loop(OURS)


def fabric() -> Seen:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**9)
    try:
        Fabric(accelerator="cpu", devices=1, plugins=MixedPrecision("bf16-mixed", "cpu", scaler))
    except ValueError:
        engine = fabric_in("bf16-mixed")
        model = net(8, 16, 2)
        prepared, optimizer = engine.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return without_guard("no scaler in bf16 (ValueError)", model, engine, prepared, optimizer)
    return Seen(True, "takes a scaler")


def accelerate() -> Seen:
    with accelerator(mixed_precision="bf16") as engine:
        assert engine.scaler is None
        model = net(8, 16, 2)
        prepared, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return without_guard("no scaler in bf16", model, engine, prepared, optimizer)


def without_guard(why: str, model: nn.Module, engine: Any, prepared: Any, optimizer: Any) -> Seen:
    for i in range(NUM_STEPS):
        x, y = batch_of(i)
        optimizer.zero_grad()
        engine.backward(F.mse_loss(prepared(x).float(), y))
        optimizer.step()
    after = weights_of(model)
    return Seen(not after.isfinite().all(), f"{why}: {fate(after, after)}")


def stepper() -> Seen:
    model = net(8, 16, 2)
    trainer = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    applied = []
    for i in range(NUM_STEPS):
        x, y = batch_of(i)
        report = trainer.step(lambda x=x, y=y: F.mse_loss(model(x).float(), y))
        assert report is not None
        applied.append(report.applied)
    assert weights_of(model).isfinite().all()
    assert applied == [i not in BAD for i in range(NUM_STEPS)]
    scale = trainer.scale.value.item()
    return Seen(scale != 1.0, f"skips the bad ones, {'has no scale' if scale == 1.0 else f'scale {scale:g}'}")
