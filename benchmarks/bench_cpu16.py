"""A 16-bit step through cpu16 on a CPU without 16-bit instructions: 512-2048-512 MLP with LayerNorm, batch 256.

To reach: at most 1.3 times the fp32 step, and at least 30 times faster than torch's own 16-bit step.

What the 16-bit step adds to the fp32 one, in passes over the weights (1 M numbers each, two layers): round to 16 bit 6
bytes, widen for forward and for the input's gradient 6 + 6, round the weight's gradient 6 and widen it 6; the same for
the activations, which are a quarter of that. The products themselves are the fp32 ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from interleave import Contender, measure, report
from torch import nn

from halfstep import Stepper


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512), nn.LayerNorm(512))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def by_halfstep(x: torch.Tensor, policy: str) -> Contender:
    model, optimizer = make()
    stepper = Stepper(model, optimizer, policy)
    return Contender(lambda: stepper.step(lambda: model(x).float().pow(2).mean()))


def by_torch(x: torch.Tensor, dtype: torch.dtype) -> Contender:
    model, optimizer = make()

    def step() -> None:
        with torch.autocast("cpu", dtype=dtype):
            loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Contender(step)


if __name__ == "__main__":
    print(__doc__.splitlines()[0])
    x = torch.randn(256, 512)
    ours = {policy: by_halfstep(x, policy) for policy in ("fp32", "bf16", "fp16")}
    times = measure(ours, rounds=40)
    for policy in ("bf16", "fp16"):
        report(times, policy, "fp32", "to reach 1.3")
    for policy, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        # Ten steps in a row, as in a loop, take about a third of one of torch's own.
        pair = {"torch's own": by_torch(x, dtype), f"cpu16 {policy}": replace(ours[policy], calls=10)}
        report(measure(pair, rounds=8, warm_up=1), f"cpu16 {policy}", "torch's own", "to reach 1/30 = 0.033")
