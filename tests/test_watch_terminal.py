"""The view of a run in a terminal: its numbers and alerts, nothing masked, at any size, while the run writes."""

from __future__ import annotations

import json
import math
import os
import platform
import pty
import random
import select
import subprocess
import sys
from io import StringIO

import pytest
from rich.console import Console

from halfstep.errors import HalfstepError
from halfstep.watch.entry import RunStart, Step
from halfstep.watch.store import Store
from halfstep.watch.terminal import View, follow, frame, show
from halfstep.watch.terminal_chart import LABEL, Chart, Mark

ALERT = {
    "kind": "alert",
    "time": 41.0,
    "rule": "loss-spike",
    "step": 40,
    "severity": "warning",
    "message": "the loss rose to 9.7, \x1b[31m62 spreads above its median",
    "action": "Look at the batch of this step.",
    "rank": 0,
}


def step(number, loss=None, **kwargs):
    loss = 2.0 + 1.0 / number if loss is None else loss
    return Step(number, 0.5 * number, loss, kwargs.pop("norm", 1.25), memory_mib=2048.0, **kwargs).to_entry()


def write(folder, *entries):
    folder.mkdir(exist_ok=True)
    with open(folder / "rank-00000.jsonl", "a") as file:
        file.writelines(json.dumps(entry, allow_nan=False) + "\n" for entry in entries)


def start(**kwargs):
    info = {"requested": "auto", "effective": "fp16", "reason": "it has tensor cores", "device": "A card"}
    return RunStart(
        0.0, num_ranks=4, host=platform.node(), pid=os.getpid(), policy="auto", info={**info, **kwargs}
    ).to_entry()


@pytest.fixture
def folder(tmp_path):
    """A run of 50 steps with a spike, a step of NaN, skips, and an alert."""
    run = tmp_path / "charlm"
    steps = [step(n) for n in range(1, 51)]
    steps[39] = step(40, 9.7)
    steps[29] = step(30, math.nan, norm=math.inf, scale=32768.0, applied=False, reason="nan")
    steps[9] = step(10, num_replays=3)
    write(run, start(), *steps, ALERT)
    return run


def console(width=80, height=24, **kwargs):
    return Console(file=StringIO(), width=width, height=height, force_terminal=True, color_system=None, **kwargs)


def lines_of(folder, to, height=None):
    store = Store(folder)
    try:
        assert store.update(10)
        return [line.plain for line in frame(View.read(store, 2 * to.width, True), to, height)]
    finally:
        store.close()


def test_a_frame_has_the_numbers_the_marks_and_the_alert(folder):
    lines = lines_of(folder, console())
    text = "\n".join(lines)
    assert lines[0].startswith("charlm  stalled  no entry for more than 60 s")
    assert lines[1].startswith("auto, in effect fp16, A card, rank 0 of 4: it has tensor cores")
    numbers = " ".join(" ".join(lines[2:4]).split())
    assert numbers.startswith("step 50 loss 2.02 gradient norm 1.25 scale 1 skipped 1 replays 3 steps/s 2 memory 2 GiB")
    assert "loss  x NaN" in text
    assert "gradient norm  x inf" in text
    assert "s skipped" in text
    assert "9.7" in text
    assert "warning, step 40, rank 0: loss-spike  the loss rose to 9.7,  [31m62 spreads" in text
    assert "  Look at the batch of this step." in lines
    assert "\x1b" not in text


@pytest.mark.parametrize("size", [(80, 24), (200, 50), (40, 30), (20, 12), (10, 5), (1, 2)])
def test_a_frame_fits_any_size(folder, size):
    width, height = size
    to = console(width, height)
    lines = lines_of(folder, to, height)
    assert len(lines) < height
    to.print(*lines, sep="\n", soft_wrap=True)
    if width >= 20:
        assert max(map(len, lines)) <= width


def test_the_whole_screen_is_used_with_all_three_charts(folder):
    lines = lines_of(folder, console(), 24)
    assert len(lines) == 23
    text = "\n".join(lines)
    assert [title in text for title in ("loss", "gradient norm", "loss scale")] == [True] * 3


def test_a_terminal_without_such_signs_gets_plain_ones(folder):
    to = console()
    to.file = type("Latin", (StringIO,), {"encoding": "ascii"})()
    text = "\n".join(lines_of(folder, to))
    assert text.isascii()
    assert ":" in text


def test_a_run_without_steps_and_without_a_start_has_a_frame(tmp_path):
    write(tmp_path / "a", start(effective=None, reason=None, device=None))
    assert lines_of(tmp_path / "a", console(), 24)[:2] == ["a  empty  no step has ended yet", "auto, rank 0 of 4"]
    write(tmp_path / "b", step(1))
    assert "policy unknown, rank 0 of 1" in lines_of(tmp_path / "b", console())


def test_the_live_view_shows_what_arrives_and_a_new_size(folder):
    to, store = console(), Store(folder)
    pauses, seen = [], []

    def wait(seconds):
        pauses.append(seconds)
        seen.append(to.file.getvalue())
        to.file.truncate(0)
        if len(pauses) == 1:
            write(folder, step(51, math.inf), {**ALERT, "step": 51, "message": "a new one"})
        elif len(pauses) == 3:
            to.size = (100, 30)
        return len(pauses) == 4

    follow(store, to, wait)
    store.close()
    assert pauses == [1.0] * 4
    assert "step 50" in seen[0]
    assert "step 51   loss inf" in seen[1]
    assert "a new one" in seen[1]
    assert seen[2].strip("\0") == ""  # nothing is drawn while nothing changes
    assert "step 51" in seen[3]


def test_a_run_that_vanishes_ends_the_view_with_one_line(folder):
    store = Store(folder)

    def wait(_):
        (folder / "rank-00000.jsonl").unlink()
        return False

    with pytest.raises(HalfstepError, match="not any more"):
        follow(store, console(), wait)
    store.close()
    with pytest.raises(HalfstepError, match="it is not there"):
        show(folder)


def test_where_there_is_no_terminal_a_frame_is_printed(folder, capsys):
    show(folder)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("charlm  stalled")
    assert lines[-1] == "  Look at the batch of this step."
    assert all(line == line.rstrip() and line.isprintable() for line in lines)


def test_the_key_q_ends_it_and_the_terminal_is_as_before(folder):
    ours, theirs = pty.openpty()
    code = "import pathlib, sys; from halfstep.watch.terminal import show; show(pathlib.Path(sys.argv[1]))"
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, folder], stdin=theirs, stdout=theirs, stderr=theirs, env=environ
    )
    text = b""
    while b"Look at" not in text and select.select([ours], [], [], 20)[0]:
        text += os.read(ours, 65536)
    os.write(ours, b"x")
    assert not select.select([ours], [], [], 0.1)[0]
    os.write(ours, b"q")
    while process.poll() is None or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.02)[0]:
            text += os.read(ours, 65536)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 0
    assert text.index(b"\x1b[?1049h") < text.index(b"Look at") < text.index(b"\x1b[?1049l")


def dots(lines):
    """The dots of a chart, as (column, row from above)."""
    bits = {(0, 0): 0, (0, 1): 1, (0, 2): 2, (1, 0): 3, (1, 1): 4, (1, 2): 5, (0, 3): 6, (1, 3): 7}
    return {
        (2 * x + dx, 4 * y + dy)
        for y, line in enumerate(lines)
        for x, sign in enumerate(line.plain[LABEL:])
        for (dx, dy), bit in bits.items()
        if ord(sign) >= 0x2800 and (ord(sign) - 0x2800) >> bit & 1
    }


@pytest.mark.parametrize("is_log", [False, True])
def test_every_value_has_its_dot(is_log):
    rng = random.Random(1)
    steps = sorted(rng.sample(range(100, 1100), 60))
    values = [math.exp(rng.gauss(0, 3)) if is_log else rng.gauss(0, 1) for _ in steps]
    chart = Chart("loss", {"steps": steps, "values": values, "nonfinite": []}, 100, 1100)
    drawn = dots(chart.lines(LABEL + 50, 11)[1:])
    heights = [math.log(value) for value in values] if is_log else values
    for number, height in zip(steps, heights, strict=True):
        across = round((number - 100) / 1000 * 99)
        down = (max(heights) - height) / (max(heights) - min(heights)) * 39
        assert {(across, math.floor(down + 0.499)), (across, math.ceil(down - 0.499))} & drawn
    assert {y for _, y in drawn} == set(range(40))
    assert ("(log)" in chart.lines(80, 11)[0].plain) == is_log


def test_a_line_does_not_cross_a_step_that_was_not_finite():
    series = {"steps": [1, 2, 100, 101], "values": [1.0, 1.0, 2.0, 2.0], "nonfinite": [[50, "NaN"]]}
    across = {x for x, _ in dots(Chart("loss", series, 1, 101).lines(LABEL + 101, 6)[1:])}
    assert not across & set(range(10, 190))
    whole = {x for x, _ in dots(Chart("loss", {**series, "nonfinite": []}, 1, 101).lines(LABEL + 101, 6)[1:])}
    assert whole >= set(range(10, 190))


def test_marks_stand_under_their_steps():
    series = {"steps": [1, 101], "values": [1.7e308, -1.7e308], "nonfinite": [[51, "-Infinity"]]}
    marks = [Mark("skipped", "s", "red", [1, 51]), Mark("replayed", "r", "yellow", [101])]
    title, *chart, row = Chart("loss", series, 1, 101, marks).lines(LABEL + 101, 6)
    assert {y for _, y in dots(chart)} == {0, 15}
    assert title.plain == "loss  x -inf  s skipped  r replayed"
    assert row.plain[LABEL:] == "s" + " " * 49 + "x" + " " * 49 + "r"
