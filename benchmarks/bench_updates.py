"""What UpdateMeter costs in percent of a bf16 training step, sampling every hundredth step, and what it finds.

Cost: forward, backward and fused AdamW of a small MLP and of a transformer of 10 million weights, with cpu16's products
where the CPU has no 16-bit ones. To reach: at most 1 %. The meter's two hooks are timed by themselves, right after a
step: the difference between two whole steps is noise many times larger than what it costs.

What bounds a sampled step: it looks once through all gradients for one that is not finite, 2 bytes a weight; beside
that it reads at most 1024 weights a parameter twice, and their gradients once.

What it finds: the share of lost updates in pure bf16 training of charlm (a GPT of 137 thousand weights).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import islice

import torch
from interleave import Contender, measure
from torch import nn

from halfstep import cpu16
from halfstep.updates import UpdateMeter
from halfstep.workloads.charlm import workload

EVERY = 100


def small_mlp() -> tuple[nn.Module, torch.Tensor]:
    layers = [part for _ in range(3) for part in (nn.Linear(128, 128), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(128, 10)), torch.randn(64, 128)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    block = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(block, 3, enable_nested_tensor=False), torch.randn(4, 64, 512)


def contenders(build: Callable[[], tuple[nn.Module, torch.Tensor]]) -> dict[str, Contender]:
    torch.manual_seed(0)
    model, x = build()
    model, x = model.bfloat16(), x.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    sampled, between = UpdateMeter(model, optimizer, every=1), UpdateMeter(model, optimizer, every=10**9)
    for meter in (sampled, between):
        meter.remove()

    def step() -> None:
        optimizer.zero_grad()
        cpu16.active = True
        model(x).float().square().mean().backward()
        cpu16.active = False
        optimizer.step()

    def hooks(meter: UpdateMeter, calls: int) -> None:
        for _ in range(calls):
            meter._before_step(optimizer, (optimizer,), {})
            meter._after_step(optimizer, (optimizer,), {})

    return {
        "step": Contender(step),
        "sampled": Contender(lambda: hooks(sampled, 1), step),
        "1000 between": Contender(lambda: hooks(between, 1000), step),
    }


def cost(name: str, build: Callable[[], tuple[nn.Module, torch.Tensor]], rounds: int) -> None:
    times = measure(contenders(build), rounds)
    shares = [
        100 * (sampled + (EVERY - 1) * many / 1000) / EVERY / step
        for step, sampled, many in zip(times["step"], times["sampled"], times["1000 between"], strict=True)
    ]
    low, middle, high = statistics.quantiles(shares, n=4)
    step, sampled, many = (statistics.median(times[key]) for key in ("step", "sampled", "1000 between"))
    print(f"  {name}: {middle:.3f} %  [{low:.3f}, {high:.3f}]  of a step (to reach 1)")
    print(f"    a step {step:.2f} ms, a sampled one {sampled:.3f} ms more, any other {many:.2f} us more", flush=True)


def charlm(lr: float, num_steps: int = 100) -> None:
    work = workload(0)
    model = work.model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, fused=True)
    meter = UpdateMeter(model, optimizer, every=num_steps)
    for batch in islice(work.batches, num_steps):
        cpu16.active = True
        total, count = work.loss(model, batch)
        (total / count).backward()
        cpu16.active = False
        optimizer.step()
        optimizer.zero_grad()
    report = meter.report()
    norms = [m.unmoved_pct for m in report.modules if "norm" in m.module]
    linears = [m.unmoved_pct for m in report.modules if m.module.endswith(("qkv", "out", "up", "down", "head"))]
    print(
        f"  lr {lr:g}: {report.unmoved_pct:.0f} % of all, linear layers {min(linears):.0f} to {max(linears):.0f} %, "
        f"norms {min(norms):.0f} to {max(norms):.0f} %",
        flush=True,
    )


if __name__ == "__main__":
    print(__doc__.splitlines()[0])
    torch.set_num_threads(1)
    cpu16.kernels.acquire()
    cost("MLP, 51 thousand weights", small_mlp, 60)
    cost("transformer, 9.5 million weights", transformer, 20)
    print("updates lost in step 100 of charlm in pure bf16")
    for lr in (1e-2, 1e-3, 1e-4, 1e-5):
        charlm(lr)
    cpu16.kernels.release()
