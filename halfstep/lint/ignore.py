"""What git leaves out: the patterns of .gitignore files, and which of them hold in a directory."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Pattern:
    """One line of a .gitignore. ignores: False where the line begins with ``!``."""

    regex: re.Pattern[str]
    ignores: bool
    directories_only: bool


@dataclass(frozen=True)
class Ignore:
    """The patterns of one file, and the directory that they are about."""

    directory: str
    patterns: tuple[Pattern, ...]

    @classmethod
    def of_lines(cls, directory: str, lines: Sequence[str]) -> Ignore:
        return cls(directory, tuple(pattern for line in lines if (pattern := _pattern(line))))

    @classmethod
    def of_file(cls, directory: str, path: str) -> Ignore:
        return cls.of_lines(directory, _read(path).split("\n"))

    def verdict(self, path: str, is_directory: bool) -> bool | None:
        """Whether the last pattern that matches ``path`` itself ignores it; None if none matches."""
        relative = path.removeprefix(self.directory.rstrip(os.sep) + os.sep).replace(os.sep, "/")
        for pattern in reversed(self.patterns):
            if pattern.directories_only and not is_directory:
                continue
            match = pattern.regex.search(relative)
            # pathspec's one group marks a match of a directory above the path. Git asks that directory for itself.
            if match and match.lastgroup is None:
                return pattern.ignores
        return None


def _pattern(line: str) -> Pattern | None:
    if not line.strip() or line.startswith("#"):
        return None  # so that a tree without patterns does not load pathspec, 30 ms
    from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

    directories_only = line.rstrip().endswith("/")
    try:
        pattern = GitIgnoreSpecPattern(line.rstrip().rstrip("/") if directories_only else line)
    except (ValueError, re.error):
        return None  # as in git, a pattern that is none matches nothing
    if pattern.regex is None:
        return None
    return Pattern(pattern.regex, bool(pattern.include), directories_only)


def is_ignored(path: str, is_directory: bool, ignores: Sequence[Ignore]) -> bool:
    """The nearest file that has a pattern for ``path`` decides; the nearest stands last."""
    verdicts = (ignore.verdict(path, is_directory) for ignore in reversed(ignores))
    return next((verdict for verdict in verdicts if verdict is not None), False)


def enter(directory: str, above: list[Ignore], names: Collection[str]) -> list[Ignore]:
    """What holds in ``directory``, which holds ``names``: a repository of its own asks nobody above."""
    ignores = above
    if ".git" in names:
        ignores = [Ignore.of_file(directory, _exclude_file(os.path.join(directory, ".git")))]
    if ".gitignore" in names:
        ignores = [*ignores, Ignore.of_file(directory, os.path.join(directory, ".gitignore"))]
    return ignores


def ignores_above(directory: str) -> list[Ignore]:
    """What the directories above say about what is in ``directory``, from the root of its repository down.

    Outside of a repository nobody does. Nor do they where they rule out ``directory`` itself: who names it wants it.
    """
    chain = [directory, *map(str, Path(directory).parents)]
    root = next((at for at, path in enumerate(chain) if os.path.lexists(os.path.join(path, ".git"))), 0)
    ignores: list[Ignore] = []
    for at in range(root, 0, -1):
        path, child = chain[at], chain[at - 1]
        names = [name for name in (".git", ".gitignore") if os.path.lexists(os.path.join(path, name))]
        ignores = enter(path, ignores, names)
        if is_ignored(child, True, ignores):
            ignores = []
    return ignores


def _exclude_file(git: str) -> str:
    """``info/exclude`` of a repository; in a worktree or a submodule ``git`` is a file that says where the rest is."""
    if os.path.isfile(git):
        git = os.path.join(os.path.dirname(git), _read(git).removeprefix("gitdir:").strip())
        git = os.path.join(git, _read(os.path.join(git, "commondir")).strip())
    return os.path.join(git, "info", "exclude")


def _read(path: str) -> str:
    """Its text; nothing where it cannot be read, as in git."""
    try:
        return Path(path).read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError:
        return ""
