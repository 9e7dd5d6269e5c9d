"""Time several functions side by side: interleaved in one run, as ratios, with median and spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def measure(contenders: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Milliseconds of each call. Every round calls each contender once, so that a slow phase of the machine hits all."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(-warm_up, rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if round_number >= 0:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def ratio(times: Mapping[str, list[float]], name: str, base: str) -> tuple[float, float, float]:
    """Median of the ratio of ``name`` to ``base`` over the rounds, with its quartiles."""
    pairs = [a / b for a, b in zip(times[name], times[base], strict=True)]
    low, middle, high = statistics.quantiles(pairs, n=4)
    return middle, low, high


def report(times: Mapping[str, list[float]], name: str, base: str, bound: str = "") -> float:
    """Print one line: the ratio with its spread, both medians, and the figure to reach."""
    middle, low, high = ratio(times, name, base)
    medians = f"{statistics.median(times[name]):.3f} ms against {statistics.median(times[base]):.3f} ms"
    print(f"{name} / {base}: {middle:.3f} [{low:.3f}, {high:.3f}]  ({medians}) {bound}".rstrip())
    return middle
