"""The start of a rank: one call that opens the process group under torchrun, and does nothing without it."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed

from halfstep.distributed.attempt import agree
from halfstep.distributed.stop import Stop
from halfstep.errors import HalfstepError
from halfstep.ranks.fault import end_if_overdue
from halfstep.ranks.progress import Progress, begin

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LATER_S = 60.0
"""By how much NCCL's own timeout is longer. It ends the process without a word of who was at fault."""
_CLOSE_S = 30.0


def start(*, device: str | torch.device | None = None, timeout_s: float = 600.0) -> tuple[int, int]:
    """Begin as one of the ranks that torchrun starts: (rank, num_ranks). Without torchrun, (0, 1) and nothing is done.

    Opens the default process group: NCCL where ``device`` is CUDA, which it is if there is any and this is left out,
    with the device of LOCAL_RANK as the current one, and gloo beside it for tensors on the CPU; else gloo. At the end
    of the script it is closed. A group that is open already stays as it is.

    timeout_s: seconds that a collective may take, and that ranks wait for each other at the start. After them, or at
               once where a rank is known to be gone, the others end with an error that names it: docs/faults.md.

    Raises HalfstepError for an environment that says half of what is needed, for a device that this rank does not have,
    and for ranks that do not come in time.
    """
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return 0, 1
    if not timeout_s > 0:
        raise HalfstepError(f"timeout_s={timeout_s}", "it is a number of seconds", "Leave it out for ten minutes.")
    rank, num = _numbers(os.environ)
    if not distributed.is_available():
        raise HalfstepError(
            f"rank {rank} of {num}", "this build of torch has no torch.distributed", "Install one that has."
        )
    kind = _device(device, os.environ)
    store = _open(rank, num, kind, timeout_s)
    progress = Progress(store, rank, num, timeout_s)
    begin(progress)
    progress.on_beat.append(partial(end_if_overdue, progress))
    stop = Stop(progress)
    atexit.register(_close, progress, distributed.group.WORLD, stop)
    return rank, num


def _numbers(environment: Mapping[str, str]) -> tuple[int, int]:
    missing = [name for name in _NAMES if not environment.get(name)]
    if missing:
        there = [f"{name}={environment[name]}" for name in _NAMES if environment.get(name)]
        raise HalfstepError(
            f"an environment with {', '.join(there)}",
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            "Start the script by torchrun, which sets all of them, or unset them for one process.",
        )
    try:
        rank, num, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    except ValueError:
        rank = num = port = -1
    if not (0 <= rank < num and 0 < port < 2**16):
        raise HalfstepError(
            "an environment with " + ", ".join(f"{name}={environment[name]}" for name in _NAMES),
            "a rank is one of 0 to WORLD_SIZE - 1, and a port one of 1 to 65535",
            "Start the script by torchrun, which sets all of them.",
        )
    return rank, num


def _device(device: str | torch.device | None, environment: Mapping[str, str]) -> torch.device:
    """The device of this rank."""
    asked = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    if asked.type not in ("cuda", "cpu"):
        raise HalfstepError(
            f"device={str(asked)!r} for several ranks",
            "their collectives run over NCCL on CUDA and over gloo on the CPU",
            "Use 'cuda' or 'cpu'.",
        )
    if asked.type == "cpu":
        return asked
    if not torch.cuda.is_available():
        raise HalfstepError(f"device={str(asked)!r}", "torch finds no CUDA device here", "Use device='cpu'.")
    place = asked.index
    if place is None:
        local = environment.get("LOCAL_RANK", "")
        if not local.isdigit():
            raise HalfstepError(
                f"LOCAL_RANK={local!r}", "it says which CUDA device is this rank's", "Start the script by torchrun."
            )
        place = int(local)
    if place >= torch.cuda.device_count():
        raise HalfstepError(
            f"CUDA device {place} for rank {environment['RANK']}",
            f"this host shows {torch.cuda.device_count()} of them",
            "Give torchrun an --nproc-per-node that is no larger.",
        )
    return torch.device("cuda", place)


def _open(rank: int, num: int, device: torch.device, timeout_s: float) -> Any:
    """Open the default group; its store, in which nothing of an earlier attempt is seen."""
    end = time.monotonic() + timeout_s
    limit = timedelta(seconds=timeout_s)
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)
    try:
        shared, _, _ = next(iter(distributed.rendezvous("env://", timeout=limit)))  # type: ignore[attr-defined]
        name = agree(shared, rank, num, timeout_s)
        store = distributed.PrefixStore(f"halfstep/{name}", shared)  # type: ignore[attr-defined]
        left_s = max(1.0, end - time.monotonic())
        store.set_timeout(timedelta(seconds=left_s))
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=num,
            timeout=timedelta(seconds=timeout_s + _LATER_S) if is_cuda else limit,
            device_id=device if is_cuda else None,
        )
    except RuntimeError as error:
        raise HalfstepError(
            f"rank {rank} of {num} at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            f"the process group did not open ({str(error).splitlines()[0]})",
            "Look at what the other ranks print, and whether hosts reach each other.",
        ) from error
    return store


def _close(progress: Progress, group: Any, stop: Stop) -> None:
    """The script ends: close the group, if it is still this one, and never wait long for that.

    After an exception out of a step a collective may still wait for the other ranks, and so would the interpreter's
    end. The log and what other hooks had to do is done by then, since this hook is as old as the group.
    """
    progress.say_goodbye()
    if progress.is_broken and progress.fault:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    if distributed.group.WORLD is group and not progress.fault:
        stop.after(_CLOSE_S)
        distributed.destroy_process_group()
    progress.close()
