"""A file that lines are appended to, on a disk that may be full, slow or gone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from halfstep.errors import HalfstepError


class Appender:
    """Appends whole lines to the file at ``path``. A fault closes the file; it can be opened again.

    is_open: whether lines can be written. is_empty: whether the open file has no line yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._is_torn = False
        self.is_empty = False

    @property
    def is_open(self) -> bool:
        return self._file >= 0

    def open(self) -> None:
        """Open the file for this process alone; it and its folder are made, if they are not there.

        OSError where that fails, HalfstepError where another process has the file.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            _lock(file, self._path)
            size = os.fstat(file).st_size
            self.is_empty = size == 0
            # A killed process, or a full disk, has left the beginning of a line; it is to stand alone.
            self._is_torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        except BaseException:
            os.close(file)
            raise
        self._file = file

    def write(self, lines: Sequence[bytes]) -> tuple[int, OSError | None]:
        """How many of ``lines`` are in the file now, and the fault that kept out the others."""
        data = memoryview((b"\n" if self._is_torn else b"") + b"".join(line + b"\n" for line in lines))
        num_left = len(data)
        try:
            while num_left:
                num_left -= os.write(self._file, data[-num_left:])
        except OSError as fault:
            self.close()
            return _num_whole(lines, num_left), fault
        self._is_torn = self.is_empty = False
        return len(lines), None

    def is_gone(self) -> bool:
        """Whether the file was deleted or moved: what stands at the path is another one, or none."""
        try:
            return not os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # nobody can tell; the next write will

    def close(self) -> None:
        """Close the file, which gives it free for others. Safe to call twice."""
        file, self._file = self._file, -1
        if file >= 0:
            with suppress(OSError):  # a network file system tells only here what it did not write
                os.close(file)


def _lock(file: int, path: Path) -> None:
    """The kernel takes the lock back when the process ends, however it does."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise HalfstepError(
            f"log {path}", "another process that lives writes to it", "Name another folder, or end that process."
        ) from None
    except OSError:
        return  # a file system without locks


def _num_whole(lines: Sequence[bytes], num_left: int) -> int:
    """How many of ``lines`` are whole but for their end, where the last ``num_left`` bytes were not written."""
    whole = len(lines)
    while whole and num_left > 1:
        whole -= 1
        num_left -= len(lines[whole]) + 1
    return whole
