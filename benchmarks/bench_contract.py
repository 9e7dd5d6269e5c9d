"""What the precision contract costs: the same step on two ranks without comparisons, and with one every 1, 10, 100.

Of the tiny net of bench_tiny_step, where Python is most of a step, and of a wider one with half a million weights. All
contenders are steps of one stepper, interleaved, 100 steps each time. Beside the ratio of wall times, which a busy
machine blurs: the CPU time of a comparison by itself, of its parts and of a step, and how many bytes it sends. To
reach: far below 1.01 every 100.

The script starts its two ranks itself.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from bench_tiny_step import BATCH, WIDTH, make
from interleave import Contender, measure, report
from torch import distributed, nn

from halfstep import Contract, Stepper
from halfstep.distributed import replicate
from halfstep.ranks.contract import Comparison
from halfstep.ranks.digests import differing
from halfstep.ranks.facts import facts_of_weights
from halfstep.stepper.facts import compare as compare_ranks

NUM_STEPS = 100
NEVER = 10**9


def tiny() -> tuple[nn.Module, torch.Tensor]:
    return make()[0], torch.randn(BATCH, WIDTH)


def wide() -> tuple[nn.Module, torch.Tensor]:
    layers = [part for _ in range(2) for part in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(BATCH, 512)


def compare(what: str, make_model: Callable[[], tuple[nn.Module, torch.Tensor]], policy: str, rounds: int) -> None:
    model, x = make_model()
    model = replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    stepper = Stepper(model, optimizer, policy, max_norm=1.0, watch=False)
    num_weights = sum(p.numel() for p in model.parameters())

    def step() -> None:
        stepper.step(lambda: model(x).float().square().mean())

    def steps_with(every: int) -> Callable[[], None]:
        comparison = Comparison(stepper.ranks, Contract(every=every), "", is_auto=False)

        def run() -> None:
            stepper._comparison, comparison.is_due = comparison, every != NEVER
            for _ in range(NUM_STEPS):
                step()

        return run

    contenders = {"without": Contender(steps_with(NEVER))}
    contenders |= {f"every {every}": Contender(steps_with(every)) for every in (1, 10, 100)}
    times = measure(contenders, rounds=rounds, warm_up=1)
    if distributed.get_rank() == 0:
        print(f"{what} {policy}, {num_weights:,} weights, milliseconds of {NUM_STEPS} steps on two ranks:")
        for every in (1, 10, 100):
            report(times, f"every {every}", "without", "to reach 1.01" if every == 100 else "for the record")

    sent: list[int] = []
    highest = stepper.ranks.highest
    stepper.ranks.highest = lambda numbers: sent.append(numbers.nbytes) or highest(numbers)  # type: ignore[method-assign]
    compare_ranks(stepper)
    weights = facts_of_weights(stepper.ranks, stepper.masters.named_rests())
    known = [0] * (sent[-1] // 32)
    parts = {
        "a step": step,
        "a comparison": lambda: compare_ranks(stepper),
        "its sums of weights": lambda: [fact.digest() for fact in weights],
        "its collective": lambda: differing(stepper.ranks, known),
    }
    found: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(200):
        for name, run in parts.items():
            distributed.barrier()
            start = time.process_time()
            run()
            found[name].append((time.process_time() - start) * 1e6)
    if distributed.get_rank() == 0:
        medians = {name: statistics.median(each) for name, each in found.items()}
        print("  us of CPU:", ", ".join(f"{name} {value:.0f}" for name, value in medians.items()))
        share = medians["a comparison"] / medians["a step"] / 100
        print(f"  every 100 steps that is {share:.2%}; {32 * len(known)} bytes a comparison", flush=True)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *sys.argv]
        sys.exit(subprocess.run(launch, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    if distributed.get_rank() == 0:
        print(__doc__.splitlines()[0])
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    for policy in ("bf16", "bf16 master=split16"):
        compare("tiny net", tiny, policy, rounds)
    compare("wide net", wide, "bf16", max(3, rounds // 4))
    distributed.destroy_process_group()
