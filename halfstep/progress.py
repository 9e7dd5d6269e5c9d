"""How a command shows on standard error how far it is: a bar on a terminal, lines in a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from halfstep import job


@contextmanager
def bar(total: int) -> Iterator[Callable[..., None]]:
    """A progress bar on standard error of a terminal. What it gives sets its text and moves it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    is_seen = console.is_interactive and job.current.speaks
    shown = Progress(*columns, console=console, transient=True, disable=not is_seen)
    task = shown.add_task("", total=total)

    def advance(text: str, completed: int | None = None, total: int | None = None) -> None:
        shown.start()  # here, so that a call that is refused shows no bar
        step = 1 if completed is None else None
        shown.update(task, advance=step, completed=completed, total=total, description=text)

    try:
        yield advance
    finally:
        if shown.live.is_started:
            shown.stop()


def lines() -> Callable[[str, int, int | None], None]:
    """For a run of hours whose standard error is a file: a line for each new text, by the rank that speaks."""
    last = ""

    def show(text: str, step: int, total: int | None) -> None:
        nonlocal last
        if text != last and job.current.speaks:
            print(f"step {step} of {total}: {text}" if step else text, file=sys.stderr)
        last = text

    return show
