"""What UpdateMeter costs, in percent of a training step in bf16, when it samples every hundredth step.

Forward, backward and fused AdamW of a small MLP and of a transformer of 10 million weights, with cpu16's products where
the CPU has no 16-bit ones. To reach: under 1 %.

A sampled step reads 4 bytes of each of at most 1024 weights a parameter before and after, and their gradient; beside
that it looks once through all gradients, 2 bytes a weight, for one that is not finite.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from interleave import Contender, measure
from torch import nn

from halfstep import cpu16
from halfstep.updates import UpdateMeter


def small_mlp() -> tuple[nn.Module, torch.Tensor]:
    layers = [part for _ in range(3) for part in (nn.Linear(128, 128), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(128, 10)), torch.randn(64, 128)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    block = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(block, 3, enable_nested_tensor=False), torch.randn(4, 64, 512)


def make(build: Callable[[], tuple[nn.Module, torch.Tensor]], every: int | None) -> Callable[[], None]:
    torch.manual_seed(0)
    model, x = build()
    model, x = model.bfloat16(), x.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if every is not None:
        UpdateMeter(model, optimizer, every=every)

    def step() -> None:
        cpu16.active = True
        model(x).float().square().mean().backward()
        cpu16.active = False
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    print(__doc__.splitlines()[0])
    torch.set_num_threads(1)
    cpu16.kernels.acquire()
    for name, build, rounds, calls in (("small MLP", small_mlp, 60, 20), ("transformer", transformer, 30, 1)):
        steps = {"without": None, "between samples": 10**9, "sampled": 1}
        times = measure({key: Contender(make(build, every), calls=calls) for key, every in steps.items()}, rounds)
        base, between, sampled = (times[key] for key in steps)
        cost = [100 * ((99 * b + s) / 100 / w - 1) for w, b, s in zip(base, between, sampled, strict=True)]
        low, middle, high = statistics.quantiles(cost, n=4)
        extra = statistics.median(s - b for b, s in zip(between, sampled, strict=True))
        print(
            f"  {name}, a step of {statistics.median(base):.2f} ms: {middle:+.2f} %  [{low:+.2f}, {high:+.2f}] of a step "
            f"(to reach 1); a sampled step alone {extra:+.3f} ms"
        )
    cpu16.kernels.release()
