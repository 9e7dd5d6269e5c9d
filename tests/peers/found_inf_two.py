"""A found_inf of 2 and a fused optimizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from peers.columns import OURS, THEIRS, Seen, accelerate_in_fp16, batch, fabric_in_fp16, fate, net, weights_of

from halfstep import Stepper

OPTIMIZERS = (torch.optim.SGD, torch.optim.AdamW)


def judge(before: torch.Tensor, fates: list[torch.Tensor], how: str) -> Seen:
    words = {fate(before, after) for after in fates}
    return Seen(not all(torch.equal(before, after) for after in fates), f"{how}, {' or '.join(sorted(words))}")


def overflowing() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(0)
    return x * 1e6, y


def loop(amp: SimpleNamespace) -> Seen:
    fates = []
    for kind in OPTIMIZERS:
        model = net(8, 16, 2)
        optimizer = kind(model.parameters(), lr=0.1, fused=True)
        scaler = amp.GradScaler("cpu")
        x, y = overflowing()
        with amp.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for flag in scaler._found_inf_per_device(optimizer).values():
            assert flag.item() == 1.0
            flag.add_(1.0)  # torch.distributed.all_reduce(flag) does this when another rank overflowed too
        scaler.step(optimizer)
        scaler.update()
        fates.append(weights_of(model))
    before = weights_of(net(8, 16, 2))
    return judge(before, fates, "skipped" if torch.equal(before, fates[0]) else "applied")


def torch_amp() -> Seen:
    return loop(THEIRS)


def drop_in() -> Seen:
    return loop(OURS)


def fabric() -> Seen:
    engine = fabric_in_fp16()
    model = net(8, 16, 2)
    prepared, optimizer = engine.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
    x, y = overflowing()
    engine.backward(F.mse_loss(prepared(x).float(), y))
    try:
        engine.clip_gradients(prepared, optimizer, max_norm=1.0)  # the one way to unscale before the step
    except NotImplementedError:
        return Seen(None, "does not unscale for a fused optimizer (NotImplementedError)")
    return Seen(True, "unscaled")


accelerate = accelerate_in_fp16


def noting(kind: type[torch.optim.Optimizer], noted: list[float]) -> type[torch.optim.Optimizer]:
    """``kind``, which notes the found_inf that it is given."""

    class Noting(kind):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> Any:
            noted.append(self.found_inf.item())
            return super().step(closure)

    return Noting


def stepper() -> Seen:
    """Its flag is made from one norm over all gradients; every one of the four parameters here overflows."""
    fates, noted = [], list[float]()
    for kind in OPTIMIZERS:
        model = net(8, 16, 2)
        optimizer = noting(kind, noted)(model.parameters(), lr=0.1, fused=True)
        trainer = Stepper(model, optimizer, "fp16 on_overflow=skip")
        x, y = overflowing()
        trainer.step(lambda model=model, x=x, y=y: F.mse_loss(model(x).float(), y))
        fates.append(weights_of(model))
    assert set(noted) == {1.0}
    return judge(weights_of(net(8, 16, 2)), fates, "the flag is 0 or 1: skipped")
