"""start(): what it reads from the environment, what it refuses, and how ranks find each other."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import distributed

import halfstep
from halfstep import HalfstepError
from halfstep.distributed import attempt, launch

ROOT = Path(__file__).parent.parent
WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}


@pytest.fixture
def environment(monkeypatch):
    for name in WHOLE:
        monkeypatch.delenv(name, raising=False)

    def be(values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return be


def test_without_torchrun_it_is_one_process_and_nothing_is_opened(environment):
    environment({"MASTER_PORT": "29500"})  # which many a shell has set
    assert halfstep.distributed.start() == (0, 1)
    assert not distributed.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (("RANK",), "WORLD_SIZE and MASTER_ADDR and MASTER_PORT are missing"),
        (("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "RANK is missing"),
        (("RANK", "WORLD_SIZE", "MASTER_PORT"), "MASTER_ADDR is missing"),
    ],
)
def test_half_an_environment_is_refused_with_what_is_there(environment, given, missing):
    environment({name: WHOLE[name] for name in given})
    with pytest.raises(HalfstepError, match=missing) as caught:
        halfstep.distributed.start()
    assert all(f"{name}={WHOLE[name]}" in str(caught.value) for name in given)
    assert "torchrun" in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [{"RANK": "2"}, {"RANK": "one"}, {"RANK": "-1"}, {"WORLD_SIZE": "0"}, {"MASTER_PORT": "70000"}], ids=str
)
def test_numbers_that_cannot_be_are_refused(environment, wrong):
    environment(WHOLE | wrong)
    with pytest.raises(HalfstepError, match="a rank is one of 0 to WORLD_SIZE - 1"):
        halfstep.distributed.start()


def test_a_timeout_is_a_time(environment):
    environment(WHOLE)
    with pytest.raises(HalfstepError, match="timeout_s=0: it is a number of seconds"):
        halfstep.distributed.start(timeout_s=0)


@pytest.mark.parametrize(
    ("device", "num_cards", "local", "words"),
    [
        ("mps", 0, "1", "device='mps' for several ranks"),
        ("cuda", 0, "1", "torch finds no CUDA device here"),
        (None, 1, "1", "CUDA device 1 for rank 1: this host shows 1 of them"),
        ("cuda:3", 2, "1", "CUDA device 3 for rank 1: this host shows 2 of them"),
        ("cuda", 2, "", "LOCAL_RANK='': it says which CUDA device is this rank's"),
    ],
)
def test_a_device_that_this_rank_does_not_have_is_refused(environment, monkeypatch, device, num_cards, local, words):
    environment(WHOLE | {"LOCAL_RANK": local})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_cards)
    with pytest.raises(HalfstepError) as caught:
        halfstep.distributed.start(device=device)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("device", "num_cards", "chosen"),
    [(None, 0, "cpu"), (None, 4, "cuda:1"), ("cpu", 4, "cpu"), ("cuda", 4, "cuda:1"), ("cuda:2", 4, "cuda:2")],
)
def test_the_device_of_a_rank(monkeypatch, device, num_cards, chosen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_cards)
    assert launch._device(device, WHOLE) == torch.device(chosen)


def test_a_group_that_is_open_stays_as_it_is(environment, monkeypatch):
    environment({"RANK": "7"})
    for name, answer in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
        monkeypatch.setattr(distributed, name, lambda answer=answer: answer)
    assert halfstep.distributed.start(timeout_s=1.0) == (1, 2)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


SCRIPT = """
import os, signal, sys, torch, halfstep
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

assert halfstep.distributed.start(timeout_s=20) == (0, 1) == halfstep.distributed.start()
assert distributed.get_backend() == "gloo"
backend = distributed.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
assert backend.options._timeout.seconds == 20
ready, says = os.pipe()
child = os.fork()
if child == 0:  # as a worker of a data loader: a signal ends it, without a word
    os.write(says, b"1")
    signal.pause()
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
assert os.waitpid(child, 0)[1] == signal.SIGTERM
model = DistributedDataParallel(torch.nn.Linear(2, 2))
stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", log=sys.argv[1])
stepper.step(lambda: model(torch.ones(1, 2)).sum())
if sys.argv[2] == "stop":
    os.kill(os.getpid(), signal.SIGTERM)
print("the end")
"""


@pytest.mark.slow  # under torchrun: tests/test_distributed_faults.py
@pytest.mark.parametrize("how", ["end", "stop"])
def test_a_script_that_starts_ends_by_itself_or_by_sigterm(tmp_path, how):
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = one.getsockname()[1]
    there = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    environment = {**os.environ, **there, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", SCRIPT, str(tmp_path), how],
        env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    last = (tmp_path / "rank-00000.jsonl").read_text().splitlines()[-1]
    if how == "end":
        assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")
        assert '"state":"finished"' in last
    else:
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(
            "[rank0]: stopped by SIGTERM outside of the stepper, last in step 1, at <string>:"
        )
        assert '"reason":"stopped by SIGTERM outside of the stepper, last in step 1' in last


# The name of an attempt.


def agreed(store, num, missing=(), timeout_s=20.0):
    """What each rank comes to, an error in its place."""
    results = {}

    def one(rank):
        try:
            results[rank] = attempt.agree(store, rank, num, timeout_s)
        except HalfstepError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(num) if rank not in missing]
    for thread in reversed(threads):  # rank 0 comes last, so that the others find what was before
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_ranks_agree_on_a_name_that_no_attempt_before_had():
    store = distributed.HashStore()
    names = []
    for num in (3, 3, 2, 4):  # a job may go on with other ranks
        results = agreed(store, num)
        assert len(set(results.values())) == 1, results
        names.append(results[0])
    assert len(set(names)) == 4


def test_an_attempt_that_died_half_way_does_not_mislead_the_next():
    store = distributed.HashStore()
    agreed(store, 3, missing=(2,), timeout_s=0.3)
    results = agreed(store, 3)
    assert len(set(results.values())) == 1, results


def test_ranks_that_do_not_come_are_named():
    results = agreed(distributed.HashStore(), 4, missing=(1, 3), timeout_s=0.3)
    assert results[0].startswith("a job of 4 ranks: rank 1, rank 3 did not come in time. Look at")
    results = agreed(distributed.HashStore(), 2, missing=(0,), timeout_s=0.3)
    assert "rank 0 did not come in time" in results[1]
