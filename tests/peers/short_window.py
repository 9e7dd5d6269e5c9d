"""A short last window: 2 micro-batches of 4."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from peers.columns import OURS, THEIRS, Seen, accelerator, batch, fabric_in, net, weights_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep import Stepper

N, SHORT = 4, 2
LR = 0.1


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    xs, ys = zip(*(batch(i) for i in range(N + SHORT)), strict=True)
    return DataLoader(TensorDataset(torch.cat(xs), torch.cat(ys)), batch_size=8)


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net(8, 16, 2)
    return model, torch.optim.SGD(model.parameters(), lr=LR)


def judge(weights: list[torch.Tensor]) -> Seen:
    """``weights`` after each step. The second step against the gradient of its two micro-batches, in fp64."""
    before, after = weights
    model = net(8, 16, 2)
    nn.utils.vector_to_parameters(before, model.parameters())
    model.double()
    for x, y in list(loader())[N:]:
        (F.mse_loss(model(x.double()), y.double()) / SHORT).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    share = float((before - after).norm() / (LR * gradient.norm()))
    # One digit: bf16 rounds the gradient by less than 1 %, and half of it is missing or is not.
    return Seen(abs(share - 1) > 0.05, f"moves by {share:.1f} of the gradient")


def loop(amp: SimpleNamespace) -> Seen:
    model, optimizer = parts()
    batches, weights = loader(), []
    for i, (x, y) in enumerate(batches):
        with amp.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y) / N
        loss.backward()
        if (i + 1) % N == 0 or i + 1 == len(batches):
            optimizer.step()
            optimizer.zero_grad()
            weights.append(weights_of(model))
    return judge(weights)


def torch_amp() -> Seen:
    return loop(THEIRS)


def drop_in() -> Seen:
    return loop(OURS)


def fabric() -> Seen:
    engine = fabric_in("bf16-mixed")
    model, optimizer = parts()
    prepared, optimizer = engine.setup(model, optimizer)
    batches, weights = engine.setup_dataloaders(loader()), []
    for i, (x, y) in enumerate(batches):
        is_accumulating = (i + 1) % N != 0 and i + 1 != len(batches)
        with engine.no_backward_sync(prepared, enabled=is_accumulating):
            engine.backward(F.mse_loss(prepared(x).float(), y) / N)
        if not is_accumulating:
            optimizer.step()
            optimizer.zero_grad()
            weights.append(weights_of(model))
    return judge(weights)


def accelerate() -> Seen:
    with accelerator(mixed_precision="bf16", gradient_accumulation_steps=N) as engine:
        model, optimizer = parts()
        prepared, optimizer, batches = engine.prepare(model, optimizer, loader())
        weights = []
        for x, y in batches:
            with engine.accumulate(prepared):
                engine.backward(F.mse_loss(prepared(x).float(), y))
                optimizer.step()
                optimizer.zero_grad()
                if engine.sync_gradients:
                    weights.append(weights_of(model))
    return judge(weights)


def stepper() -> Seen:
    model, optimizer = parts()
    trainer = Stepper(model, optimizer, "bf16", accumulate=N)
    weights = []
    for x, y in loader():
        if trainer.step(lambda x=x, y=y: F.mse_loss(model(x).float(), y)):
            weights.append(weights_of(model))
    assert trainer.flush()
    return judge([*weights, weights_of(model)])
