"""200 overflows in a row from 2^16, then a finite step."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from peers.columns import OURS, THEIRS, Seen, accelerate_in_fp16, batch, fabric_in_fp16, fate, net, weights_of

from halfstep import ScaleExhausted, Stepper

NUM_OVERFLOWS = 200


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for i in range(NUM_OVERFLOWS + 1):
        x, y = batch(i)
        yield (x * 1e6 if i < NUM_OVERFLOWS else x), y  # 1e6 is beyond fp16, whose largest number is 65504


def loop(amp: SimpleNamespace) -> Seen:
    model = net(8, 16, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amp.GradScaler("cpu")
    before = weights_of(model)
    for i, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        with amp.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        try:
            scaler.update()
        except ScaleExhausted:
            after = weights_of(model)
            words = f"ScaleExhausted at overflow {i + 1}, scale {scaler.get_scale():g}, {fate(before, after)}"
            return Seen(not after.isfinite().all(), words)
    after = weights_of(model)
    return Seen(not after.isfinite().all(), f"scale {scaler.get_scale():g}, {fate(before, after)}")


def torch_amp() -> Seen:
    return loop(THEIRS)


def drop_in() -> Seen:
    return loop(OURS)


def fabric() -> Seen:
    engine = fabric_in_fp16()
    model = net(8, 16, 2)
    before = weights_of(model)
    prepared, optimizer = engine.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in batches():
        optimizer.zero_grad()
        engine.backward(F.mse_loss(prepared(x).float(), y))
        optimizer.step()
    after = weights_of(model)
    scale = engine.strategy.precision.scaler.get_scale()
    return Seen(not after.isfinite().all(), f"scale {scale:g}, {fate(before, after)}")


accelerate = accelerate_in_fp16


def stepper() -> Seen:
    model = net(8, 16, 2)
    trainer = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16")
    before = weights_of(model)
    for i, (x, y) in enumerate(batches()):
        try:
            trainer.step(lambda x=x, y=y: F.mse_loss(model(x).float(), y))
        except ScaleExhausted as error:
            after = weights_of(model)
            names = " names layer 0" if "module:0=fp32" in str(error) else ""
            words = f"ScaleExhausted at overflow {i + 1}{names}, scale {trainer.scale.value:g}, {fate(before, after)}"
            return Seen(not after.isfinite().all(), words)
    return Seen(True, "no end")


def promoted() -> tuple[str, bool, torch.Tensor]:
    """The same batches with ``on_exhausted=promote``: the policy at the end, whether the last step was applied."""
    model = net(8, 16, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Stepper(model, optimizer, "fp16 on_exhausted=promote", max_norm=1.0)
    for x, y in batches():
        report = trainer.step(lambda x=x, y=y: F.mse_loss(model(x).float(), y))
    assert report is not None
    return str(trainer.policy), report.applied, weights_of(model)
