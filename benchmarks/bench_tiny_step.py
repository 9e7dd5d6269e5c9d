"""A whole step of a tiny model: 4 layers of width 64, batch 32, with clipping, where Python overhead dominates.

fp32 against the same loop written by hand; bf16 and fp16 against it on torch.amp; each with the guard, as a Stepper has
it, and with ``watch=False``. To reach: at most 1.05 each. Then what bounds it: calls and operations of one step.

On a CPU without 16-bit instructions torch's own 16-bit products take most of torch.amp's step, so the plain ratio
flatters us. There a second ratio lends cpu16's kernels to torch.amp as well, and leaves overhead against overhead. On
one that has them a step of ours leaves cpu16 out, so that lending would compare products.

One thread, timed by its own processor time: on a shared machine a step waits for others, whoever wrote it.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable
from typing import Any

import torch
from interleave import Contender, measure, report
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep import Stepper, cpu16
from halfstep.hardware import detect

WIDTH, BATCH, NUM_LAYERS = 64, 32, 4


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [part for _ in range(NUM_LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def by_hand(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype | None, lend: bool = False) -> Callable[[], None]:
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)

    def step() -> None:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = nn.functional.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def step_with_cpu16() -> None:
        cpu16.active = True
        step()
        cpu16.active = False

    return step_with_cpu16 if lend else step


def by_hand_fp32(x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    model, optimizer = make()

    def step() -> None:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_halfstep(x: torch.Tensor, y: torch.Tensor, policy: str, watch: bool = True) -> Callable[[], None]:
    model, optimizer = make()
    stepper = Stepper(model, optimizer, policy, max_norm=1.0, watch=watch)

    def step() -> None:
        stepper.step(lambda: nn.functional.mse_loss(model(x).float(), y))

    return step


def compare(name: str, base: Callable[[], None], policy: str, goal: str, x: torch.Tensor, y: torch.Tensor) -> None:
    steps = {
        name: base,
        f"halfstep {policy}": by_halfstep(x, y, policy),
        f"halfstep {policy} watch=False": by_halfstep(x, y, policy, watch=False),
    }
    contenders = {each: Contender(step, calls=25) for each, step in steps.items()}
    times = measure(contenders, rounds=40, clock=time.thread_time)
    for ours in list(steps)[1:]:
        report(times, ours, name, goal)
    for each, step in steps.items():
        print(f"    {each}: {num_calls(step):.0f} calls, {num_operations(step):.0f} operations")


def num_calls(step: Callable[[], None], num_steps: int = 100) -> float:
    """Calls of functions in a step, Python's and built-in ones."""
    profile = cProfile.Profile()
    profile.runcall(lambda: [step() for _ in range(num_steps)])
    return pstats.Stats(profile).total_calls / num_steps  # type: ignore[attr-defined]


class Operations(TorchDispatchMode):
    """Counts the operations of torch that run."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def num_operations(step: Callable[[], None], num_steps: int = 100) -> float:
    """Operations of torch in a step, views and those of backward included."""
    with Operations() as operations:
        for _ in range(num_steps):
            step()
    return operations.num / num_steps


if __name__ == "__main__":
    print(__doc__.splitlines()[0])
    torch.set_num_threads(1)  # a second one only adds noise at this size
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    goal = "to reach 1.05"
    compare("by hand fp32", by_hand_fp32(x, y), "fp32", goal, x, y)
    for policy, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp16 on_overflow=skip", torch.float16)):
        compare(f"torch.amp {policy[:4]}", by_hand(x, y, dtype), policy, goal, x, y)
        if policy[:4] in detect("cpu").emulated:
            cpu16.kernels.acquire()
            compare(f"torch.amp {policy[:4]} with cpu16 lent", by_hand(x, y, dtype, lend=True), policy, goal, x, y)
            cpu16.kernels.release()
