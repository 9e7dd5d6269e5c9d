"""A weight changed in place inside a region."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from peers.columns import OURS, THEIRS, Seen, accelerator, batch, fabric_in
from torch import nn

from halfstep import Stepper


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 2, bias=False)


def by_hand(model: nn.Linear, optimizer: Any) -> None:
    with torch.no_grad():
        model.weight.mul_(2.0)


def by_optimizer(model: nn.Linear, optimizer: Any) -> None:
    model.weight.grad = -model.weight.detach()  # with lr=1, the step doubles the weight
    optimizer.step()


Change = Callable[[nn.Linear, Any], None]


def is_stale(region: AbstractContextManager[Any], model: Any, inner: nn.Linear, optimizer: Any, change: Change) -> bool:
    """Whether an output after ``change``, which doubles the weight, is still the one before; else it is twice that."""
    x, _ = batch(0)
    with region:
        before = model(x)
        change(inner, optimizer)
        after = model(x)
    if torch.equal(after, before):
        return True
    assert torch.equal(after, 2 * before)
    return False


def judge(look: Callable[[Change], bool]) -> Seen:
    after_step, by_a_hand = look(by_optimizer), look(by_hand)
    words = f"{'old' if after_step else 'new'} weight after a step, {'old' if by_a_hand else 'new'} after `mul_`"
    return Seen(after_step or by_a_hand, words)


def with_amp(amp: Any) -> Callable[[Change], bool]:
    def look(change: Change) -> bool:
        model = layer()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return is_stale(amp.autocast("cpu", dtype=torch.bfloat16), model, model, optimizer, change)

    return look


def torch_amp() -> Seen:
    return judge(with_amp(THEIRS))


def drop_in() -> Seen:
    return judge(with_amp(OURS))


def fabric() -> Seen:
    def look(change: Change) -> bool:
        engine, model = fabric_in("bf16-mixed"), layer()
        prepared, optimizer = engine.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
        return is_stale(engine.autocast(), prepared, model, optimizer, change)

    return judge(look)


def accelerate() -> Seen:
    def look(change: Change) -> bool:
        with accelerator(mixed_precision="bf16") as engine:
            model = layer()
            prepared, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
            return is_stale(engine.autocast(), prepared, model, optimizer, change)

    return judge(look)


def stepper() -> Seen:
    """The region of a window, which keeps its casts from one micro-batch to the next."""

    def look(change: Change) -> bool:
        model = layer()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        trainer = Stepper(model, optimizer, "bf16", accumulate=8, keep_casts=True)
        return is_stale(trainer.forward(), model, model, optimizer, change)

    return judge(look)
