"""Writing a file whole or not at all, a folder of generated pages, and reading a file of settings."""

from __future__ import annotations

import os
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from halfstep.errors import HalfstepError


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Put ``content`` into the file at ``path``; a reader, or a full disk, never leaves half of it there."""
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner may read
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise HalfstepError(
            f"output file {target}", f"it cannot be written ({error.strerror})", "Name a file in a folder that exists."
        ) from None


def write_pages(directory: str | os.PathLike[str], pages: Mapping[str, str], is_ours: Callable[[Path], bool]) -> None:
    """Write generated ``pages`` into ``directory``, made if need be; other pages that are ours are removed."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.md"):
        if old.name not in pages and is_ours(old):
            old.unlink()
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def read_toml(what: str, path: str | os.PathLike[str], page: str) -> dict[str, Any]:
    """The TOML file at ``path``. A HalfstepError calls it ``what``, and names the ``page`` about such files."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise HalfstepError(f"{what} {path}", f"it cannot be read ({error.strerror})", "Name a TOML file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HalfstepError(f"{what} {path}", f"it is not TOML ({error})", f"See {page}.") from None
