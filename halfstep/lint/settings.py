"""What is looked for and where: ``[tool.halfstep.lint]`` of the nearest pyproject.toml, and flags in its place."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.lint.catalogue import CANNOT_PARSE, LINT_FAILED, catalogue, did_you_mean
from halfstep.lint.rule import Rule

TABLE = "[tool.halfstep.lint]"
LISTS = ("select", "ignore", "exclude")
BY_FILE = "per-file-ignores"
UNASKED = frozenset({CANNOT_PARSE.code, LINT_FAILED.code})
"""Whoever selects some rules still wants to know that a file was not looked at. ``ignore`` holds for these too."""


@dataclass(frozen=True)
class Settings:
    """root: the folder that patterns and globs are relative to.

    select: codes, beginnings of codes, or names of rules; None for all. ignore: the same. exclude: patterns of
    files and folders that are not looked at, as in a .gitignore that stands in ``root``. per_file_ignores: a glob of
    :mod:`fnmatch`, and what is ignored in the files that it matches.
    """

    root: Path
    select: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    per_file_ignores: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def override(self, **flags: Sequence[str] | None) -> Settings:
        """These settings with the flags that were given in their place: ``select``, ``ignore``, ``exclude``."""
        return replace(self, **{name: tuple(value) for name, value in flags.items() if value is not None})  # type: ignore[arg-type]

    @cached_property
    def codes(self) -> frozenset[str]:
        """What is looked for. Where both lists match a rule the longer selector wins, and ``ignore`` wins a tie."""
        return frozenset(
            rule.code for rule in catalogue().values() if self._wish_for(rule) > _strength(self.ignore, rule)
        )

    def _wish_for(self, rule: Rule) -> int:
        return max(int(self.select is None or rule.code in UNASKED), _strength(self.select or (), rule))

    def codes_for(self, file: Path) -> frozenset[str]:
        """The codes that are looked for in ``file``."""
        path = file.resolve()
        if not self.per_file_ignores or not path.is_relative_to(self.root):
            return self.codes
        name = path.relative_to(self.root).as_posix()
        # A glob without a folder is one for the file's name alone, as in .gitignore.
        matching = [
            codes for glob, codes in self.per_file_ignores if fnmatchcase(name if "/" in glob else path.name, glob)
        ]
        ignored = [selector for codes in matching for selector in codes]
        return frozenset(code for code in self.codes if not _strength(ignored, catalogue()[code]))


def find_settings(path: Path) -> Settings:
    """The settings for ``path``: of the nearest pyproject.toml above it that has ``[tool.halfstep.lint]``.

    Raises HalfstepError for a file that is not TOML, an unknown key, a wrong type, or a rule that does not exist.
    """
    start = path.resolve()
    folders = [start, *start.parents] if start.is_dir() else list(start.parents)
    for folder in folders:
        file = folder / "pyproject.toml"
        if file.is_file() and (table := _table(file)) is not None:
            return _read(table, file)
    return Settings(folders[0])


def check_selectors(selectors: Iterable[str], where: str) -> None:
    """Raises HalfstepError for a selector that no rule answers to; ``where`` says who gave it."""
    rules = catalogue().values()
    for selector in selectors:
        if not any(_answers(rule, selector) for rule in rules):
            raise HalfstepError(
                f"{where} {selector or repr(selector)}",
                "no rule has this code, beginning of a code, or name",
                did_you_mean(selector),
            )


def _answers(rule: Rule, selector: str) -> bool:
    return selector == rule.name or (selector != "" and rule.code.startswith(selector))


def _strength(selectors: Sequence[str], rule: Rule) -> int:
    """How many characters of the rule's code the best of ``selectors`` gives; a name gives all, no match 0."""
    return max((min(len(selector), len(rule.code)) for selector in selectors if _answers(rule, selector)), default=0)


def _table(file: Path) -> dict[str, Any] | None:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # not TOML, or not UTF-8
        raise HalfstepError(str(file), f"it is not TOML ({error})", "Mend the file.") from None
    tool = document.get("tool")
    if not isinstance(tool, dict) or (ours := tool.get("halfstep")) is None:
        return None
    if not isinstance(ours, dict) or not isinstance(ours.get("lint", {}), dict):
        raise HalfstepError(f"{file}: {TABLE}", "it is no table", f"Write settings under {TABLE}.")
    if odd := sorted(ours.keys() - {"lint"}):
        raise HalfstepError(f"{file}: [tool.halfstep] {odd[0]}", "there is no such setting", f"Use {TABLE}.")
    return ours.get("lint")


def _read(table: dict[str, Any], file: Path) -> Settings:
    where = f"{file}: {TABLE}"
    if unknown := sorted(table.keys() - {*LISTS, BY_FILE}):
        raise HalfstepError(f"{where} {unknown[0]}", "there is no such setting", f"Use {', '.join((*LISTS, BY_FILE))}.")
    lists = {name: _strings(table[name], f"{where} {name}") for name in LISTS if name in table}
    by_file = table.get(BY_FILE, {})
    if not isinstance(by_file, dict):
        raise HalfstepError(f"{where} {BY_FILE}", f"it is {by_file!r}", 'Write {"GLOB" = ["HS2"]}.')
    ignores = {glob: _strings(value, f"{where} {BY_FILE} {glob}") for glob, value in by_file.items()}
    for name in ("select", "ignore"):
        check_selectors(lists.get(name, ()), f"{where} {name}")
    for glob, codes in ignores.items():
        check_selectors(codes, f"{where} {BY_FILE} {glob}")
    return Settings(file.parent, per_file_ignores=tuple(ignores.items()), **lists)


def _strings(value: Any, where: str) -> tuple[str, ...]:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise HalfstepError(where, f"it is {value!r}", 'Write a list of strings, as in ["HS1"].')
