"""A file after its rewrites: what would stand in it, the difference, and putting it there."""

from __future__ import annotations

import difflib
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from halfstep.errors import HalfstepError
from halfstep.files import write_whole
from halfstep.lint.document import encoding_of
from halfstep.lint.notebook import Notebook, read_notebook

Rewrite = Callable[[str, str], "Rewritten"]
"""(Python source, file) to what becomes of it."""


@dataclass(frozen=True)
class Rewritten:
    """source: the Python after it. num_fixed: findings that are mended. notes: lines of ``source``, what is said there.

    A note about the whole of it has line None.
    """

    source: str
    num_fixed: int = 0
    notes: Sequence[tuple[int | None, str]] = ()


@dataclass(frozen=True)
class Mended:
    """before and after: the whole text of ``file``. num_fixed: of the rewrites together. notes: lines for the user."""

    file: str
    before: str
    after: str
    num_fixed: int = 0
    notes: Sequence[str] = ()

    @property
    def changed(self) -> bool:
        return self.before != self.after

    def difference(self) -> str:
        """As ``diff -u`` and ``patch`` know it."""
        before, after = (io.StringIO(text, newline="").readlines() for text in (self.before, self.after))
        lines = difflib.unified_diff(before, after, self.file, self.file)
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    def check_writable(self) -> None:
        """Raises HalfstepError for a file that its owner has locked, which replacing it would not notice."""
        if not os.access(self.file, os.W_OK) or not os.access(Path(self.file).resolve().parent, os.W_OK):
            raise HalfstepError(
                f"{self.file}",
                "it may not be written, and nothing was changed",
                "Unlock it, or leave it out with --exclude.",
            )

    def write(self) -> None:
        """Puts it into the file, in the file's own encoding and with its own rights; a link stays one."""
        path = Path(self.file).resolve()
        content, mode = path.read_bytes(), os.stat(path).st_mode
        write_whole(path, self.after.encode(encoding_of(content)))
        os.chmod(path, mode)


def mend(text: str, file: str, rewrites: Sequence[Rewrite]) -> Mended:
    """``text`` after ``rewrites``. Of a notebook they see the cells as one module; other JSON stays as it is."""
    suffix = PurePath(file).suffix
    notebook = read_notebook(text) if suffix == ".ipynb" else None
    if suffix == ".json" or (suffix == ".ipynb" and notebook is None):
        return Mended(file, text, text)
    source = notebook.source if notebook else text
    num_fixed, notes = 0, list[str]()
    for rewrite in rewrites:
        rewritten = rewrite(source, file)
        source = rewritten.source
        num_fixed += rewritten.num_fixed
        notes += [f"{_place(file, source, line, notebook)}: {note}" for line, note in rewritten.notes]
    if notebook is None:
        return Mended(file, text, source, num_fixed, notes)
    try:
        return Mended(file, text, notebook.with_source(source), num_fixed, notes)
    except ValueError as error:
        return Mended(file, text, text, 0, [f"{file}: nothing was changed, {error}"])


def _place(file: str, source: str, line: int | None, notebook: Notebook | None) -> str:
    if line is None:
        return file
    if notebook is None:
        return f"{file}:{line}"
    cell, line = notebook.place_in(source, line)
    return f"{file}:cell {cell}:{line}"
