"""A notebook as one module: its code cells joined, magics blanked out, lines mapped to cells and edits written back."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PYTHON_BODIES = {"capture", "debug", "ipytest", "memit", "prun", "snakeviz", "time", "timeit", "wandb"}
"""The cell magics beneath which stands Python that runs in the notebook."""
CELL_MAGIC = re.compile(r"\s*%%(\w*)")
MAGIC = re.compile(
    r"(?P<indent>[ \t]*)(?:"
    r"(?P<target>[\w.,*()\[\] ]+=\s*)[%!]"  # files = !ls
    r"|[%!?,;/]"  # %time, !ls, ?print and the automatic calls: none of these begins a statement of Python
    r"|[\w.*\[\]-]+\?{1,2}\s*$"  # print?
    r")"
)
HOLDER = "# halfstep: line "
"""Ends the statement that stands for a line which is not Python, and is followed by its number among those."""
BORDER = "pass  # halfstep: cell "
"""Stands between two cells. As a statement it also ends what a cell leaves open, which is an error in a notebook."""
NEWLINE = re.compile(r"\r\n|\r|\n")
TOKEN = re.compile(r"""#.*|"{3}|'{3}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[()\[\]{}]|\\$""")
WHITE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True)
class Cell:
    """A code cell. index: its place among all cells, from 0. lines: as it was read. module_lines: as it is linted.

    is_python: False where it holds another language, so that none of it is looked at.
    """

    index: int
    lines: tuple[str, ...]
    module_lines: tuple[str, ...]
    is_python: bool


@dataclass(frozen=True)
class Notebook:
    """text: the JSON as it was read. cells: the code cells. held: the lines that a holder stands for, by number."""

    text: str
    cells: tuple[Cell, ...]
    held: tuple[str, ...]

    @property
    def source(self) -> str:
        """The module that is linted and fixed: every line of a cell is one of its lines."""
        lines: list[str] = []
        for number, cell in enumerate(self.cells, 1):
            lines += [f"{BORDER}{number}"] if number > 1 else []
            lines += cell.module_lines
        return "\n".join(lines)

    def place(self, line: int) -> tuple[int, int]:
        """The number of the code cell, from 1, that ``line`` of the module stands in, and the line in that cell."""
        begins, line_after = [], 1
        for cell in self.cells:
            begins.append(line_after)
            line_after += len(cell.lines) + 1
        at = max(bisect_right(begins, line), 1)
        return at, min(line - begins[at - 1] + 1, len(self.cells[at - 1].lines))

    @staticmethod
    def place_in(source: str, line: int) -> tuple[int, int]:
        """As :meth:`place`, in an edited module."""
        borders = [at for at, text in enumerate(NEWLINE.split(source)[: line - 1], 1) if text.startswith(BORDER)]
        return len(borders) + 1, line - (borders[-1] if borders else 0)

    def with_source(self, source: str) -> str:
        """The JSON with the cells of an edited module; all that was not edited stays as it was, to the byte.

        Raises ValueError if the edit took or moved the border of a cell, or what stands for a magic.
        """
        if source == self.source:
            return self.text
        old, new = _cells_of(self.source, len(self.cells)), _cells_of(source, len(self.cells))
        edited = {}
        for cell, before, after in zip(self.cells, old, new, strict=True):
            if after == before:
                continue
            if not cell.is_python or (CELL_MAGIC.match(_first(cell.lines)) and _first(after) != _first(before)):
                raise ValueError("the edit falls into a cell that is not Python from its first line")
            edited[cell.index] = "\n".join(self._restored(before, after))
        return _with_cells(self.text, edited)

    def _restored(self, before: list[str], after: list[str]) -> list[str]:
        """The lines of an edited cell, with its magics in their places."""
        holders = [line for line in before if HOLDER in line]
        if [_held_at(line) for line in holders] != [_held_at(line) for line in after if HOLDER in line]:
            raise ValueError("the edit touches a magic")
        rest = iter(holders)
        return [
            _indent(line) + self.held[_held_at(line)].removeprefix(_indent(next(rest))) if HOLDER in line else line
            for line in after
        ]


def read_notebook(text: str) -> Notebook | None:
    """The notebook in ``text``, its JSON; None where its kernel is not Python. Raises ValueError for a broken one."""
    content = json.loads(text)
    if not (isinstance(content, dict) and isinstance(content.get("cells"), list)):
        raise ValueError("it has no list of cells, as notebooks of format 4 have")
    metadata = _table(content, "metadata")
    language = _table(metadata, "language_info").get("name") or _table(metadata, "kernelspec").get("language")
    if language and str(language).lower() != "python":
        return None
    cells: list[Cell] = []
    held: list[str] = []
    for index, cell in enumerate(content["cells"]):
        if not isinstance(cell, dict):
            raise ValueError(f"cell {index + 1} is not an object")
        if cell.get("cell_type") == "code":
            lines = NEWLINE.split(_text(cell))
            is_python = _is_python(cell, lines)
            cells.append(Cell(index, tuple(lines), tuple(_module_lines(lines, is_python, held)), is_python))
    return Notebook(text, tuple(cells), tuple(held))


def _table(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = parent.get(key)
    return value if isinstance(value, dict) else {}


def _text(cell: Mapping[str, Any]) -> str:
    source = cell.get("source")
    lines: list[Any] = source if isinstance(source, list) else [source]
    if not all(isinstance(line, str) for line in lines):
        raise ValueError("the source of a code cell is not text")
    return "".join(lines)


def _is_python(cell: Mapping[str, Any], lines: list[str]) -> bool:
    editor = _table(_table(cell, "metadata"), "vscode")
    magic = CELL_MAGIC.match(_first(lines))
    return editor.get("languageId", "python") == "python" and (not magic or magic[1] in PYTHON_BODIES)


def _module_lines(lines: list[str], is_python: bool, held: list[str]) -> list[str]:
    """What stands for each line of a cell; the lines that are not Python are added to ``held``."""
    if not is_python:
        return [""] * len(lines)
    if not any(MAGIC.match(line) for line in lines):
        return lines
    result = []
    magic: re.Match[str] | None = None  # the one that goes on in the next line
    depth, quote, continued = 0, "", False
    for line in lines:
        if not (depth or quote or continued):
            magic = magic or MAGIC.match(line)
        if magic:
            statement = f"{magic['target']}get_ipython()" if magic["target"] and not continued else "pass"
            result.append(f"{magic['indent']}{statement}  {HOLDER}{len(held)}")
            held.append(line)
            continued = line.endswith("\\")
            magic = magic if continued else None
        else:
            result.append(line)
            depth, quote, continued = _open_after(line, depth, quote)
    return result


def _open_after(line: str, depth: int, quote: str) -> tuple[int, str, bool]:
    """The open brackets after ``line``, the quotes of an open string, and whether the line goes on in the next."""
    at = 0
    while True:
        if quote:
            end = re.compile(rf"(?:\\.|[^\\])*?{quote}").match(line, at)
            if not end:
                return depth, quote, False
            at, quote = end.end(), ""
        token = TOKEN.search(line, at)
        if not token:
            return depth, "", False
        at = token.end()
        if token[0] in ('"""', "'''"):
            quote = token[0]
        elif token[0] in "([{":
            depth += 1
        elif token[0] in ")]}":
            depth = max(depth - 1, 0)
        elif token[0] == "\\":
            return depth, "", True


def _first(lines: list[str] | tuple[str, ...]) -> str:
    return next((line for line in lines if line.strip()), "")


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _held_at(line: str) -> int:
    return int(line.rpartition(HOLDER)[2])


def _cells_of(source: str, num_cells: int) -> list[list[str]]:
    """The lines of each cell of a module."""
    cells: list[list[str]] = [[]]
    for line in NEWLINE.split(source):
        if line == f"{BORDER}{len(cells) + 1}":
            cells.append([])
        else:
            cells[-1].append(line)
    if len(cells) != num_cells:
        raise ValueError("the edit reaches over the border of a cell")
    return cells


def _with_cells(text: str, edited: Mapping[int, str]) -> str:
    """The JSON ``text`` with new sources for some cells, by index, written in the manner of the old ones."""
    top = {key: span for key, *span in _values(text, WHITE.match(text).end())}  # type: ignore[union-attr]
    pieces, at = [], 0
    for index, (_, begin, _end) in enumerate(_values(text, top["cells"][0])):
        if index in edited:
            value_begin, value_end = {key: span for key, *span in _values(text, begin)}["source"]
            pieces += [text[at:value_begin], _in_manner_of(text, value_begin, value_end, edited[index])]
            at = value_end
    return "".join([*pieces, text[at:]])


def _in_manner_of(text: str, begin: int, end: int, source: str) -> str:
    def dump(value: str) -> str:
        return json.dumps(value, ensure_ascii=text.isascii())

    items = [span for _, *span in _values(text, begin)] if text[begin] == "[" else []
    if not items:
        return dump(source)
    first, last = items[0], items[-1]
    between = text[first[1] : items[1][0]] if len(items) > 1 else "," + text[begin + 1 : first[0]]
    lines = re.findall(r"[^\n]*\n|[^\n]+", source)
    return text[begin : first[0]] + between.join(dump(line) for line in lines) + text[last[1] : end]


def _values(text: str, begin: int) -> Iterator[tuple[str | None, int, int]]:
    """Key (None in an array), begin and end of each value in the object or array that begins at ``begin``."""
    decoder = json.JSONDecoder()

    def skip_white(at: int) -> int:
        return WHITE.match(text, at).end()  # type: ignore[union-attr]

    at = skip_white(begin + 1)
    while text[at] not in "]}":
        key = None
        if text[begin] == "{":
            key, at = decoder.raw_decode(text, at)
            at = skip_white(skip_white(at) + 1)  # past the colon
        _, end = decoder.raw_decode(text, at)
        yield key, at, end
        at = skip_white(end)
        at = skip_white(at + 1) if text[at] == "," else at
