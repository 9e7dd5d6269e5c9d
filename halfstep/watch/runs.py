"""The runs in a folder, by their names; nothing outside it is ever looked into."""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from halfstep.errors import HalfstepError, and_more

DEPTH = 4
"""Folders that a run may lie deep."""
KEPT_S = 2.0
"""Seconds in which many folders are not looked through once more."""
_MANY = 256
_RANK = re.compile(r"rank-\d{5,}\.jsonl")
_DRIVE = re.compile("[A-Za-z]:")


class Runs:
    """The runs in ``folder``: every folder that holds the log of a rank. HalfstepError where there is no such folder.

    The name of a run is its path in the folder, with slashes; the folder itself, when it is a run, has its own name. A
    link on the way to a run, or in place of a log, is not followed, wherever it leads. Any thread may ask.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).resolve()
        if not self._folder.is_dir():
            raise _no_folder(self._folder)
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._until = 0.0  # by time.monotonic(), and until then the names are as they were

    def names(self) -> list[str]:
        """Sorted. A folder that cannot be read, or whose name no page could ask for, is left out.

        Of more than a few hundred folders it is what was found KEPT_S seconds ago at most.
        """
        if not self._folder.is_dir():
            raise _no_folder(self._folder)
        with self._lock:
            if time.monotonic() >= self._until:
                found = list(_walk(self._folder, self._folder.name, "", 0))
                self._names = sorted({name for name, is_run in found if is_run})
                self._until = time.monotonic() + KEPT_S if len(found) > _MANY else 0.0
            return self._names.copy()

    def folder_of(self, name: str) -> Path:
        """The folder of a run. HalfstepError for a name that leads elsewhere, or to no run."""
        parts = name.split("/")
        if not all(map(_is_plain, parts)):
            raise HalfstepError(f"run {name!r}", "no run has such a name", "Choose one of the list.")
        folder = self._folder.joinpath(*parts)
        if len(parts) <= DEPTH and self._is_inside(folder) and _is_run(folder):
            return folder
        if name == self._folder.name and _is_run(self._folder):
            return self._folder
        raise HalfstepError(f"run {name!r}", "there is no such run, or not any more", "Choose one of the list.")

    def _is_inside(self, folder: Path) -> bool:
        """Whether every part of the way is a folder and none a link."""
        way = [folder, *folder.parents]
        return all(map(_is_folder, way[: way.index(self._folder)])) and folder.resolve().is_relative_to(self._folder)


def _walk(folder: Path | str, own_name: str, prefix: str, depth: int) -> Iterator[tuple[str, bool]]:
    """The name of a folder and of those below, and whether each is a run."""
    try:
        with os.scandir(folder) as listing:
            entries = list(listing)
    except OSError:
        return
    yield own_name, _is_run_of(entries)
    if depth == DEPTH:
        return
    for entry in entries:
        if _is_plain(entry.name) and entry.is_dir(follow_symlinks=False):
            name = prefix + entry.name
            yield from _walk(entry.path, name, name + "/", depth + 1)


def _is_run(folder: Path) -> bool:
    try:
        with os.scandir(folder) as listing:
            return _is_run_of(list(listing))
    except OSError:
        return False


def _is_run_of(entries: list[os.DirEntry[str]]) -> bool:
    """Whether a folder with these entries is a run: it has logs, and they are regular files."""
    logs = [entry for entry in entries if _RANK.fullmatch(entry.name)]
    return bool(logs) and all(entry.is_file(follow_symlinks=False) for entry in logs)


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def _is_plain(part: str) -> bool:
    """Whether a name stands for a folder in a folder, on every system, and can be shown: one of a run can have it."""
    if not part or part.startswith(".") or "\\" in part or "/" in part or _DRIVE.match(part):
        return False
    return not any(ord(letter) < 32 or 127 <= ord(letter) < 160 or 0xD800 <= ord(letter) < 0xE000 for letter in part)


def _no_folder(folder: Path) -> HalfstepError:
    return HalfstepError(f"folder {folder}", "it is not there, or is no folder", "Name the folder of your runs.")


def no_run(folder: str | os.PathLike[str]) -> HalfstepError:
    """The error for a ``folder`` that should be of a run; where it holds runs it names them."""
    try:
        names = [name for name in Runs(folder).names() if Path(folder, name).is_dir()]  # not the folder itself
    except HalfstepError:
        names = []
    fix = f"Name a run in it: {and_more(names)}." if names else "Name the folder of a run, as in Stepper(log=...)."
    return HalfstepError(f"run {folder}", "it holds no log, rank-00000.jsonl, with entries in it", fix)
