"""Checkpoints: bytes on disk against the bytes of the run's states, and the memory that saving and loading takes.

10 million parameters, fused AdamW, in mid-window, so that fp32 sums of gradients are saved as well. Bytes a parameter.
Memory is that of tensors, beside those that the run has anyway. For a rank on CUDA comes on top what passes through the
host, at most 256 MiB at a time, or its largest tensor.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep import Stepper
from halfstep.compare.memory import LiveBytes
from halfstep.distributed import load, save

NUM_LAYERS, WIDTH = 10, 1000
POLICIES = ("bf16", "bf16 master=copy", "bf16 master=split16", "bf16 master=split8", "bf16 master=stochastic")


def build(policy: str) -> Stepper:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Stepper(model, optimizer, policy, accumulate=2, max_norm=1.0, watch=False)


def tensors_of(stepper: Stepper) -> list[torch.Tensor]:
    """Weights, rests, optimizer states and gradients."""
    parameters = list(stepper.model.parameters())
    states: list[Any] = [value for state in stepper.optimizer.state.values() for value in state.values()]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [*(p.data for p in parameters), *stepper.masters.rests(), *states, *gradients]


def more(stepper: Stepper, call: Any) -> int:
    """Bytes of tensors at the peak of a call, beside those that the run holds before it."""
    live = LiveBytes()
    live.count(tensors_of(stepper))
    before = live.now
    with live:
        call()
    return live.peak - before


def main() -> None:
    print(__doc__.splitlines()[0])
    print("| policy | states | on disk | more at the peak of saving | of loading, beside states and gradients |")
    print("|---|---|---|---|---|")
    for policy in POLICIES:
        stepper = build(policy)
        for _ in range(3):
            stepper.step(lambda stepper=stepper: stepper.model(torch.randn(8, WIDTH)).float().square().mean())
        num = sum(p.numel() for p in stepper.model.parameters())
        states = sum(t.numel() * t.element_size() for t in tensors_of(stepper))
        with tempfile.TemporaryDirectory() as folder:
            saving = more(stepper, lambda stepper=stepper, folder=folder: save(folder, stepper))
            disk = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
            resumed = build(policy)
            loading = more(resumed, lambda resumed=resumed, folder=folder: load(folder, resumed)) - 12 * num
        figures = [states / num, disk / num, saving / num, loading / num]
        print(f"| `{policy}` | {' | '.join(f'{figure:.3f}' for figure in figures)} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
