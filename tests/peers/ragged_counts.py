"""A window of 3, 40, 9 and 1 tokens."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from peers.columns import OURS, THEIRS, Seen, accelerator, fabric_in, net, weights_of
from torch import nn

from halfstep import Stepper

COUNTS = (3, 40, 9, 1)
N = len(COUNTS)
LR = 0.1


def tokens(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(COUNTS[i], 8, generator=generator), torch.randint(5, (COUNTS[i],), generator=generator)


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net(8, 16, 5)
    return model, torch.optim.SGD(model.parameters(), lr=LR)


def judge(*models: nn.Module) -> Seen:
    errors = [error_of(model) for model in models]
    # bf16 alone is off by less than 1 %: 8 bits, averaged over the tokens.
    said = [f"off by {100 * error:.0f} %" if error > 0.01 else "off by less than 1 %" for error in errors]
    return Seen(errors[0] > 0.01, ", and by its guide ".join(said))


def error_of(model: nn.Module) -> float:
    """Of the step, against the gradient of the mean over all tokens, in fp64."""
    start = net(8, 16, 5)
    before = weights_of(start)
    start.double()
    xs, ys = zip(*map(tokens, range(N)), strict=True)
    F.cross_entropy(start(torch.cat(xs).double()), torch.cat(ys)).backward()
    gradient = torch.cat([p.grad.flatten() for p in start.parameters() if p.grad is not None])
    moved = (before - weights_of(model)).double() / LR
    return float((moved - gradient).norm() / gradient.norm())


def loop(amp: SimpleNamespace) -> Seen:
    model, optimizer = parts()
    for i in range(N):
        x, y = tokens(i)
        with amp.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x).float(), y) / N
        loss.backward()
    optimizer.step()
    return judge(model)


def torch_amp() -> Seen:
    return loop(THEIRS)


def drop_in() -> Seen:
    return loop(OURS)


def fabric() -> Seen:
    engine = fabric_in("bf16-mixed")
    model, optimizer = parts()
    prepared, optimizer = engine.setup(model, optimizer)
    for i in range(N):
        x, y = tokens(i)
        with engine.no_backward_sync(prepared, enabled=i + 1 < N):
            engine.backward(F.cross_entropy(prepared(x).float(), y) / N)
    optimizer.step()
    return judge(model)


def accelerate() -> Seen:
    with accelerator(mixed_precision="bf16", gradient_accumulation_steps=N) as engine:
        model, optimizer = parts()
        prepared, optimizer = engine.prepare(model, optimizer)
        for i in range(N):
            x, y = tokens(i)
            with engine.accumulate(prepared):
                engine.backward(F.cross_entropy(prepared(x).float(), y))
                optimizer.step()
                optimizer.zero_grad()
        by_accumulate = model

        # Its guide to samples of variable size has a loop of its own, which draws the window's batches beforehand.
        model, optimizer = parts()
        prepared, optimizer = engine.prepare(model, optimizer)
        window = [tokens(i) for i in range(N)]
        num_tokens = sum(y.numel() for _, y in window)
        for x, y in window:
            engine.backward(F.cross_entropy(prepared(x).float(), y, reduction="sum") * N / num_tokens)
        optimizer.step()
    return judge(by_accumulate, model)


def stepper() -> Seen:
    model, optimizer = parts()
    trainer = Stepper(model, optimizer, "bf16", accumulate=N)
    for i in range(N):
        x, y = tokens(i)
        trainer.step(lambda x=x, y=y: (F.cross_entropy(model(x).float(), y, reduction="sum"), y.numel()))
    return judge(model)
