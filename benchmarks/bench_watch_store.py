"""The index of a run's log: how fast it is built, how fast it answers, and how large it is.

To reach: any question over a million steps well under a second, 20 runs of 100,000 steps in tens of seconds. The bound
of building is what ``json`` alone costs, which reads the same lines in this run; the base of a question is a plain scan
of every step in Python, which keeps the extremes of buckets as the index does.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from interleave import Contender, measure, report

from halfstep.watch.entry import LAYERS_EVERY, RunStart
from halfstep.watch.log import file_of
from halfstep.watch.metrics import METRICS
from halfstep.watch.store import Store

NUM_STEPS = 1_000_000
NUM_RUNS, RUN_STEPS = 20, 100_000
NUM_PARAMETERS = 50
ROUNDS = 3


def lines(num_steps: int) -> Iterator[str]:
    """A log as the engine writes it: a step in 1,000 is skipped, and one in 100 has the norms of every parameter."""
    chance = random.Random(0)
    names = json.dumps([f"blocks.{number}.weight" for number in range(NUM_PARAMETERS)])
    yield json.dumps(RunStart(1e9, session="a", host="elsewhere", policy="fp16").to_entry()) + "\n"
    for step in range(1, num_steps + 1):
        loss, now = 2 + chance.random(), 1e9 + step * 0.01
        skipped = ',"applied":false,"reason":"the gradient was inf"' if step % 1000 == 0 else ""
        norm = '"Infinity"' if skipped else f"{loss / 3!r}"
        yield (
            f'{{"kind":"step","step":{step},"time":{now!r},"loss":{loss!r},"grad_norm":{norm},"scale":65536.0{skipped},'
            f'"memory_mib":314.1484375}}\n'
        )
        if step % LAYERS_EVERY == 0:
            norms = ",".join([f"{loss / 7!r}"] * NUM_PARAMETERS)
            yield f'{{"kind":"layers","time":{now!r},"step":{step},"parameters":{names},"norms":[{norms}]}}\n'


def write(folder: Path, num_steps: int) -> Path:
    folder.mkdir()
    with open(file_of(folder, 0), "w", encoding="utf-8") as file:
        file.writelines(lines(num_steps))
    return folder


def seconds_to_parse(log: Path) -> float:
    start = time.perf_counter()
    with open(log, "rb") as file:
        for line in file:
            json.loads(line)
    return time.perf_counter() - start


def seconds_to_build(folder: Path) -> float:
    start = time.perf_counter()
    store = Store(folder)
    assert store.update(1e9)
    store.close()
    return time.perf_counter() - start


def scan(steps: list[dict[str, Any]], first: int, last: int, points: int) -> dict[int, tuple[float, float]]:
    """The plain way: every step of the range is looked at. Of one metric, and a question is of six."""
    width = max(1, (last - first + 1) // (points // 2))
    extremes: dict[int, tuple[float, float]] = {}
    for entry in steps[first - 1 : last]:
        loss = entry["loss"]
        low, high = extremes.get(entry["step"] // width, (loss, loss))
        extremes[entry["step"] // width] = (min(low, loss), max(high, loss))
    return extremes


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        log = file_of(write(root / "long", NUM_STEPS), 0)
        parse, build = seconds_to_parse(log), seconds_to_build(root / "long")
        size = sum(file.stat().st_size for file in (root / "long").glob(".index*"))
        print(f"one run of {NUM_STEPS:,} steps, {log.stat().st_size / NUM_STEPS:.0f} bytes of log a step")
        print(f"  index: {build:.1f} s, {NUM_STEPS / build:,.0f} steps/s, {size / NUM_STEPS:.0f} bytes a step")
        print(f"  json alone, line by line: {parse:.1f} s; index / json: {build / parse:.2f}", flush=True)

        steps = []
        with open(log, "rb") as file:
            for line in file:
                entry = json.loads(line)
                if entry["kind"] == "step":
                    steps.append({key: entry[key] for key in ("step", "loss")})
        store = Store(root / "long")
        for width, points in (
            (NUM_STEPS, 1000),
            (NUM_STEPS, 5000),
            (NUM_STEPS // 3, 1000),
            (10_000, 1000),
            (1_000, 1000),
        ):
            first = (NUM_STEPS - width) * 2 // 3 + 1
            ask = (first, first + width - 1, points)
            questions = {
                "six series": Contender(partial(store.series, METRICS, *ask)),
                "marks": Contender(partial(store.marks, *ask)),
                "layers": Contender(partial(store.layers, *ask)),
            }
            times = measure({**questions, "scan": Contender(partial(scan, steps, *ask))}, ROUNDS, 1)
            print(f"{width:,} steps, {points} points; the scan is of one series, and has its steps in memory")
            for question in questions:
                report(times, question, "scan", "under 1000 ms, tens are aimed at")
        store.close()
        del steps

        folders = [write(root / f"run {number}", RUN_STEPS) for number in range(NUM_RUNS)]
        parse = sum(seconds_to_parse(file_of(folder, 0)) for folder in folders)
        build = sum(map(seconds_to_build, folders))
        print(f"{NUM_RUNS} runs of {RUN_STEPS:,} steps: {build:.1f} s in one thread; index / json: {build / parse:.2f}")


if __name__ == "__main__":
    main()
