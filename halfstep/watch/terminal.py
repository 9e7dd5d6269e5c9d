"""A run in the terminal: how it stands, its loss, gradient norm and loss scale, and its last alerts."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from halfstep.watch.entry import Entry
from halfstep.watch.run_state import STATES
from halfstep.watch.store import Store
from halfstep.watch.terminal_chart import LABEL, Chart, Mark, number_text, word_of

EVERY_S = 1.0
"""Between two looks at the log."""
_STATES = dict(zip(STATES, ("bold red", "bold red", "yellow", "green", "cyan", "", ""), strict=True))
_SEVERITIES = {"error": "bold red", "warning": "yellow"}
_NUM_ALERTS = 5
_PLAIN_HEIGHT = 19
"""Lines of the charts in a frame that is printed."""
_WIDE = 72
"""Characters from which on two charts fit side by side."""
_GLUE = "\u00a0"
"""Keeps a number beside its name when a line is wrapped."""
Wait = Callable[[float], bool]


def show(folder: Path, rank: int = 0, once: bool = False) -> None:
    """Show the log of ``rank`` until the key q, or Ctrl-C; one frame if ``once``, or if this is no terminal.

    HalfstepError when there is no log, or no longer.
    """
    console = Console()
    store = Store(folder, rank)
    try:
        if once or not console.is_terminal or console.is_dumb_terminal:
            while not store.update():
                pass
            for line in frame(View.read(store, 2 * console.width, True), console):
                line.rstrip()
                console.print(line)
            return
        with _keys() as wait:
            follow(store, console, wait)
    finally:
        store.close()


def follow(store: Store, console: Console, wait: Wait) -> None:
    """Draw the run whenever it changes, until ``wait`` says that it is enough after so many seconds."""
    drawn = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            is_complete = store.update()
            width, height = console.size
            if (shown := (store.version, width, height, is_complete)) != drawn:
                drawn = shown
                lines = frame(View.read(store, 2 * width, is_complete), console, height)
                live.update(Group(*lines), refresh=True)
            if wait(EVERY_S if is_complete else 0.0):
                return


@dataclass(frozen=True)
class View:
    """What a frame shows: the answers of a Store. is_complete: whether it has read the whole log."""

    run: dict[str, Any]
    series: dict[str, Any]
    marks: dict[str, list[list[int]]]
    alerts: Sequence[Entry]
    is_complete: bool

    @classmethod
    def read(cls, store: Store, points: int, is_complete: bool) -> View:
        run = store.summary()
        first, last = run["first_step"], run["last_step"]  # another process may take in more meanwhile
        return cls(
            run,
            store.series(("loss", "grad_norm", "scale", "memory_mib"), first, last, points),
            store.marks(first, last, points),
            store.entries(("alert",), limit=_NUM_ALERTS),
            is_complete,
        )


def frame(view: View, console: Console, height: int | None = None) -> list[Text]:
    """The lines of a frame: ``height`` at most, texts cut and charts as large as there is room. None cuts nothing."""
    most = None if height is None else max(1, height // 24)
    top = [*_head(view.run, console, most), *_cut(_numbers(view), console, None)]
    alerts = [line for entry in reversed(view.alerts) for line in _alert(entry, console, most and most + 1)]
    if height is None:
        lines = [*top, Text(), *_charts(view, console, _PLAIN_HEIGHT), Text(), *alerts]
    else:
        # The lowest line stays free: a screen that is full may scroll.
        alerts = alerts[: max(2, height // 4)]
        charts = _charts(view, console, height - 1 - len(top) - len(alerts))
        lines = [*top, *charts, *alerts][: height - 1]
    for line in lines:  # a sign that the terminal does not know must not end the view
        line.plain = line.plain.replace(_GLUE, " ").encode(console.encoding, "replace").decode(console.encoding)
    return lines


def _head(run: Mapping[str, Any], console: Console, most: int | None) -> list[Text]:
    """How the run stands, and what it is."""
    state = Text.assemble(
        (_plain(run["name"]), "bold"), "  ", (run["state"], _STATES.get(run["state"], "")), f"  {_plain(run['why'])}"
    )
    policy, effective = run["policy"] or "policy unknown", run["effective"]
    in_effect = f"in effect {effective}" if effective and effective != policy else None
    about = (policy, in_effect, run["device"], f"rank {run['rank']} of {run['num_ranks'] or 1}")
    text = ", ".join(_plain(part) for part in about if part)
    if run["reason"]:
        text += f": {_plain(run['reason'])}"
    return [*_cut(state, console, most), *_cut(Text(text, "dim"), console, most)]


def _numbers(view: View) -> Text:
    run, memory = view.run, view.series["memory_mib"]["values"]
    pairs = [
        ("step", run["last_step"]),
        ("loss", run["loss"]),
        ("gradient norm", run["grad_norm"]),
        ("scale", run["scale"]),
        ("skipped", run["num_skipped"]),
        ("replays", run["num_replays"]),
        ("steps/s", 1 / run["seconds"] if run["seconds"] else None),
        ("memory", _memory_text(memory[-1]) if memory else None),
        ("alerts", run["num_alerts"]),
    ]
    numbers = Text()
    for name, value in pairs:
        is_bad = value in ("NaN", "Infinity", "-Infinity") or (value and name in ("skipped", "alerts"))
        number = "?" if value is None else number_text(value) if isinstance(value, float) else word_of(str(value))
        numbers.append(f"{name} ".replace(" ", _GLUE), "dim")
        numbers.append(number.replace(" ", _GLUE), "bold red" if is_bad else "bold")
        numbers.append("   ")
    if not view.is_complete:
        numbers.append("reading the log", "yellow")
    return numbers


def _memory_text(mib: float) -> str:
    return f"{mib:.0f} MiB" if mib < 1024 else f"{mib / 1024:.4g} GiB"


def _charts(view: View, console: Console, height: int) -> list[Text]:
    """The charts in ``height`` lines: under each other, or the lower two side by side where it is wide."""
    run, width, is_ascii = view.run, console.width, console.options.ascii_only
    if run["last_step"] is None or height < 4:
        return []
    first, last = run["first_step"], run["last_step"]
    skips, replays = ([step for step, _ in view.marks[name]] for name in ("skips", "replays"))
    marks = [Mark("skipped", "s", "bold red", skips), Mark("replayed", "r", "yellow", replays)]
    loss = Chart("loss", view.series["loss"], first, last)
    norm = Chart("gradient norm", view.series["grad_norm"], first, last)
    scale = Chart("loss scale", view.series["scale"], first, last, marks)
    if width >= _WIDE and height >= 9:
        half, upper = (width - 2) // 2, height // 2
        lower = height - 1 - upper
        left, right = norm.lines(half, lower, is_ascii), scale.lines(half, lower, is_ascii)
        pairs = [_padded(a, half + 2).append_text(b) for a, b in zip(left, right, strict=True)]
        ends = _axis(first, last, half)
        return [*loss.lines(width, upper, is_ascii), *pairs, _padded(ends, half + 2).append_text(ends)]
    charts = [loss, norm, scale][: max(1, (height - 1) // 3)]
    sizes = [(height - 1 + place) // len(charts) for place in range(len(charts))]
    lines = [line for chart, size in zip(charts, sizes, strict=True) for line in chart.lines(width, size, is_ascii)]
    return [*lines, _axis(first, last, width)]


def _axis(first: int, last: int, width: int) -> Text:
    """The steps under the ends of a chart."""
    start, end = f"step {first}", str(last)
    return Text(" " * LABEL + start + end.rjust(max(len(end) + 1, width - LABEL - len(start))), "dim")


def _alert(entry: Entry, console: Console, most: int | None) -> list[Text]:
    severity = str(entry.get("severity"))
    about = f"{severity}, step {entry.get('step')}, rank {entry.get('rank')}: {entry.get('rule')}"
    message = Text.assemble((_plain(about), _SEVERITIES.get(severity, "bold")), f"  {_plain(entry.get('message'))}")
    return [*_cut(message, console, most), *_cut(Text(f"  {_plain(entry.get('action'))}", "dim"), console, most)]


def _cut(text: Text, console: Console, most: int | None) -> list[Text]:
    """The lines of ``text``, wrapped, and cut to ``most``."""
    lines = list(text.wrap(console, console.width))
    if most is not None and len(lines) > most:
        lines = lines[:most]
        lines[-1].truncate(max(1, console.width - 3))
        lines[-1].append("...")
    return lines


def _padded(text: Text, width: int) -> Text:
    padded = text.copy()
    padded.truncate(width, pad=True)
    return padded


def _plain(value: object) -> str:
    """``value`` without the signs that would steer a terminal."""
    return "".join(sign if sign.isprintable() else " " for sign in str(value))


@contextlib.contextmanager
def _keys() -> Iterator[Wait]:
    """Gives a function that waits some seconds, and says whether the key q was pressed."""
    try:
        import termios
        import tty

        handle = sys.stdin.fileno()
        before = termios.tcgetattr(handle)
    except (ImportError, OSError, ValueError):  # not on this system, or the input is no terminal
        yield _sleep
        return
    tty.setcbreak(handle)
    try:
        yield lambda seconds: _is_pressed(handle, seconds)
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _is_pressed(handle: int, seconds: float) -> bool:
    if not select.select([handle], [], [], seconds)[0]:
        return False
    key = os.read(handle, 1)
    return key in (b"q", b"Q", b"")  # the last: the terminal is gone
