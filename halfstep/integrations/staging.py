"""A checkpoint of a Trainer that is whole or not there: written under another name, which no resume takes.

checkpoint-500           a checkpoint; it gets this name when all of it is there
.checkpoint-500.part     one that is being written, or whose writer died; the next save removes it
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halfstep.errors import HalfstepError


class Staging:
    """Where the files of one checkpoint go until it is whole.

    final: the folder that a Trainer thinks it writes. owns: whether this process makes, renames and removes folders.
    """

    def __init__(self, final: Path, owns: bool) -> None:
        self.final, self._owns = final, owns
        self._is_published = False
        self.part = final.with_name(f".{final.name}.part")
        self._old = final.with_name(f".{final.name}.old.part")
        if owns:
            for left in (*final.parent.glob(".checkpoint-*.part"), self.part, self._old):
                shutil.rmtree(left, ignore_errors=True)

    def place(self, folder: str | os.PathLike[str] | None) -> str | None:
        """Where what is meant for ``folder`` is to be written: it is another one only for this checkpoint."""
        if folder is None:
            return None
        return str(self.part) if Path(folder) == self.final else str(folder)

    def publish(self) -> None:
        """Give the checkpoint its name. One of that name that is there already, of an earlier run, goes."""
        if self.final.exists():
            self.final.rename(self._old)
        self.part.rename(self.final)
        self._is_published = True
        shutil.rmtree(self._old, ignore_errors=True)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Whatever fails in here leaves no half of a checkpoint; a full disk is told in one line."""
        try:
            yield
        except BaseException as error:
            if self._owns:
                shutil.rmtree(self.part, ignore_errors=True)
            if self._is_published or not _is_of_disk(error):
                raise
            raise HalfstepError(
                f"folder {self.final}",
                f"it cannot be written ({_reason(error)}), and nothing of it is left",
                "Make room; checkpoints before it are whole, and a resume goes on from the last one.",
            ) from error


def _is_of_disk(error: BaseException) -> bool:
    """torch and safetensors have kinds of their own for a disk that takes no more."""
    return isinstance(error, OSError) or _is_torchs(error) or type(error).__name__ == "SafetensorError"


def _is_torchs(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and "inline_container" in str(error)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "a file stayed shorter than it is, as on a full disk" if _is_torchs(error) else str(error).splitlines()[0]
