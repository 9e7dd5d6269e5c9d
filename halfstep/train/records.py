"""Files of data, read a line at a time: what stands in each, with its line number, and what is wrong with a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halfstep.errors import HalfstepError

TEXT = (".txt", ".py", ".md")
"""Files of plain text, which pretraining takes."""

_PIECE = 16_384  # characters
_GIVE = "Give FILE.jsonl, a folder of such files, or builtin."


def find(task: str, data: str) -> list[Path]:
    """The files of ``data``, a file or a folder, in the order in which they are read."""
    path = Path(data)
    takes = "*.jsonl, " + ", ".join(f"*{kind}" for kind in TEXT) if task == "pretrain" else "*.jsonl"
    try:
        if path.is_dir():
            kinds = (".jsonl", *TEXT) if task == "pretrain" else (".jsonl",)
            inside = [file.relative_to(path) for file in path.rglob("*") if file.suffix in kinds and file.is_file()]
            files = [path / file for file in sorted(inside) if not any(part.startswith(".") for part in file.parts)]
            if not files:
                raise HalfstepError(
                    f"data {data}", f"{task} reads {takes}, and the folder has none", "Give one that has, or builtin."
                )
            return files
        if not path.exists():
            raise HalfstepError(f"data {data}", "there is no such file or folder", _GIVE)
    except OSError as error:
        raise _unreadable(path, error) from None
    if path.suffix == ".jsonl" or (path.suffix in TEXT and task == "pretrain"):
        return [path]
    if path.suffix in TEXT:
        raise HalfstepError(f"data {data}", f"{task} reads {takes}", "Plain text fits halfstep train pretrain.")
    if path.suffix in (".gz", ".zst", ".xz", ".bz2", ".zip"):
        raise HalfstepError(f"data {data}", f"{task} reads {takes}", "Unpack it first.")
    fix = (
        f"Write one object a line: jq -c '.[]' {data} > {path.with_suffix('.jsonl')}" if path.suffix == ".json" else ""
    )
    raise HalfstepError(f"data {data}", f"{task} reads {takes}", fix or "Write one JSON object a line, as FILE.jsonl.")


def read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    """The value of each line that is not blank, with its number."""
    for number, line in _lines(path):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            value = json.loads(line.rstrip("\r\n"), object_pairs_hook=_object)
        except json.JSONDecodeError as error:
            whole = " The file is one list: write one object a line." if line.strip() == "[" and number == 1 else ""
            why = f"it is not JSON: {error.msg} at column {error.colno}"
            raise HalfstepError(where, why, f"Mend the line or leave it out.{whole}") from None
        except _TwiceError as error:
            raise HalfstepError(where, f"it has {error.args[0]!r} twice", "Leave one of them out.") from None
        except (RecursionError, ValueError) as error:
            raise HalfstepError(where, f"its JSON cannot be read: {error}", "Mend the line or leave it out.") from None
        yield number, value


class _TwiceError(Exception):
    """A key that an object has twice; of the values one would be lost."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(next(name for name in names if names.count(name) > 1))
    return value


def read_text(path: Path, num_bytes: int) -> Iterator[tuple[int, str]]:
    """Pieces of a text, each with the number of its first line; ``num_bytes`` is how much text there is in all.

    A piece has at most 16,384 characters, fewer in a short text, so that one in twenty can be held out, and ends where
    a line ends unless that line is longer. A text of any size passes in little memory.
    """
    size = max(1024, min(_PIECE, num_bytes // 80))
    piece, start = "", 1
    for number, line in _lines(path):
        if piece and len(piece) + len(line) > size:
            yield start, piece
            piece = ""
        if not piece:
            start = number
        piece += line
        while len(piece) > size:
            yield number, piece[:size]
            piece = piece[size:]
    if piece:
        yield start, piece


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if number == 1:
                    raw = _without_mark(raw, path)
                try:
                    yield number, raw.decode()
                except UnicodeDecodeError as error:
                    why = f"byte {error.start + 1} of it, 0x{raw[error.start]:02x}, is not UTF-8"
                    raise HalfstepError(f"{path} line {number}", why, "Save the file as UTF-8.") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _without_mark(raw: bytes, path: Path) -> bytes:
    """The first line of a file without the byte order mark that some editors write before UTF-8."""
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise HalfstepError(f"{path} line 1", "it is UTF-16, not UTF-8", "Save the file as UTF-8.")
    return raw.removeprefix(b"\xef\xbb\xbf")


def _unreadable(path: Path, error: OSError) -> HalfstepError:
    return HalfstepError(f"data {path}", f"it cannot be read: {error.strerror}", "Look at its permissions.")
