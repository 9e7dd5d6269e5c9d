"""What was found before, kept beside the project, so that a file that did not change is not read again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from typing import Any

from halfstep import __version__
from halfstep.errors import HalfstepError
from halfstep.files import write_whole
from halfstep.lint.finding import Edit, Finding, Span

DIRECTORY = ".halfstep_cache"
NUM_DAYS_KEPT = 30
"""An entry, or the file of another version, that nobody asked for in so many days goes."""


class Cache:
    """The findings of each content, name and selection of rules, in one file for each version of the linter.

    A file that is damaged, or that another version wrote, counts as empty. One that cannot be written is left.
    """

    def __init__(self, directory: Path = Path(DIRECTORY)) -> None:
        self.directory = directory
        self.file = directory / f"lint-{_engine()}.json"
        self._today = int(time.time() // 86400)
        self._entries = _load(self.file)  # key to the day of its last use and the findings
        self._is_new = False

    @staticmethod
    def key(content: bytes, file: str, codes: Collection[str]) -> str:
        """``codes``: the rules that were looked for. ``file`` counts: findings carry it, its suffix says what it is."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (file.encode(errors="surrogateescape"), " ".join(sorted(codes)).encode(), content):
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    def find(self, key: str) -> list[Finding] | None:
        if key not in self._entries:
            return None
        day, rows = self._entries[key]
        if day != self._today:
            self._entries[key] = [self._today, rows]
            self._is_new = True
        return [_finding(row) for row in rows]

    def add(self, key: str, findings: Sequence[Finding]) -> None:
        self._entries[key] = [self._today, [astuple(finding) for finding in findings]]
        self._is_new = True

    def save(self) -> None:
        """Write what is new, without what is old."""
        if not self._is_new:
            return
        kept = {key: entry for key, entry in self._entries.items() if entry[0] > self._today - NUM_DAYS_KEPT}
        body = json.dumps(kept, separators=(",", ":"))
        with contextlib.suppress(OSError, HalfstepError):  # a read-only checkout is linted all the same
            self.directory.mkdir(parents=True, exist_ok=True)
            write_whole(self.directory / ".gitignore", "*\n")
            write_whole(self.file, f"{_digest(body)}\n{body}")
            for other in self.directory.glob("lint-*.json"):
                if other != self.file and other.stat().st_mtime < time.time() - NUM_DAYS_KEPT * 86400:
                    other.unlink()
        self._is_new = False


def _load(file: Path) -> dict[str, list[Any]]:
    try:
        digest, _, body = file.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return {}
    if digest != _digest(body):
        return {}
    entries: dict[str, list[Any]] = json.loads(body)
    return entries


def _digest(body: str) -> str:
    return hashlib.blake2b(body.encode(), digest_size=16).hexdigest()


def _finding(row: list[Any]) -> Finding:
    *values, edits = row
    return replace(Finding(*values), edits=tuple(Edit(action, Span(*span), code) for action, span, code in edits))


@cache
def _engine() -> str:
    """Names what findings depend on beside the file: our version, our source and the Python that parses."""
    digest = hashlib.blake2b(f"{__version__} {sys.version}".encode(), digest_size=8)
    root = Path(__file__).parent
    for source in sorted(root.rglob("*.py")):
        digest.update(source.relative_to(root).as_posix().encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()
