"""Which files a run looks at: those named, and in directories those that git would see and that may hold a mistake."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from halfstep.errors import HalfstepError
from halfstep.lint.config import FORMATS, MARKS
from halfstep.lint.ignore import Ignore, enter, ignores_above, is_ignored

SUFFIXES = (".py", ".pyi", ".ipynb", ".json")
HISTORIES = {".bzr", ".git", ".git-rewrite", ".hg", ".svn"}
ENVIRONMENTS = {".direnv", ".nox", ".pyenv", ".tox", ".venv", "__pypackages__", "node_modules", "site-packages", "venv"}
BUILDS = {".eggs", ".pants.d", "_build", "buck-out", "build", "dist"}
CACHES = {
    ".halfstep_cache",
    ".ipynb_checkpoints",
    ".mypy_cache",
    ".pytest_cache",
    ".pytype",
    ".ruff_cache",
    ".vscode",
    "__pycache__",
}
SKIPPED = HISTORIES | ENVIRONMENTS | BUILDS | CACHES
"""Directories that hold no source of one's own; one of them is walked only when it is named."""
CONFIG_FORMAT, CONFIG_MARK = (re.compile(rf'"(?:{"|".join(sorted(keys))})"\s*:'.encode()) for keys in (FORMATS, MARKS))
MAX_CONFIG_BYTES = 2**18  # larger JSON is data; a DeepSpeed configuration has a few kB


@dataclass(frozen=True)
class Tree:
    """files: to look at, each once, in order. skipped: a line for each thing that could not be read."""

    files: tuple[str, ...]
    skipped: tuple[str, ...] = ()


def find_files(paths: Sequence[str | Path], exclude: Sequence[str] = (), root: str | Path = ".") -> Tree:
    """The files that ``paths`` name, and those beneath the directories among them.

    A file that is named is always looked at. Beneath a directory: Python, notebooks and JSON that looks like a
    DeepSpeed configuration, without what .gitignore files, ``.git/info/exclude`` and ``exclude`` (patterns as in a
    .gitignore that stands in ``root``) rule out, without :data:`SKIPPED` and virtual environments. A named directory
    is walked whatever is said about it. Links to files are followed, links to directories are not.

    Raises :class:`HalfstepError` for a path that does not exist.
    """
    files: dict[str, str] = {}  # by real path, since a file can have several names
    skipped: list[str] = []
    excluded = Ignore.of_lines(os.path.realpath(root), exclude)
    for path in paths:
        if os.path.isdir(path):
            for name, real in _walk(Path(path), excluded, skipped):
                files.setdefault(real, name)
        elif os.path.exists(path):
            files.setdefault(os.path.realpath(path), str(Path(path)))
        else:
            raise HalfstepError(
                f"path {path}", "there is no such file or directory", "Correct it, or name a directory to search."
            )
    return Tree(tuple(sorted(files.values())), tuple(skipped))


def _walk(top: Path, excluded: Ignore, skipped: list[str]) -> Iterator[tuple[str, str]]:
    """Name and real path of each file to look at beneath ``top``."""
    real_top = os.path.realpath(top)
    ignores = ignores_above(real_top)
    pending = [(top, real_top, ignores)]
    while pending:
        directory, real, above = pending.pop()
        try:
            entries = sorted(os.scandir(real), key=lambda entry: entry.name)
        except OSError as error:
            skipped.append(f"{directory} is left out: it cannot be read ({error.strerror})")
            continue
        names = {entry.name for entry in entries}
        if "pyvenv.cfg" in names and real != real_top:
            continue
        ignores = enter(real, above, names)
        for entry in entries:
            is_directory = entry.is_dir(follow_symlinks=False)
            if not is_directory and not entry.name.endswith(SUFFIXES):
                continue
            if is_directory and entry.name in SKIPPED:
                continue
            if is_ignored(entry.path, is_directory, ignores) or is_ignored(entry.path, is_directory, [excluded]):
                continue
            name = directory / entry.name
            if is_directory:
                pending.append((name, entry.path, ignores))
            elif entry.is_symlink() and not os.path.exists(entry.path):
                skipped.append(f"{name} is left out: it is a link that leads nowhere")
            elif entry.is_file() and (not entry.name.endswith(".json") or _may_be_config(entry.path)):
                yield str(name), os.path.realpath(entry.path) if entry.is_symlink() else entry.path


def _may_be_config(path: str) -> bool:
    try:
        if os.path.getsize(path) > MAX_CONFIG_BYTES:
            return False
        content = Path(path).read_bytes()
    except OSError:
        return False
    return bool(CONFIG_FORMAT.search(content) and CONFIG_MARK.search(content))
