"""A rank whose disk is full, one that cannot read, one that is killed while it writes: all know, nothing is lost."""

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference.loop import assert_same
from reference.resumed import build, everything, micro_batches, run

from halfstep import HalfstepError
from halfstep.distributed import folder as folders
from halfstep.distributed import load, save, store


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def with_full_disk(folder, limit):
    """Rank 1 may write no file longer than ``limit`` bytes."""
    stepper = build("ddp", "bf16")
    run(stepper, micro_batches("ddp", 0, 2))
    save(folder, stepper, extra="before")
    run(stepper, micro_batches("ddp", 2, 4))
    before = everything(stepper)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if stepper.ranks.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        save(folder, stepper)
    except HalfstepError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_same(everything(stepper), before)
    stepper.ranks.gather(None)
    left = names(folder)
    assert load(folder, build("ddp", "bf16")) == "before"
    save(folder, stepper)
    return message, left, names(folder)


def test_a_rank_whose_disk_is_full(world2, tmp_path):
    results = world2.run(with_full_disk, str(tmp_path), 2000)
    message = f"rank 1: a checkpoint of step 2 in {tmp_path}: File too large. What was saved before is whole"
    for said, left, after in results:
        assert said.startswith(message)
        assert left == ["step-00000001"]
        assert after == ["step-00000001", "step-00000002"]


def without_shared_files(folder):
    """Rank 1 does not find what rank 0 has chosen."""
    stepper = build("ddp", "bf16")
    run(stepper, micro_batches("ddp", 0, 2))
    save(folder, stepper)
    other = build("ddp", "bf16", seed=3)
    before = everything(other)
    with pytest.MonkeyPatch.context() as patch:
        if stepper.ranks.rank == 1:
            patch.setattr(folders, "MANIFEST", "not-here.json")
        with pytest.raises(HalfstepError) as error:
            load(folder, other)
    assert_same(everything(other), before)
    return str(error.value)


def test_a_rank_that_cannot_load_stops_all(world2, tmp_path):
    messages = world2.run(without_shared_files, str(tmp_path))
    path = tmp_path / "step-00000001"
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"rank 1: checkpoint {path}: its not-here.json cannot be read (FileNotFoundError)")


def killed(folder):
    """For a process of its own: rank 1 is killed in the middle of its writing."""
    from halfstep.ranks import progress

    progress.BEAT_S = 0.1
    torch.distributed.init_process_group("gloo")
    stepper = build("ddp", "bf16")
    run(stepper, micro_batches("ddp", 0, 2))
    save(folder, stepper, extra="before")
    run(stepper, micro_batches("ddp", 2, 4))
    if stepper.ranks.rank == 1:

        def portions(items):
            yield items[:3]
            os.kill(os.getpid(), 9)

        store._portions = portions
    try:
        save(folder, stepper)
    except HalfstepError as error:
        print(error, flush=True)
        os._exit(3)


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_writes(tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    program = f"import test_distributed_checkpoint_faults as t; t.killed({str(tmp_path / 'runs')!r})"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program], env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=90)[0] for process in processes]
    assert [process.returncode for process in processes] == [3, -9]
    assert said[0].startswith("rank 1 (host")
    assert "is gone" in said[0]
    assert load(tmp_path / "runs", build("one", "bf16", seed=3)) == "before"


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
