"""Time several functions side by side: interleaved in one run, as ratios, with median and spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


def nothing() -> None:
    """The preparation of a contender that needs none."""


@dataclass(frozen=True)
class Contender:
    """``run`` is timed, ``calls`` times a round; ``prepare`` runs before each call and is not."""

    run: Callable[[], object]
    prepare: Callable[[], object] = nothing
    calls: int = 1


def measure(
    contenders: Mapping[str, Contender],
    rounds: int,
    warm_up: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Milliseconds a call, one mean a round. Every round has all contenders, so that a slow phase hits each of them."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-warm_up, rounds):
        # Turning the order round cancels what one contender leaves in the caches for the next.
        order = list(contenders.items())[:: 1 if number % 2 else -1]
        for name, contender in order:
            spent = 0.0
            for _ in range(contender.calls):
                contender.prepare()
                start = clock()
                contender.run()
                spent += clock() - start
            if number >= 0:
                times[name].append(spent / contender.calls * 1e3)
    return times


def report(times: Mapping[str, list[float]], name: str, base: str, goal: str) -> float:
    """Print a line: the median of the ratio over the rounds with its quartiles, both medians, and the goal."""
    pairs = [a / b for a, b in zip(times[name], times[base], strict=True)]
    low, middle, high = statistics.quantiles(pairs, n=4)
    medians = f"{statistics.median(times[name]):.3f} against {statistics.median(times[base]):.3f} ms"
    print(f"  {name} / {base}: {middle:.3f}  [{low:.3f}, {high:.3f}]  {medians}  ({goal})", flush=True)
    return middle
