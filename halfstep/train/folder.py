"""The folder of a training job: its log, its checkpoints, and at the end the model."""

from __future__ import annotations

import os
import re
from pathlib import Path

from halfstep.errors import HalfstepError
from halfstep.train.settings import Settings

_RUNS = Path("runs")
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def folder_of(settings: Settings) -> Path:
    """Where the job writes. Without --output a new folder in ``runs``, or with --resume the last one.

    HalfstepError where a run is there already that is not to be resumed, or where none is.
    """
    if settings.output is not None:
        folder = Path(settings.output)
        _check_writable(folder)
        if not settings.resume and folder.is_dir() and any(folder.iterdir()):
            raise HalfstepError(
                f"output {folder}", "it is not empty", "Use --resume to go on, or name another --output."
            )
        return folder
    name = f"{settings.task}-{Path(settings.model).name}"
    taken: list[Path] = []
    while (folder := _RUNS / (f"{name}-{len(taken) + 1}" if taken else name)).exists():
        taken.append(folder)
    return taken[-1] if settings.resume and taken else folder


def _check_writable(folder: Path) -> None:
    """HalfstepError where the folder cannot be made or written in, before hours are spent on data."""
    there = folder
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    if not there.is_dir():
        what = "it" if there == folder else str(there)
        kind = "is a file" if there.exists() else "is a link to nothing"
        raise HalfstepError(f"output {folder}", f"{what} {kind}", "Name a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        what = "it" if there == folder else str(there)
        raise HalfstepError(f"output {folder}", f"{what} cannot be written in", "Name a folder that can.")


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def last_checkpoint(folder: Path) -> Path:
    """The checkpoint of the highest step. HalfstepError where there is none."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if (match := _CHECKPOINT.fullmatch(path.name)) and path.is_dir():
            found[int(match[1])] = path
    if not found:
        raise HalfstepError(
            f"resume of {folder}",
            "there is no checkpoint in it",
            "Begin anew with another --output." if folder.is_dir() else "Leave --resume out, or name its --output.",
        )
    return found[max(found)]
