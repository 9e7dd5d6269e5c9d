"""What it costs to watch a run: the same step without, with the guard, and with the guard and a log.

Of the built-in workload charlm, and of the tiny net of bench_tiny_step, where Python is most of a step. To reach: at
most 1.02 for charlm. Beside the ratio of wall times, which a busy machine blurs: the CPU time of the process, of all
its threads, and of it that of the thread that writes the log. While this thread computes, the main one may wait for the
interpreter's lock, so that its time bounds what the log can cost.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from bench_tiny_step import BATCH, WIDTH, make
from interleave import Contender, measure, report
from torch import nn

from halfstep import Stepper
from halfstep.source import load
from halfstep.watch.log import file_of
from halfstep.watcher import EVERY
from halfstep.workload import stream

Step = Callable[[], object]


def charlm(policy: str, **watch: object) -> Step:
    workload = load("charlm")(0)
    optimizer = workload.optimizer([p for p in workload.model.parameters() if p.requires_grad])
    stepper = Stepper(workload.model, optimizer, policy, max_norm=workload.max_norm, **watch)
    batches = stream(workload)

    def step() -> None:
        batch = next(batches)
        stepper.step(lambda: workload.loss(workload.model, batch))

    return step


def tiny(policy: str, **watch: object) -> Step:
    model, optimizer = make()
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    stepper = Stepper(model, optimizer, policy, max_norm=1.0, **watch)
    return lambda: stepper.step(lambda: nn.functional.mse_loss(model(x).float(), y))


def cpu_times(steps: Mapping[str, Step], rounds: int, calls: int) -> dict[str, tuple[float, float]]:
    """Microseconds of CPU a step: of the whole process, and of the log's thread. The medians over the rounds."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(rounds):
        for name, step in list(steps.items())[:: 1 if number % 2 else -1]:
            start, log_start = time.process_time(), _log_time()
            for _ in range(calls):
                step()
            time.sleep(0.15)  # the thread writes what it has
            spent = time.process_time() - start, _log_time() - log_start
            found[name].append((spent[0] / calls * 1e6, spent[1] / calls * 1e6))
    return {
        name: (statistics.median(of[0] for of in pairs), statistics.median(of[1] for of in pairs))
        for name, pairs in found.items()
    }


def _log_time() -> float:
    threads = [thread.ident for thread in threading.enumerate() if thread.name == "halfstep log"]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in threads if ident)


def compare(what: str, make_step: Callable[..., Step], policy: str, rounds: int, calls: int, goal: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        steps = {
            "not watched": make_step(policy, watch=False),
            "guard": make_step(policy),
            "guard and log": make_step(policy, log=folder),
        }
        print(f"{what} {policy}")
        times = measure({name: Contender(step, calls=calls) for name, step in steps.items()}, rounds)
        for name in ("guard", "guard and log"):
            report(times, name, "not watched", goal)
        cpu = cpu_times(steps, rounds, calls)
        base = cpu["not watched"][0]
        for name in ("guard", "guard and log"):
            more = cpu[name][0] - base
            print(
                f"  {name}: {more:.0f} of {base:.0f} us of CPU a step, {more / base:.2%}; in the log's thread", end=""
            )
            print(f" {cpu[name][1]:.1f} us")
        time.sleep(0.2)
        lines = [line for line in file_of(Path(folder), 0).read_bytes().splitlines() if b'"kind":"step"' in line]
        print(f"  log: {statistics.mean(map(len, lines)) + 1:.0f} bytes a step", flush=True)
        del steps
        for thread in threading.enumerate():
            assert thread.name != "halfstep log", "the log of a stepper that is gone has ended"


if __name__ == "__main__":
    print(__doc__.splitlines()[0])
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    for policy in ("fp32", "bf16"):
        compare("charlm", charlm, policy, rounds=20, calls=EVERY, goal="to reach 1.02")
    for policy in ("fp32", "bf16"):
        compare("tiny net", tiny, policy, rounds=40, calls=10 * EVERY, goal="for the record")
