"""A folder of checkpoints: each of them is whole or not there, the latest is found, and older ones go.

step-00001000               a checkpoint: it gets this name when all of it is there
step-00002000-micro-3       saved in mid-window, after three micro-batches of the step that follows
.step-00003000.part         one that is being written, or whose writer died; the next save removes it
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.errors import HalfstepError, and_more

FORMAT = 1
"""Of what a checkpoint holds and under which names. A number that is higher was written by a newer halfstep."""
MANIFEST = "checkpoint.json"
"""What a checkpoint is, to be read without torch; the last file that is written."""
_NAME = re.compile(r"step-(\d{8,})(?:-micro-(\d+))?(?:-again-(\d+))?")


class Position(NamedTuple):
    """Where a run was: steps, micro-batches of the window that was open, and how often it was saved there before."""

    step: int
    num_micro_batches: int
    again: int = 0

    def __str__(self) -> str:
        micro = f"-micro-{self.num_micro_batches}" if self.num_micro_batches else ""
        return f"step-{self.step:08d}{micro}" + (f"-again-{self.again}" if self.again else "")


def checkpoints_in(folder: Path) -> dict[Position, Path]:
    """The whole checkpoints in ``folder``, the latest one last."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if (match := _NAME.fullmatch(path.name)) and (path / MANIFEST).is_file():
            found[Position(*(int(number or 0) for number in match.groups()))] = path
    return dict(sorted(found.items()))


def latest_in(folder: Path) -> Path | None:
    """The latest whole checkpoint of ``folder``, or the one that it is itself; None where nothing was saved yet.

    Raises HalfstepError for a folder of other things: whoever names it means another one.
    """
    if (folder / MANIFEST).is_file():
        return folder
    if found := checkpoints_in(folder):
        return list(found.values())[-1]
    if folder.exists() and not folder.is_dir():
        raise HalfstepError(f"{folder}", "it is a file", "Name the folder that halfstep.distributed.save was given.")
    others = sorted(path.name for path in folder.iterdir() if not _is_leftover(path)) if folder.is_dir() else []
    if others:
        raise HalfstepError(
            f"folder {folder}",
            f"it holds no checkpoint of halfstep, but {and_more(others)}",
            "Name the folder that halfstep.distributed.save was given, or a new one.",
        )
    return None


def begin(folder: Path, step: int, num_micro_batches: int) -> Path:
    """An empty folder to write a checkpoint into, beside the others; :func:`publish` makes it one.

    Raises HalfstepError where ``folder`` holds a checkpoint of a later step, which would go on being the latest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = list(checkpoints_in(folder))
    position = Position(step, num_micro_batches)
    if found and found[-1][:2] > position[:2]:
        raise HalfstepError(
            f"a checkpoint of step {step} in {folder}",
            f"it holds {found[-1]} already, which this run has not come to",
            "Load that one first, move it away, or save into another folder.",
        )
    for path in folder.iterdir():
        if _is_leftover(path):
            shutil.rmtree(path)
    again = [each.again for each in found if each[:2] == position[:2]]
    position = position._replace(again=max(again, default=-1) + 1)
    part = folder / f".{position}.part"
    part.mkdir()
    return part


def publish(part: Path, manifest: Mapping[str, Any]) -> Path:
    """Make what :func:`begin` gave and the ranks have filled a checkpoint, at once; where it stands now."""
    files = {path.name: path.stat().st_size for path in sorted(part.iterdir())}
    with open(part / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **manifest, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    whole = part.with_name(part.name.removeprefix(".").removesuffix(".part"))
    _sync(part)
    os.rename(part, whole)
    _sync(part.parent)
    return whole


def prune(folder: Path, keep: int | None) -> None:
    """Remove all but the ``keep`` latest positions, and of each position all but the last that was saved there.

    A folder loses its name before its files, so that what is left when this is interrupted is no checkpoint.
    """
    found = checkpoints_in(folder)
    latest = {position[:2]: position for position in found}
    kept = list(latest.values())[-keep if keep else 0 :]
    for position, path in found.items():
        if position not in kept:
            gone = path.with_name(f".{path.name}.part")
            os.rename(path, gone)
            shutil.rmtree(gone, ignore_errors=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """What :func:`publish` wrote; a newer format, and files that are not there as they were written, are refused."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        number, files = manifest["format"], manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HalfstepError(
            f"checkpoint {path}",
            f"its {MANIFEST} cannot be read ({type(error).__name__})",
            "All ranks need a file system that they share; if they have, remove this checkpoint.",
        ) from None
    if number > FORMAT:
        raise HalfstepError(
            f"checkpoint {path} in format {number}",
            f"this halfstep reads up to format {FORMAT}",
            f"Install halfstep {manifest.get('halfstep')}, which wrote it, or a newer one.",
        )
    for name, num_bytes in files.items():
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size != num_bytes:
            raise HalfstepError(
                f"checkpoint {path}",
                f"its file {name} " + ("is missing" if size is None else f"has {size} bytes instead of {num_bytes}"),
                "It was copied in part or damaged: copy it again, or remove it to take the one before.",
            )
    return manifest


def _is_leftover(path: Path) -> bool:
    name = path.name
    return name.startswith(".") and name.endswith(".part") and bool(_NAME.fullmatch(name[1:].removesuffix(".part")))


def _sync(folder: Path) -> None:
    """Have the names in ``folder`` on disk, where a system lets one."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
