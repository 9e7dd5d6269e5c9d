"""Reading a log, also while it is written: what is torn, broken or of no known form is dropped and counted."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.watch.entry import Entry, is_entry
from halfstep.watch.log import file_of

_PIECE = 2**20
"""Bytes that are read and parsed together."""
_LONGEST_LINE = 2**26
"""Bytes; a longer line is no entry."""
_NUM_MARKED = 256
"""Bytes before the offset, by which a file is known again."""


class Tail:
    """Entries of one file, read as they are appended.

    offset:     of the first byte that was not taken in.
    num_torn:   lines of the file that were dropped so far.
    num_starts: how often reading began anew, since what stood before ``offset`` is there no more: the file was cut, or
                is another one. It is looked at when a read begins, so that what one read gives is of one file.

    A file that is not there, that cannot be read, or that is a link or a pipe gives nothing; one that is back goes on.
    """

    def __init__(self, path: str | os.PathLike[str], offset: int = 0) -> None:
        self.path = Path(path)
        self.offset = offset
        self.num_torn = 0
        self.num_starts = 0
        self._mark = b"\n" if offset else b""

    def read(self, max_bytes: int | None = None) -> list[tuple[int, Entry]]:
        """The next entries, each with the offset of its line: all there are, or those of about ``max_bytes``.

        What is no whole line yet, at the end of the file, stays for later.
        """
        entries: list[tuple[int, Entry]] = []
        try:
            with open_log(self.path) as file:
                self._find(file)
                last = None if max_bytes is None else self.offset + max_bytes
                while last is None or self.offset < last:
                    piece = self._read_lines(file, _PIECE if last is None else min(_PIECE, last - self.offset))
                    if not piece:
                        break
                    entries += self._parse(piece)
                    self.offset += len(piece)
                    self._mark = piece[-_NUM_MARKED:]
        except OSError:
            pass  # gone, or a network file system that fails for now
        return entries

    def rest(self) -> Iterator[Entry]:
        """The entries up to what is the end of the file now, read piece by piece."""
        before = -1
        while self.offset != before:
            before = self.offset
            for _, entry in self.read(_PIECE):
                yield entry

    def _find(self, file: FileIO) -> None:
        """Begin anew if the file is not the one that was read."""
        file.seek(max(0, self.offset - len(self._mark)))
        if file.read(len(self._mark)) != self._mark:
            self.offset = self.num_torn = 0
            self._mark = b""
            self.num_starts += 1

    def _read_lines(self, file: FileIO, size: int) -> bytes:
        """Whole lines of about ``size`` bytes; nothing where there is none yet."""
        while True:
            file.seek(self.offset)
            data = file.read(size)
            end = data.rfind(b"\n") + 1
            if end or len(data) < size:
                return data[:end]
            if size >= _LONGEST_LINE:
                return data
            size *= 8

    def _parse(self, piece: bytes) -> list[tuple[int, Entry]]:
        offset = self.offset
        entries = []
        lines = piece.removesuffix(b"\n").split(b"\n")
        for line, value in zip(lines, _values(lines), strict=True):
            if is_entry(value):
                entries.append((offset, value))
            elif line and not line.isspace():
                self.num_torn += 1
            offset += len(line) + 1
        return entries


def open_log(path: Path) -> FileIO:
    """An open file, not waiting for the writer of a pipe, and not led elsewhere by a link. OSError for what is none."""
    flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)  # Windows has neither
    file = FileIO(path, opener=lambda name, mode: os.open(name, mode | flags))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is no file")
    return file


def _values(lines: list[bytes]) -> list[Any]:
    """What JSON reads in each line, None where that is nothing; all together, which takes half the time."""
    values: Any = _value(b"[" + b",".join(lines) + b"]")
    if isinstance(values, list) and len(values) == len(lines):
        return values
    return [_value(line) for line in lines]


def _value(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError):
        return None


def read_entries(folder: str | os.PathLike[str], rank: int) -> Iterator[Entry]:
    """The log of one rank, from its start to what is its end now. HalfstepError where there is nothing to read."""
    path = file_of(folder, rank)
    try:
        open_log(path).close()
    except OSError as error:
        why = f"it cannot be read ({error.strerror or 'it is no file'})"
        raise HalfstepError(f"log {path}", why, "Name the folder of a run, which holds rank-00000.jsonl.") from None
    return _entries(Tail(path))


def _entries(tail: Tail) -> Iterator[Entry]:
    is_empty = True
    for entry in tail.rest():
        is_empty = False
        yield entry
    if is_empty:
        raise HalfstepError(f"log {tail.path}", "no line of it is an entry", "Name the folder of a run.")


def ranks_of(folder: str | os.PathLike[str]) -> list[int]:
    """The ranks that have a log in ``folder``, in order; none where there is no folder."""
    try:
        with os.scandir(folder) as found:
            names = [entry.name for entry in found if entry.is_file(follow_symlinks=False)]
    except OSError:
        return []
    ranks = [int(match[1]) for name in names if (match := re.fullmatch(r"rank-(\d{5,})\.jsonl", name, re.ASCII))]
    return sorted(rank for rank in ranks if file_of(folder, rank).name in names)
