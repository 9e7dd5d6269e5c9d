"""The index of a log answers as a plain reading of the log does, whatever was appended, cut, torn or taken away."""

from __future__ import annotations

import json
import math
import os
import platform
import random
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from contextlib import closing
from itertools import accumulate
from pathlib import Path

import pytest

from halfstep.errors import HalfstepError
from halfstep.watch import index, layers, metrics, pyramid, run_state
from halfstep.watch.entry import RunStart, Step
from halfstep.watch.metrics import METRICS, STEPS
from halfstep.watch.store import Store
from halfstep.watch.window import pauses

ALERT = {"rule": "loss-spike", "severity": "error", "message": "a spike", "action": "Look.", "rank": 0}


def write(folder, entries, mode="w"):
    """A log; ``entries`` may be lines already."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [e if isinstance(e, str) else json.dumps(e, allow_nan=False) for e in entries]
    with open(folder / "rank-00000.jsonl", mode, encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
    return folder


def run(session="a", time=1000.0, **more):
    return RunStart(time=time, session=session, host="elsewhere", policy="fp16", **more).to_entry()


def step(number, loss=1.0, **more):
    return Step(**{"step": number, "time": 1000.0 + number, "loss": loss, "grad_norm": 1.0, **more}).to_entry()


def alert(number):
    return {"kind": "alert", "time": 1000.0 + number, **ALERT, "step": number}


def random_log(seed, num_steps=900):
    """Sessions with seams and without, spikes, NaN, inf, skips, replays, holes, broken lines, layers, alerts."""
    chance = random.Random(seed)
    entries, number, now, session = [run()], 0, 1000.0, 0
    for _ in range(num_steps):
        if chance.random() < 0.008 and number:
            session += 1
            entries.append(run(f"s{session}", now))
            back = max(0, number - chance.choice([0, 1, 7, 30, 200, 10_000]))
            if chance.random() < 0.7:
                entries.append({"kind": "seam", "time": now, "step": back})
            number = back
        number += 1 if chance.random() < 0.99 else chance.randint(2, 90)
        now += chance.choice([0.1, 0.2, 5.0, 0.0, -1.0])
        bad = chance.random() < 0.04
        loss = chance.choice([math.nan, math.inf, -math.inf]) if bad else chance.gauss(2, 1)
        if chance.random() < 0.01:
            loss *= 1e4
        more = {"applied": not bad, "num_replays": chance.choice([0] * 20 + [1, 3])}
        memory = chance.choice([None, 100.0, 200.0])
        norm = chance.choice([1, 0.5, math.nan, chance.random()])
        count = chance.choice([1.0, 512.0])
        entries.append(
            Step(
                number, now, loss, norm, 2.0 ** chance.randint(0, 16), memory_mib=memory, count=count, **more
            ).to_entry()
        )
        if number % 20 == 0:
            names = ["a", "b", "c"][: chance.choice([2, 3, 3, 3])]
            norms = [chance.choice([1.0, 1e-9, 0.0, "NaN", "Infinity", chance.random()]) for _ in names]
            entries.append({"kind": "layers", "time": now, "step": number, "parameters": names, "norms": norms})
        if chance.random() < 0.02:
            entries.append(alert(number))
        if chance.random() < 0.01:
            entries.append('{"kind": "step", "st')
    return entries


class Plain:
    """The slow twin: reads every line, keeps every step, looks at each for each answer."""

    def __init__(self, folder):
        self.steps, self.entries, self.layers = {}, [], {}
        self.row = []  # number, time and count of the steps that followed one another
        opened, has_stepped = 0, True
        lines = (folder / "rank-00000.jsonl").read_text(encoding="utf-8").splitlines()
        for place, line in enumerate(lines):
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            kind, number = entry["kind"], entry.get("step")
            if kind == "run":
                opened, has_stepped, self.row = place, False, []
            elif kind == "seam":
                self.forget(number, place)
                self.row = []
            elif kind == "step":
                if self.steps and number <= max(self.steps):
                    self.forget(number - 1, place if has_stepped else opened)
                    self.row = []
                has_stepped = True
                if self.row and (number != self.row[-1][0] + 1 or entry["time"] < self.row[-1][1]):
                    self.row = []
                self.row.append((number, entry["time"], entry.get("count", 1.0)))
                entry["seconds"], entry["count_per_s"] = self.pace()
                self.steps[number] = {"scale": 1.0, "memory_mib": None, **entry}
            elif kind == "layers":
                self.layers[number] = dict(zip(entry["parameters"], map(float, entry["norms"]), strict=True))
            if kind in ("seam", "alert"):
                self.entries.append((place, entry))

    def pace(self):
        """Seconds a step and what was done a second, over ten steps, or over one that took longer than twice ten."""
        before, last = self.row[-12:-1], self.row[-1]
        if not before:
            return None, None
        is_real = len(before) == 11 and last[1] - before[-1][1] > 2 * (before[-1][1] - before[0][1])
        span = [before[-1], last] if is_real else [*before[-10:], last]
        took = span[-1][1] - span[0][1]
        return took / (len(span) - 1), sum(count for _, _, count in span[1:]) / took if took else None

    def forget(self, after, place):
        self.steps = {number: entry for number, entry in self.steps.items() if number <= after}
        self.layers = {number: entry for number, entry in self.layers.items() if number <= after}
        self.entries = [(at, entry) for at, entry in self.entries if at >= place or entry["step"] <= after]

    def groups(self, first, last, points, steps=None, unit=4):
        """The steps of each bucket of an answer."""
        numbers = sorted(self.steps)
        first, last = max(first or 0, numbers[0]), min(last or numbers[-1], numbers[-1])
        width = math.ceil((last - first + 1) / points if last - first >= points else 1)
        if last - first >= points:
            width = math.ceil((last - first + 1) / (points // 2))
            sizes = [unit * pyramid.FACTOR**level for level in range(1, pyramid.DEPTH + 1)]
            size = max([1, *(size for size in sizes if size <= width)])
            width = math.ceil(width / size) * size
        groups = defaultdict(list)
        for number in numbers:
            if first <= number <= last:
                groups[number // width].append(self.steps[number])
        return list(groups.values())

    def series(self, first, last, points):
        answer = {name: {"steps": [], "values": [], "nonfinite": []} for name in METRICS}
        for group in self.groups(first, last, points):
            for name in METRICS:
                there = [(entry["step"], entry[name]) for entry in group if entry[name] is not None]
                finite = [(number, value) for number, value in there if not isinstance(value, str)]
                if finite:
                    low, high = min(finite, key=lambda pair: pair[1]), max(finite, key=lambda pair: pair[1])
                    for number, value in sorted({low, high}):
                        answer[name]["steps"].append(number)
                        answer[name]["values"].append(value)
                words = [[number, value] for number, value in there if isinstance(value, str)]
                answer[name]["nonfinite"] += words[:1]
        return answer

    def marks(self, first, last, points):
        skips, replays = [], []
        for group in self.groups(first, last, points):
            skipped = [entry["step"] for entry in group if entry.get("applied") is False]
            again = [(entry["step"], entry["num_replays"]) for entry in group if entry.get("num_replays")]
            skips += [[skipped[0], len(skipped)]] if skipped else []
            replays += [[again[0][0], sum(count for _, count in again)]] if again else []
        return {"skips": skips, "replays": replays}


RANGES = [
    (None, None, 10),
    (None, None, 100),
    (None, None, 5000),
    (17, 400, 20),
    (33, 33, 10),
    (100, 231, 2),
    (5, 900, 64),
    (10, 110, 100),
]


def answers(store):
    """All that a store says, as a page gets it; but for its version, which goes by the clock."""
    summary = store.summary()
    questions = [
        [store.series(METRICS, *ask), store.marks(*ask), store.layers(*ask), store.entries(["alert", "seam"], *ask[:2])]
        for ask in RANGES
    ]
    return json.dumps([summary, questions], allow_nan=False)


@pytest.fixture
def open_store():
    stores = []

    def open_one(folder, takes_all=True):
        stores.append(Store(folder))
        if takes_all:
            assert stores[-1].update(60)
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.mark.parametrize(("seed", "factor"), [(2, 8), (4, 2), (5, 3), (7, 2), (8, 8)])
def test_says_what_a_plain_reading_says(tmp_path, monkeypatch, open_store, seed, factor):
    monkeypatch.setattr(pyramid, "FACTOR", factor)
    folder = write(tmp_path / "run", random_log(seed))
    store, plain = open_store(folder), Plain(folder)
    for ask in RANGES:
        if any(plain.groups(*ask)):
            assert store.series(METRICS, *ask) == plain.series(*ask)
            assert store.marks(*ask) == plain.marks(*ask)
            assert store.series(["scale"], *ask)["scale"] == plain.series(*ask)["scale"]
    monkeypatch.setattr(layers, "LAYERS_EVERY", 20)  # as in this log, so that no two of them share a column
    told = store.layers(None, None, 5000)
    assert [told["steps"], [list(map(str, norms)) for norms in told["norms"]]] == [
        [*plain.layers],
        [
            [str(norms.get(name)).replace("nan", "NaN").replace("inf", "Infinity") for name in told["parameters"]]
            for norms in plain.layers.values()
        ],
    ]
    summary = store.summary()
    assert (summary["first_step"], summary["last_step"]) == (min(plain.steps), max(plain.steps))
    assert summary["num_steps"] == len(plain.steps)
    assert summary["num_skipped"] == sum(entry.get("applied") is False for entry in plain.steps.values())
    assert summary["num_replays"] == sum(entry.get("num_replays", 0) for entry in plain.steps.values())
    assert summary["loss"] == plain.steps[max(plain.steps)]["loss"]
    times = [time for _, time, _ in plain.row[-100:]]
    assert summary["seconds"] == (statistics.median(pauses(times)) if len(times) > 2 else None)
    assert store.entries(["alert", "seam"]) == [entry for _, entry in plain.entries]
    assert summary["num_alerts"] == sum(entry["kind"] == "alert" for _, entry in plain.entries)


@pytest.mark.parametrize("seed", range(4))
def test_the_index_of_a_log_that_grew_is_that_of_the_whole_log(tmp_path, monkeypatch, open_store, seed):
    monkeypatch.setattr(pyramid, "FACTOR", 2)
    whole = write(tmp_path / "run", random_log(seed))
    content = (whole / "rank-00000.jsonl").read_bytes()
    growing = write(tmp_path / "growing" / "run", [])
    chance = random.Random(seed)
    cuts = sorted(chance.randrange(len(content)) for _ in range(12))
    store = None
    for start, stop in zip([0, *cuts], [*cuts, len(content)], strict=True):
        with open(growing / "rank-00000.jsonl", "ab") as file:
            file.write(content[start:stop])
        if store is None or chance.random() < 0.2:
            store = open_store(growing)
        assert store.update(60)
        if chance.random() < 0.3:
            answers(store)
    assert answers(store) == answers(open_store(whole))


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    store = Store(write(tmp_path_factory.mktemp("long") / "run", []))
    rows = [(n, 1.5, 0.5, 1.0, None, None, None, 0, 0) for n in range(1, 200_001)]
    rows[123_456] = (123_457, 77.25, "NaN", 1.0, None, None, None, 1, 0)
    with store._index.transaction(writes=True) as db:  # as the log of it does in seconds
        for start in range(0, len(rows), 7_777):
            STEPS.add(db, rows[start : start + 7_777])
    yield store
    store.close()


def test_a_spike_of_one_step_is_in_the_answer_at_every_zoom(long_run):
    spike, width = 123_457, 200_000
    while width >= 10:
        for first in (max(1, spike - width // 3), max(1, spike - width + 1)):
            for points in (10, 333, 5000):
                ask = first, first + width - 1, points
                series = long_run.series(["loss", "grad_norm"], *ask)
                loss = dict(zip(series["loss"]["steps"], series["loss"]["values"], strict=True))
                assert loss[spike] == 77.25
                assert {value for number, value in loss.items() if number != spike} == {1.5}
                assert series["grad_norm"]["nonfinite"] == [[spike, "NaN"]]
                assert set(series["grad_norm"]["values"]) == {0.5}
                assert long_run.marks(*ask) == {"skips": [[spike, 1]], "replays": []}
                assert len(loss) <= points + 4
                assert len(loss) >= min(width, points) / 10 or width > points
        width //= 7
    assert long_run.series(["loss"], spike - 1, spike + 1, 10)["loss"]["steps"] == [spike - 1, spike, spike + 1]


@pytest.mark.parametrize("hole", [0, 50, 1000])
def test_no_step_is_missing_at_any_length(tmp_path, monkeypatch, open_store, hole):
    monkeypatch.setattr(pyramid, "FACTOR", 2)
    numbers = [number + hole * (number // 9) for number in range(1, 140)]
    with open_store(write(tmp_path / "run", []))._index.transaction(writes=True) as db:
        for count, number in enumerate(numbers, 1):
            STEPS.add(db, [(number, float(number), 1.0, 1.0, None, None, None, 0, 0)])
            assert metrics.totals(db, 1, number) == (count, 0, 0)
            assert metrics.totals(db, numbers[count // 3], number)[0] == count - count // 3
            assert metrics.series(db, ["loss"], 1, number, 2)["loss"]["values"][-1] == number


def test_a_question_over_all_steps_reads_few_rows(long_run):
    rows = 0
    read = pyramid.Pyramid._select

    def counting(*args):
        nonlocal rows
        for row in read(*args):
            rows += 1
            yield row

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyramid.Pyramid, "_select", counting)
        long_run.series(METRICS, None, None, 1000)
        long_run.summary()
    assert 0 < rows < 10_000


def test_a_seam_replaces_what_came_after_it(tmp_path, open_store):
    entries = [run(time=10.0), *(step(n, loss=5.0) for n in range(1, 101)), alert(40), alert(90)]
    folder = write(tmp_path / "run", [*entries, {"kind": "end", "time": 1100.0, "state": "failed", "reason": "killed"}])
    store = open_store(folder)
    assert store.summary()["state"] == "failed"
    seam = {"kind": "seam", "time": 2000.0, "step": 60}
    write(folder, [run("b", 2000.0), seam], "a")
    assert store.update(60)
    summary = store.summary()
    assert (summary["last_step"], summary["num_steps"], summary["num_alerts"]) == (60, 60, 1)
    assert (summary["session"], summary["started"], summary["updated"]) == ("b", 10.0, 2000.0)
    write(folder, [step(n, loss=2.0, time=2000.0 + n) for n in range(61, 71)], "a")
    store.update(60)
    assert store.series(["loss"], 59, 62, 100)["loss"]["values"] == [5.0, 5.0, 2.0, 2.0]
    assert store.series(["seconds"], 59, 63, 100)["seconds"]["steps"] == [59, 60, 62, 63]
    assert store.entries(["seam", "alert", "end"]) == [alert(40), seam]


def test_a_session_without_a_seam_replaces_from_its_first_step_on(tmp_path, open_store):
    folder = write(tmp_path / "run", [run(time=10.0), *(step(n, loss=5.0) for n in range(1, 101)), alert(100)])
    store = open_store(folder)
    write(folder, [run("b", 20.0)], "a")
    store.update(60)
    assert store.summary()["num_steps"] == 100
    promotion = {"kind": "promotion", "time": 20.0, "step": 51, "module": "head", "policy": "fp16", "reason": "inf"}
    write(folder, [promotion, *(step(n, loss=2.0) for n in range(51, 61))], "a")
    store.update(60)
    assert store.summary()["last_step"] == 60
    assert store.series(["loss"], 50, 51, 100)["loss"]["values"] == [5.0, 2.0]
    assert store.entries(["promotion", "alert"]) == [promotion]
    assert store.summary()["started"] == 10.0
    write(folder, [run("c", 30.0), step(1, loss=9.0)], "a")
    store.update(60)
    assert (store.summary()["num_steps"], store.summary()["loss"], store.summary()["started"]) == (1, 9.0, 30.0)
    assert store.entries(["promotion"]) == []


def test_entries_without_a_step_stand_at_the_last_one(tmp_path, open_store):
    gap, end = {"kind": "gap", "time": 5.0, "num_lost": 3}, {"kind": "end", "time": 9.0, "state": "finished"}
    folder = write(tmp_path / "run", [run(), step(1), step(2), gap, step(3), *map(alert, range(1, 4)), end])
    store = open_store(folder)
    assert store.entries(["gap", "end"]) == [{**gap, "step": 2}, {**end, "step": 3}]
    assert [entry["step"] for entry in store.entries(["alert"], limit=2)] == [2, 3]
    assert [entry["step"] for entry in store.entries(["alert", "gap"], 2, 2)] == [2, 2]
    assert store.entries(["alert"], -(10**30), 10**30) == list(map(alert, range(1, 4)))


def test_the_pause_over_a_seam_is_none_of_the_run(tmp_path, open_store):
    seam = {"kind": "seam", "time": 1002.0, "step": 2}
    store = open_store(
        write(tmp_path / "run", [run(), step(1), step(2), seam, step(3, time=5000.0), step(4, time=5001.0)])
    )
    assert store.series(["seconds"], None, None, 10)["seconds"] == {
        "steps": [2, 4],
        "values": [1.0, 1.0],
        "nonfinite": [],
    }


def bursts(num_steps, step_s=0.1):
    """Times of a host that runs ahead of its GPU, and waits for it at every tenth step."""
    return [1000.0 + (n // 10 * 10 * step_s + 0.001 * (n % 10)) for n in range(num_steps)]


def test_a_host_that_waits_for_its_gpu_is_shown_as_fast_as_the_gpu(tmp_path, open_store):
    entries = [step(n, time=time, count=32.0 * (1 + n % 2)) for n, time in enumerate(bursts(300), 1)]
    store = open_store(write(tmp_path / "run", [run(), *entries]))
    assert store.summary()["seconds"] == pytest.approx(0.1)
    series = store.series(["seconds", "count_per_s"], 11, None, 1000)
    assert series["seconds"]["values"] == pytest.approx([0.1] * 290)
    assert series["count_per_s"]["values"] == pytest.approx([480.0] * 290)


def test_the_usual_pause_is_that_of_the_last_hundred_steps(tmp_path, open_store):
    times = list(accumulate([0.3] * 300 + [0.1] * 60 + [0.3] * 40))
    store = open_store(write(tmp_path / "run", [run(), *(step(n, time=time) for n, time in enumerate(times, 1))]))
    assert store.summary()["seconds"] == pytest.approx(0.1)


def test_a_pause_that_is_no_wait_for_a_gpu_stands_alone(tmp_path, open_store):
    times = bursts(100)
    times[50:] = [time + 60.0 for time in times[50:]]  # step 51 comes a minute late
    times[80:] = [time + 1.0 for time in times[80:]]  # and step 81 a second, the time of ten steps
    store = open_store(write(tmp_path / "run", [run(), *(step(n, time=time) for n, time in enumerate(times, 1))]))
    seconds = dict(enumerate(store.series(["seconds"], None, None, 1000)["seconds"]["values"], 2))
    expected = [0.1] * 40 + [60.991] + [6.1] * 9 + [0.1] * 20 + [0.2] * 10 + [0.1] * 10
    assert [seconds[n] for n in range(11, 101)] == pytest.approx(expected)
    assert max(store.series(["seconds"], None, None, 10)["seconds"]["values"]) == seconds[51]
    assert store.summary()["seconds"] == pytest.approx(0.1)


def test_numbers_of_all_kinds(tmp_path, open_store):
    lines = [
        '{"kind":"step","step":1,"time":1,"loss":3,"grad_norm":1e999}',
        '{"kind":"step","step":2,"time":2,"loss":NaN,"grad_norm":-1e999,"count":null,"num_replays":null}',
        '{"kind":"step","step":3,"time":"NaN","loss":"-Infinity","grad_norm":0,"scale":null,"num_replays":9000000000000}',
        '{"kind":"step","step":0,"time":4,"loss":1,"grad_norm":1}',
        f'{{"kind":"step","step":{2**62},"time":4,"loss":1,"grad_norm":1}}',
        f'{{"kind":"seam","step":{2**62},"time":4}}',
        '{"kind":"explanation","step":"here","value":NaN,"deep":' + "[" * 300 + "]" * 300 + "}",
        '{"kind":"explanation","deep":' + "[" * 900 + "]" * 900 + "}",
        '{"kind":"run","time":4,"info":{"device":' + "[" * 900 + "]" * 900 + "}}",
    ]
    store = open_store(write(tmp_path / "run", lines))
    series = store.series(METRICS, None, None, 10)
    assert series["loss"] == {"steps": [1], "values": [3.0], "nonfinite": [[2, "NaN"], [3, "-Infinity"]]}
    assert series["grad_norm"]["nonfinite"] == [[1, "Infinity"], [2, "-Infinity"]]
    assert series["scale"]["steps"] == [1, 2]
    assert series["seconds"]["values"] == [1.0]
    assert series["count_per_s"]["values"] == []
    assert (store.summary()["last_step"], store.summary()["num_replays"]) == (3, 2**20)
    explanation = store.entries(["explanation"])[0]
    assert (explanation["step"], explanation["value"]) == (3, "NaN")
    answers(store)


def test_layers_keep_the_lowest_and_the_highest_norm(tmp_path, open_store):
    chance = random.Random(0)
    every = {n: [chance.random(), chance.random()] for n in range(100, 40_001, 100)}
    every[12_300] = [1e-30, 0.5]
    every[12_400] = [1e30, 0.5]
    every[31_000] = [0.5, math.nan]
    entries = [run()]
    for number, norms in every.items():
        words = [norm if math.isfinite(norm) else "NaN" for norm in norms]
        entries += [
            step(number),
            {"kind": "layers", "time": 1.0, "step": number, "parameters": ["a", "b"], "norms": words},
        ]
    store = open_store(write(tmp_path / "run", entries))
    all_layers = store.layers(None, None, 1000)
    assert all_layers["steps"] == list(every)
    assert all_layers["norms"][0] == every[100]
    assert all_layers["norms"][309] == [0.5, "NaN"]
    for points in (2, 10, 50, 300):
        some = store.layers(None, None, points)
        assert some["parameters"] == ["a", "b"]
        assert some["steps"] == sorted(some["steps"])
        assert len(some["steps"]) == len(some["norms"]) <= points + 4
        of_a, of_b = zip(*some["norms"], strict=True)
        assert (min(of_a), max(of_a)) == (1e-30, 1e30)
        assert of_b.count("NaN") == 1
        assert all(isinstance(norm, str) or 0 <= norm < 1 for norm in of_b)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "MOST_CELLS", 40)
        assert len(store.layers(None, None, 1000)["steps"]) <= 24


def test_parameters_that_come_and_go(tmp_path, open_store):
    def at(number, **norms):
        return [
            step(number),
            {"kind": "layers", "time": 1.0, "step": number, "parameters": [*norms], "norms": [*norms.values()]},
        ]

    early = [run(), *at(100, a=1.0), *at(200, b=2.0, a=1.5), *at(300, b=3.0)]
    store = open_store(write(tmp_path / "run", [*early, *at(400, c=4.0), {"kind": "seam", "time": 1.0, "step": 300}]))
    assert store.layers(None, None, 10) == {
        "steps": [100, 200, 300],
        "parameters": ["a", "b"],
        "norms": [[1.0, None], [1.5, 2.0], [None, 3.0]],
    }
    assert store.layers(None, None, 2) == {
        "steps": [100, 200, 300],  # the lowest of two steps, the highest of them, and the third
        "parameters": ["a", "b"],
        "norms": [[1.0, 2.0], [1.5, 2.0], [None, 3.0]],
    }
    assert store.layers(300, 399, 10)["parameters"] == ["b"]
    assert store.layers(301, 399, 10) is None


def test_a_run_without_a_step(tmp_path, open_store):
    store = open_store(write(tmp_path / "run", []))
    assert store.series(["loss"], None, None, 10) == {"loss": {"steps": [], "values": [], "nonfinite": []}}
    assert store.marks(3, 9, 10) == {"skips": [], "replays": []}
    assert store.layers(None, None, 10) is None
    summary = store.summary()
    assert (summary["state"], summary["num_steps"], summary["first_step"], summary["loss"]) == ("empty", 0, None, None)
    with pytest.raises(HalfstepError, match=r"metric 'lost': no such metric\. There are loss, "):
        store.series(["lost"], None, None, 10)


def test_summary_tells_the_run(tmp_path, open_store):
    info = {"requested": "auto", "effective": "fp16", "reason": "so", "device": "T4", "versions": {"torch": "2.13"}}
    folder = write(tmp_path / "my run", [run("abc", 1.0, num_ranks=4, info=info), step(1, loss=math.nan, scale=8.0)])
    (folder / "rank-00003.jsonl").write_text("")
    summary = open_store(folder).summary()
    told = {key: summary[key] for key in ("name", "policy", "effective", "reason", "device", "versions", "session")}
    assert told == {"name": "my run", "policy": "fp16", "session": "abc", **{k: info[k] for k in told if k in info}}
    assert (summary["ranks"], summary["num_ranks"], summary["rank"]) == ([0, 3], 4, 0)
    assert (summary["loss"], summary["grad_norm"], summary["scale"], summary["seconds"]) == ("NaN", 1.0, 8.0, None)


def test_update_gives_way_and_the_version_grows(tmp_path, open_store):
    folder = write(tmp_path / "run", [run(), *map(step, range(1, 8_001))])
    store = open_store(folder, takes_all=False)
    versions, lengths = [store.version], []
    while not store.update(0.0):
        versions.append(store.version)
        lengths.append(store.summary()["num_steps"])
    assert len(lengths) > 2
    assert lengths == sorted({*lengths})
    assert versions == sorted({*versions})
    version = store.version
    assert store.update()
    assert store.version == version
    write(folder, [step(8_001)], "a")
    assert store.update()
    assert store.version > version
    assert store.summary()["num_steps"] == 8_001


def small(tmp_path):
    return write(tmp_path / "run", [run(), *map(step, range(1, 51))])


def ask_index(folder, question):
    with closing(sqlite3.connect(folder / ".index-00000.sqlite")) as db:
        return db.execute(question).fetchone()[0]


@pytest.mark.parametrize("content", [b"", b"no index" * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
def test_an_index_that_is_broken_is_made_anew(tmp_path, open_store, content):
    folder = small(tmp_path)
    (folder / ".index-00000.sqlite").write_bytes(content)
    assert open_store(folder).summary()["num_steps"] == 50
    assert ask_index(folder, "PRAGMA user_version") == index.VERSION


def test_an_index_that_breaks_while_it_is_open_is_made_anew(tmp_path, open_store):
    folder = small(tmp_path)
    store = open_store(folder)
    with open(folder / ".index-00000.sqlite", "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        file.write(b"\0" * size)
    store.summary()
    assert store.update(60)
    assert store.summary()["num_steps"] == 50


@pytest.mark.parametrize(
    "statement", ["DELETE FROM progress", "UPDATE progress SET content = '[]'", "DROP TABLE steps_1"]
)
def test_an_index_that_lacks_something_is_made_anew(tmp_path, open_store, statement):
    folder = small(tmp_path)
    open_store(folder).close()
    with closing(sqlite3.connect(folder / ".index-00000.sqlite")) as db, db:
        db.execute(statement)
    store = open_store(folder, takes_all=False)
    store.summary()
    write(folder, map(step, range(51, 101)), "a")
    assert store.update(60)
    assert store.summary()["num_steps"] == 100
    assert store._index._temporary is None


def test_an_index_of_another_version_is_made_anew(tmp_path, monkeypatch, open_store):
    folder = small(tmp_path)
    version = open_store(folder).version
    monkeypatch.setattr(index, "VERSION", index.VERSION + 1)
    store = open_store(folder, takes_all=False)
    assert store.summary()["num_steps"] == 0
    assert store.update(60)
    assert store.summary()["num_steps"] == 50
    assert store.version > version


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_an_index_that_is_no_file_is_left_alone(tmp_path, open_store, kind):
    folder, path = small(tmp_path), tmp_path / "run" / ".index-00000.sqlite"
    outside = tmp_path / "outside"
    outside.write_text("precious")
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(outside)
    store = open_store(folder)
    assert store.summary()["num_steps"] == 50
    place = Path(store._index._temporary.name)
    assert place.is_dir()
    store.close()
    assert not place.exists()
    assert outside.read_text() == "precious"
    assert path.is_dir() if kind == "folder" else path.is_symlink()


def test_an_index_that_is_deleted_is_made_anew(tmp_path, open_store):
    folder = small(tmp_path)
    store = open_store(folder)
    (folder / ".index-00000.sqlite").unlink()
    assert store.update(60)
    assert store.summary()["num_steps"] == 50
    assert (folder / ".index-00000.sqlite").exists()


def test_an_index_that_another_process_has_half_made_anew_is_not_all(tmp_path, open_store):
    folder = write(tmp_path / "run", [run(), *map(step, range(1, 8_001))])
    store, other = open_store(folder), open_store(folder)
    with other._index.transaction(writes=True) as db:
        other._index.clear(db)
    assert not other.update(0.0)
    assert store.summary()["num_steps"] < 8_000
    assert store.update(60)
    assert store.summary()["num_steps"] == 8_000


def test_a_full_disk_leaves_the_index_in_memory(tmp_path, monkeypatch, open_store):
    folder = small(tmp_path)
    store = open_store(folder, takes_all=False)
    opened = index.Index._open

    def full(self, place):
        db = opened(self, place)
        if place != ":memory:":
            db.execute("PRAGMA max_page_count = 30")
        return db

    store._index._db.execute("PRAGMA max_page_count = 30")
    monkeypatch.setattr(index.Index, "_open", full)
    write(folder, map(step, range(51, 3001)), "a")
    assert store.update(60)
    assert store.summary()["num_steps"] == 3000
    assert store._index._db.execute("PRAGMA database_list").fetchone()[2] == ""


def test_an_index_that_stays_locked_is_left_alone(tmp_path, monkeypatch, open_store):
    monkeypatch.setattr(index, "LOCKED_S", 0.05)
    folder = small(tmp_path)
    store = open_store(folder)
    other = sqlite3.connect(folder / ".index-00000.sqlite", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    file = os.stat(folder / ".index-00000.sqlite").st_ino
    write(folder, [step(51)], "a")
    assert store.update(60)
    assert os.stat(folder / ".index-00000.sqlite").st_ino == file
    assert store._index._temporary is not None
    assert store.summary()["num_steps"] == 51
    other.execute("ROLLBACK")
    other.close()
    assert open_store(folder).summary()["num_steps"] == 51


@pytest.mark.parametrize("how", ["shorter", "other", "longer"])
def test_a_log_that_is_another_is_read_anew(tmp_path, open_store, how):
    folder = small(tmp_path)
    store = open_store(folder)
    version = store.version
    count = {"shorter": 20, "other": 50, "longer": 80}[how]
    write(folder, [run("z"), *(step(n, loss=3.0) for n in range(1, count + 1))])
    os.utime(folder / "rank-00000.jsonl", (1, 1))
    assert store.update(60)
    summary = store.summary()
    assert (summary["num_steps"], summary["session"], summary["loss"]) == (count, "z", 3.0)
    assert store.version > version


def test_a_log_that_is_gone_is_one_clear_line(tmp_path, open_store):
    folder = small(tmp_path)
    store = open_store(folder)
    os.rename(folder, tmp_path / "away")
    with pytest.raises(HalfstepError, match=r"log .*rank-00000\.jsonl: it is not there, or not any more\. ") as raised:
        store.update()
    assert "\n" not in str(raised.value)
    with pytest.raises(HalfstepError, match="not there"):
        Store(folder)
    write(tmp_path / "run", [run(), step(1)])
    assert store.update(60)
    assert store.summary()["num_steps"] == 1


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_log_that_is_no_file_is_not_opened(tmp_path, kind):
    folder = tmp_path / "run"
    folder.mkdir()
    if kind == "link":
        (folder / "rank-00000.jsonl").symlink_to(small(tmp_path / "outside") / "rank-00000.jsonl")
    else:
        os.mkfifo(folder / "rank-00000.jsonl")
    with pytest.raises(HalfstepError, match="it is no regular file"):
        Store(folder)
    assert not (folder / ".index-00000.sqlite").exists()


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_log_that_is_swapped_while_it_is_looked_at_is_not_followed(tmp_path, monkeypatch, open_store, kind):
    folder = small(tmp_path)
    store, log = open_store(folder), folder / "rank-00000.jsonl"
    os.rename(log, tmp_path / "log")
    if kind == "link":
        log.symlink_to(tmp_path / "log")
    else:
        os.mkfifo(log)
    monkeypatch.setattr(store, "_stamp", lambda: (0, 0, 0, 0))  # as if it had been a file until now
    faults = []

    def look():
        try:
            store.update(60)
        except HalfstepError as error:
            faults.append(str(error))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(5)
    if is_held := thread.is_alive():
        os.close(os.open(log, os.O_RDWR | os.O_NONBLOCK))  # let it go
    assert not is_held
    assert "it cannot be read (" in faults[0]
    assert ("it is no file" in faults[0]) == (kind == "pipe")


def test_stores_in_threads_have_one_index(tmp_path, open_store):
    """Six threads with three stores bring in one log while it is written and goes back."""
    entries = random_log(7, 1500)
    folder = write(tmp_path / "run", entries[:10])
    stores = [open_store(folder, takes_all=False) for _ in range(3)]
    is_written, faults = threading.Event(), []

    def look(store):
        try:
            while not is_written.is_set():
                store.update(0.01)
                series = store.series(METRICS, None, None, 20)["scale"]
                assert series["steps"] == sorted({*series["steps"]})
                assert store.summary()["num_steps"] > 0 or not series["steps"]
        except Exception as fault:
            faults.append(fault)

    threads = [threading.Thread(target=look, args=(store,)) for store in stores * 2]
    for thread in threads:
        thread.start()
    for start in range(10, len(entries), 100):
        write(folder, entries[start : start + 100], "a")
        time.sleep(0.01)
    is_written.set()
    for thread in threads:
        thread.join()
    assert not faults
    alone = open_store(write(tmp_path / "alone" / "run", entries))
    for store in stores:
        assert store.update(60)
        assert answers(store) == answers(alone)
        assert store._index._temporary is None
    assert ask_index(folder, "PRAGMA integrity_check") == "ok"


class TestState:
    HERE = RunStart(time=0.0, host=platform.node(), pid=os.getpid()).to_entry()

    def test_ended(self):
        finished = run_state.state_of(self.HERE, {"kind": "end", "state": "finished"}, True, 1e9, 0.1)
        assert finished[0] == "finished"
        failed = run_state.state_of(self.HERE, {"kind": "end", "state": "failed", "reason": "inf"}, False, None, None)
        assert failed == ("failed", "inf")

    def test_lost_when_the_process_of_this_host_is_gone(self):
        process = subprocess.Popen([sys.executable, "-S", "-c", ""])
        process.wait()
        gone = {**self.HERE, "pid": process.pid}
        assert run_state.state_of(gone, None, True, 0.0, 0.1) == (
            "lost",
            f"process {process.pid} is gone and wrote no end",
        )
        assert run_state.state_of({**gone, "host": "elsewhere"}, None, True, 0.0, 0.1)[0] == "running"

    @pytest.mark.parametrize("pid", [pytest.param(os.getpid(), id="own"), 1, 0, -1, -999_999, None, 2**80])
    def test_a_process_that_lives_or_cannot_be_told_is_not_lost(self, pid):
        assert run_state.state_of({**self.HERE, "pid": pid}, None, True, 0.0, 0.1)[0] == "running"

    def test_a_process_of_somebody_else_is_not_lost(self, monkeypatch):
        def refuse(pid, signal):
            raise PermissionError

        monkeypatch.setattr(os, "kill", refuse)
        assert run_state.state_of(self.HERE, None, True, 0.0, 0.1)[0] == "running"

    def test_windows_is_not_asked(self, monkeypatch):
        monkeypatch.setattr(os, "name", "nt")
        monkeypatch.setattr(os, "kill", None)
        assert run_state.state_of(self.HERE, None, True, 0.0, 0.1)[0] == "running"

    @pytest.mark.parametrize(
        ("silent_s", "pause_s", "state"),
        [(59, 0.1, "running"), (61, 0.1, "stalled"), (199, 10.0, "running"), (201, 10.0, "stalled")],
    )
    def test_stalled_after_20_usual_pauses_and_a_minute(self, silent_s, pause_s, state):
        assert run_state.state_of(self.HERE, None, True, silent_s, pause_s)[0] == state

    def test_nothing_is_known(self):
        assert run_state.state_of(None, None, False, None, None)[0] == "empty"
        assert run_state.state_of(None, None, True, None, None)[0] == "running"

    def test_the_first_of_the_states_are_the_worst(self):
        assert run_state.STATES == ("failed", "lost", "stalled", "running", "finished", "empty", "reading")
        assert set(run_state.ENDED) < set(run_state.STATES)

    def test_limits_of_the_settings(self):
        limits = {"factor": 2.0, "seconds": 5.0}
        assert run_state.state_of(None, None, True, 6.0, 1.0, limits) == ("stalled", "no entry for more than 5 s")
        assert run_state.state_of(None, None, True, 6.0, 4.0, limits)[0] == "running"

    def test_an_unknown_pause_is_given_ten_minutes(self, tmp_path, monkeypatch, open_store):
        now = time.time()
        slow = [step(n, time=now + 90.0 * n) for n in range(1, 3)]
        store = open_store(write(tmp_path / "run", [run(), *slow]))
        assert store.summary()["seconds"] is None
        for silent_s, state in ((599.0, "running"), (601.0, "stalled")):
            monkeypatch.setattr(time, "time", lambda silent_s=silent_s: now + 180.0 + silent_s)
            store.update()
            assert store.summary()["state"] == state

    def test_the_alert_of_a_silent_run_is_no_sign_of_life(self, tmp_path, monkeypatch, open_store):
        now = time.time()
        silence = {**alert(4), "rule": "stalled", "time": now + 61.0}
        store = open_store(write(tmp_path / "run", [run(), *(step(n, time=now) for n in range(1, 5)), silence]))
        monkeypatch.setattr(time, "time", lambda: now + 62.0)
        assert store.update()
        assert store.summary()["state"] == "stalled"
        assert store.summary()["updated"] == now

    def test_a_state_that_time_alone_changes_is_a_new_version(self, tmp_path, monkeypatch, open_store):
        now = time.time()
        folder = write(tmp_path / "run", [run(), *(step(n, time=now + n * 0.1) for n in range(1, 5))])
        store = open_store(folder)
        version = store.version
        assert store.summary()["state"] == "running"
        monkeypatch.setattr(time, "time", lambda: now + 100.0)
        assert store.update()
        assert store.version > version
        assert store.summary()["state"] == "stalled"
