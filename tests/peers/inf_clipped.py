"""One Inf gradient and clipping, in bf16 without a scaler."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from peers.columns import OURS, THEIRS, Seen, accelerator, batch, fabric_in, fate, weights_of
from torch import nn

from halfstep import Stepper

NUM_STEPS = 2


class Gated(nn.Module):
    """A gate that is 0 in one place, where the derivative of its square root is infinite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 4)
        self.gate = nn.Parameter(torch.tensor([0.0, 1.0, 1.0, 1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.gate.sqrt()


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output.float() - 1).square().mean()


def judge(before: torch.Tensor, model: nn.Module, how: str) -> Seen:
    after = weights_of(model)
    return Seen(not torch.equal(before, after), f"{how}, {fate(before, after)}")


def loop(amp: SimpleNamespace) -> Seen:
    model = Gated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = weights_of(model)
    for i in range(NUM_STEPS):
        optimizer.zero_grad()
        with amp.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model(batch(i)[0]))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return judge(before, model, "applied")


def gradients_after_clipping(**settings: bool) -> tuple[int, int]:
    """How many of them are 0 and how many NaN, in the first step of the loop."""
    model = Gated()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model(batch(0)[0]))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, **settings)
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return int((gradients == 0).sum()), int(gradients.isnan().sum())


def torch_amp() -> Seen:
    return loop(THEIRS)


def drop_in() -> Seen:
    return loop(OURS)


def fabric() -> Seen:
    engine = fabric_in("bf16-mixed")
    model = Gated()
    before = weights_of(model)
    prepared, optimizer = engine.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for i in range(NUM_STEPS):
        optimizer.zero_grad()
        engine.backward(loss_of(prepared(batch(i)[0])))
        try:
            engine.clip_gradients(prepared, optimizer, max_norm=1.0)
        except RuntimeError as error:
            if "non-finite" not in str(error):
                raise
            return judge(before, model, "RuntimeError from clip_gradients")
        optimizer.step()
    return judge(before, model, "applied")


def accelerate() -> Seen:
    with accelerator(mixed_precision="bf16") as engine:
        model = Gated()
        before = weights_of(model)
        prepared, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for i in range(NUM_STEPS):
            optimizer.zero_grad()
            engine.backward(loss_of(prepared(batch(i)[0])))
            engine.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
        return judge(before, model, "applied")


def stepper() -> Seen:
    model = Gated()
    trainer = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", max_norm=1.0)
    before = weights_of(model)
    reports = [trainer.step(lambda i=i: loss_of(model(batch(i)[0]))) for i in range(NUM_STEPS)]
    return judge(before, model, "applied" if any(report.applied for report in reports if report) else "skipped")
