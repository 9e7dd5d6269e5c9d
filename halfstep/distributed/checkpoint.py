"""Checkpoints of a run over several ranks: saved together, whole or not there, and loaded also by other ranks.

    halfstep.distributed.load("checkpoints", stepper)    # at the start: the latest whole one, if there is one
    halfstep.distributed.save("checkpoints", stepper)    # now and then, on every rank

A run goes on under another engine or on another number of ranks; docs/checkpoints.md says what is then exact to the bit
and what up to the order of a sum.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

import halfstep
from halfstep.distributed import folder as folders
from halfstep.distributed import store
from halfstep.distributed.contents import buffer_checksums, check_extra, contents_of, is_cut
from halfstep.distributed.failure import error_of, failing_together
from halfstep.distributed.optimizer_state import kind_of
from halfstep.distributed.saved_run import SavedRun
from halfstep.errors import HalfstepError
from halfstep.ranks.one import Ranks
from halfstep.stepper import Stepper

_AFTER_SAVING = "What was saved before is whole: when the cause is mended, save again, or start again and load."
_AFTER_LOADING = "This run may hold a part of it: build it anew before you load again."


def save(folder: str | os.PathLike[str], stepper: Stepper, *, keep: int | None = 2, extra: Any = None) -> Path:
    """Save the run as a new checkpoint in ``folder``, and return where it is. Every rank calls it, at the same place.

    folder: on a file system that all ranks share; made if it is not there.
    keep:   how many of the latest checkpoints stay, at least 1; None for all. Older ones go when the new one is whole.
    extra:  what else the run needs to go on, such as its place in the data; :func:`load` returns it. It is pickled as
            rank 0 has it, so that what differs by rank has to be gathered before.

    A checkpoint holds the model, the optimizer, ``stepper.scheduler``, the state of ``stepper``, in mid-window too, and
    the random state of each rank. Tensors are written from where they are, without a copy of the model.

    Raises the same HalfstepError on every rank where one of them cannot write, and names it.
    """
    _check_stepper(stepper, "save")
    if keep is not None and keep < 1:
        raise HalfstepError(f"keep={keep}", "the one that is saved now stays", "Use 1, 2, 3, ... or None for all.")
    ranks, root = stepper.ranks, Path(folder)
    what = f"a checkpoint of step {stepper.num_steps} in {folder}"
    part: Path | None = None
    whole: Path | None = None
    with failing_together(ranks, what, _AFTER_SAVING):
        check_extra(extra)
        window = stepper.state_dict(numbers_only=True)["window"]
        checksums = buffer_checksums(stepper)
        if ranks.rank == 0:
            part = folders.begin(root, stepper.num_steps, window["num_micro_batches"])
    part = ranks.hand_out(part, 0)
    assert part is not None
    try:
        of_ranks = ranks.gather(checksums)
        with failing_together(ranks, what, _AFTER_SAVING):
            if not part.is_dir():
                raise HalfstepError(what, f"this rank does not see {part}", "Use a file system that all ranks share.")
            contents = contents_of(stepper, extra, of_ranks)
        _write(part, contents, ranks, what)
        with failing_together(ranks, what, _AFTER_SAVING):
            if ranks.rank == 0:
                whole = folders.publish(part, _describe(stepper))
    except HalfstepError:
        if ranks.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise
    with failing_together(ranks, f"an older checkpoint in {folder}", "The new one is whole."):
        if ranks.rank == 0:
            folders.prune(root, keep)
    whole = ranks.hand_out(whole, 0)
    assert whole is not None
    return whole


def load(folder: str | os.PathLike[str], stepper: Stepper) -> Any:
    """Go on from the latest whole checkpoint in ``folder``; what ``save`` was given as ``extra``. Every rank calls it.

    Where nothing was saved yet it changes nothing and returns None. ``folder`` may be one checkpoint itself, to go on
    from an earlier one. The number of ranks, the engine and the layout of master weights may be others.

    It is a pickle, so load what you trust. Raises the same HalfstepError on every rank for what cannot be loaded,
    before anything is changed: another model or optimizer, another kind of loss scale, a damaged or newer checkpoint,
    a folder of other things.
    """
    _check_stepper(stepper, "load")
    ranks, root = stepper.ranks, Path(folder)
    fix = "Name a folder that halfstep.distributed.save has written, which all ranks can read."
    path = None
    with failing_together(ranks, f"the checkpoint in {folder}", fix):
        if ranks.rank == 0:
            path = folders.latest_in(root)
    path = ranks.hand_out(path, 0)
    if path is None:
        return None
    with failing_together(ranks, f"checkpoint {path}", fix):
        saved = SavedRun(path, folders.read_manifest(path), stepper)
        saved.check()
    with failing_together(ranks, f"checkpoint {path}", _AFTER_LOADING):
        return saved.give()


def _check_stepper(stepper: Any, name: str) -> None:
    if not isinstance(stepper, Stepper):
        raise HalfstepError(
            f"halfstep.distributed.{name} of a {type(stepper).__name__}",
            "it knows the state of a halfstep.Stepper",
            "Pass the stepper; DeepSpeed saves and loads its own (engine.save_checkpoint).",
        )


def _write(part: Path, contents: dict[str, Any], ranks: Ranks, what: str) -> None:
    try:
        with ranks.named():
            store.write(part, contents, getattr(ranks, "group", None))
    except CheckpointException as error:
        failures = {rank: failure for rank, (failure, _) in error.failures.items()}
        raise error_of(ranks, failures, what, _AFTER_SAVING) from error


def _describe(stepper: Stepper) -> dict[str, Any]:
    """What a reader of the manifest wants to know, and :class:`SavedRun` needs."""
    return {
        "halfstep": halfstep.__version__,
        "torch": torch.__version__,
        "step": stepper.num_steps,
        "policy": str(stepper.policy),
        "optimizer": kind_of(stepper.optimizer),
        "engine": stepper.ranks.describe()["engine"],
        "num_ranks": stepper.ranks.num,
        "is_cut": is_cut(stepper.ranks.module),
    }
