"""What it costs to watch a run: the same step without, with the guard, and with the guard and a log.

Of the built-in workload charlm, and of the tiny net of bench_tiny_step, where Python is most of a step. To reach: at
most 1.02 for charlm. All contenders are steps of one stepper, whose watcher is exchanged: two models of the same shape
differ by more than what is measured. Beside the ratio of wall times, which a busy machine blurs: that of the quietest
rounds; the CPU time of the process, of all its threads, and of it that of the thread that writes the log. While this
thread computes, the main one may wait for the interpreter's lock, so that its time bounds what the log can cost.
"""

from __future__ import annotations

import logging
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


def charlm(policy: str) -> tuple[Stepper, Step]:
    workload = load("charlm")(0)
    optimizer = workload.optimizer([p for p in workload.model.parameters() if p.requires_grad])
    stepper = Stepper(workload.model, optimizer, policy, max_norm=workload.max_norm, watch=False)
    batches = stream(workload)

    def step() -> None:
        batch = next(batches)
        stepper.step(lambda: workload.loss(workload.model, batch))

    return stepper, step


def tiny(policy: str) -> tuple[Stepper, Step]:
    model, optimizer = make()
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    stepper = Stepper(model, optimizer, policy, max_norm=1.0, watch=False)
    return stepper, lambda: stepper.step(lambda: nn.functional.mse_loss(model(x).float(), y))


class Contenders:
    """The step of one stepper, as often as a watcher reads at once; each watcher sees a run of its own."""

    def __init__(self, stepper: Stepper, step: Step, log: str) -> None:
        self._stepper, self._step = stepper, step
        self._watchers = {
            "not watched": None,
            "guard": stepper._make_watcher(None, True),
            "guard and log": stepper._make_watcher(log, True),
        }
        self._num_steps = dict.fromkeys(self._watchers, 0)

    def steps(self) -> dict[str, Step]:
        return {name: lambda name=name: self._run(name) for name in self._watchers}

    def _run(self, name: str) -> None:
        self._stepper._watcher, self._stepper.num_steps = self._watchers[name], self._num_steps[name]
        for _ in range(EVERY):
            self._step()
        self._num_steps[name] = self._stepper.num_steps

    def close(self) -> None:
        for watcher in self._watchers.values():
            if watcher:
                watcher.close()


def cpu_times(steps: Mapping[str, Step], rounds: int, calls: int) -> dict[str, list[float]]:
    """Microseconds of CPU a step of the whole process, one mean a round; those of the log's thread, too."""
    found: dict[str, list[float]] = {name: [] for name in (*steps, "log's thread")}
    for number in range(rounds):
        for name, run in list(steps.items())[:: 1 if number % 2 else -1]:
            start, log_start = time.process_time(), _log_time()
            for _ in range(calls):
                run()
            time.sleep(0.1)  # the thread writes what it has
            found[name].append((time.process_time() - start) / calls / EVERY * 1e6)
            if name == "guard and log":
                found["log's thread"].append((_log_time() - log_start) / calls / EVERY * 1e6)
    return found


def _log_time() -> float:
    threads = [thread.ident for thread in threading.enumerate() if thread.name == "halfstep log"]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in threads if ident)


def compare(what: str, make_step: Callable[[str], tuple[Stepper, Step]], policy: str, calls: int, goal: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        contenders = Contenders(*make_step(policy), folder)
        steps = contenders.steps()
        print(f"{what} {policy}, milliseconds of {EVERY} steps:")
        times = measure({name: Contender(run, calls=calls) for name, run in steps.items()}, rounds=40)
        cpu = cpu_times(steps, 40, calls)
        contenders.close()
        for name in ("guard", "guard and log"):
            report(times, name, "not watched", goal)
            quiet, quiet_base = (statistics.quantiles(times[of], n=10)[0] for of in (name, "not watched"))
            print(f"    of the quietest tenth of the rounds: {quiet / quiet_base:.3f}")
        base = statistics.median(cpu["not watched"])
        for name in ("guard", "guard and log"):
            more = statistics.median(a - b for a, b in zip(cpu[name], cpu["not watched"], strict=True))
            print(f"  {name}: {more:+.0f} us of CPU a step, {more / base:+.2%} of {base:.0f}")
        lines = [line for line in file_of(Path(folder), 0).read_bytes().splitlines() if b'"kind":"step"' in line]
        size = statistics.mean(map(len, lines)) + 1
        written = statistics.median(cpu["log's thread"])
        print(f"  the log's thread: {written:.0f} us of CPU a step, for {size:.0f} bytes", flush=True)


if __name__ == "__main__":
    print(__doc__.splitlines()[0])
    logging.disable(logging.WARNING)  # what the guard says about steps that take turns
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    for policy in ("fp32", "bf16"):
        compare("charlm", charlm, policy, calls=1, goal="to reach 1.02")
    for policy in ("fp32", "bf16"):
        compare("tiny net", tiny, policy, calls=10, goal="for the record")
