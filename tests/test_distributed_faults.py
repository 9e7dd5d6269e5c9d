"""A rank that is gone, hangs, is slow, bad or without a disk: the others stop or go on, and name it."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference import elastic
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from halfstep import Stepper, Watch
from halfstep.events import Alert
from halfstep.ranks import fault, pace
from halfstep.ranks.progress import Progress
from halfstep.watch.entry import RunStart, Step
from halfstep.watch.guard import Guard

HERE = Path(__file__).parent
CLOSED = RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:50310")


# Who is at fault. Three ranks in one process, over one store.


class Rank(Progress):
    calls = 0.0

    @property
    def place(self):
        return replace(super().place, num_calls=self.calls)


@pytest.fixture
def ranks(monkeypatch):
    """Three ranks in step 12. Those that live post whenever the one that asks looks again."""
    store = distributed.HashStore()
    ranks = [Rank(store, rank, 3, timeout_s=60.0, beat_s=0.02) for rank in range(3)]
    for each in ranks:
        each.close()  # the thread; a test posts itself
        each.enter(12)
    ranks[0].living = list(ranks)
    monkeypatch.setattr(fault.time, "sleep", lambda seconds: [each.post() for each in ranks[0].living])
    yield ranks
    monkeypatch.undo()


def said(asking, error=CLOSED):
    return str(fault.fault_of(asking, error))


def test_a_rank_that_posts_no_more_is_gone(ranks):
    for each in ranks:
        each.post()
    del ranks[0].living[1]
    lines = [said(ranks[0]), said(ranks[2])]
    assert lines[0].startswith(f"rank 1 (host {os.uname().nodename}, pid {os.getpid()}) is gone: last seen in step 12")
    assert "with others in step 12" in lines[0]
    assert lines[1] == lines[0]


def test_all_ranks_say_what_the_first_that_asked_has_found(ranks):
    """Rank 2 asks when rank 1 posts again; another verdict would be another cause in each log."""
    for each in ranks:
        each.post()
    gone = ranks[0].living.pop(1)
    first = said(ranks[0])
    ranks[0].living.append(gone)
    assert said(ranks[2]) == first


def test_what_was_found_before_a_restart_is_not_read(ranks):
    ranks[0].living.pop(1)
    said(ranks[0])
    again = [Progress(ranks[0].store.underlying_store, rank, 3, beat_s=0.02) for rank in range(3)]
    for each in again:
        each.close()
        each.enter(2)
    ranks[0].living[:] = again[:2]
    assert said(again[0]).startswith("rank 2 (")


def test_several_ranks_are_gone(ranks):
    ranks[0].living[:] = ranks[:1]
    assert " and " not in said(ranks[0]).split(" are gone")[0]
    assert said(ranks[0]).count("(host") == 2


@pytest.mark.parametrize(
    ("place", "where"),
    [
        (lambda late: late.leave(), "outside of the stepper, last in step 12 for 0 s"),
        (lambda late: late.enter(12), "in step 12 for 0 s"),
    ],
    ids=["outside", "inside"],
)
def test_a_rank_that_lives_and_has_not_come_is_late(ranks, place, where):
    place(ranks[1])
    for other in (ranks[0], ranks[2]):
        other.enter(13)
    line = said(ranks[0])
    assert line.startswith("rank 1 (host")
    assert "has not come to a collective" in line
    assert where in line
    assert "which may take 60 s" in line


def test_a_rank_in_the_same_step_that_has_begun_fewer_collectives_is_late(ranks):
    """As one that hangs in its closure, while the others are in backward."""
    ranks[0].calls = ranks[2].calls = 119.0
    ranks[1].calls = 118.0
    assert said(ranks[0]).startswith("rank 1 (host")


def test_a_rank_whose_script_failed_is_named_with_its_error(ranks):
    ranks[1].say("OutOfMemoryError: CUDA out of memory")
    line = said(ranks[2])
    assert "rank 1 (host" in line
    assert "failed in step 12: OutOfMemoryError: CUDA out of memory. The others cannot go on" in line


def test_a_rank_that_had_fewer_batches_is_named(ranks):
    ranks[1].leave()
    ranks[1].say("")
    assert "came to the end of the script: last seen outside of the stepper, last in step 12" in said(ranks[0])


def test_a_rank_that_never_came_is_named(ranks):
    ranks[0].store.delete_key("rank/2")
    assert said(ranks[0]).startswith("rank 2: it has opened no process group")


def test_a_failure_with_everybody_well_is_of_the_network(ranks):
    line = said(ranks[0])
    assert line.startswith("a collective of rank 0 failed in step 12: [third_party/gloo")
    assert "all 3 ranks are alive and have come to it" in line


def test_who_only_fell_with_the_others_is_no_cause(ranks):
    ranks[2].say("HalfstepError: rank 1 is gone", is_victim=True)
    ranks[0].living[:] = [ranks[0]]
    assert said(ranks[0]).startswith("rank 1 (host")
    assert "rank 2" not in said(ranks[0])


def test_without_a_store_the_error_says_that_nobody_knows(ranks):
    class Gone:
        def __getattr__(self, name):
            raise RuntimeError("Connection reset by peer")

    ranks[0].store = Gone()
    assert "which rank is at fault is not known" in said(ranks[0])
    none = Progress(None, 0, 2)
    assert none.post() is False
    assert "is not known" in said(none)


def test_what_is_an_error_of_ranks():
    assert fault.is_of_ranks(CLOSED)
    assert fault.is_of_ranks(torch.distributed.DistBackendError("NCCL error"))
    assert not fault.is_of_ranks(RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)"))
    assert not fault.is_of_ranks(torch.OutOfMemoryError("CUDA out of memory"))


class Arrival:
    def __init__(self, has_come):
        self.query = lambda: has_come


@pytest.mark.parametrize(
    ("has_come", "timeout_s", "ends"), [(False, 0.0, True), (True, 0.0, False), (False, 60.0, False)]
)
def test_a_device_that_waits_too_long_ends_the_process(ranks, monkeypatch, has_come, timeout_s, ends):
    """What the thread of a rank on CUDA does, whose script no exception reaches."""
    ended = []
    monkeypatch.setattr(fault, "end_process", lambda progress, reason: ended.append(reason))
    ranks[0].timeout_s, ranks[0].pending = timeout_s, (Arrival(has_come), time.monotonic() - 1.0)
    ranks[0].living.pop(1)
    fault.end_if_overdue(ranks[0])
    assert [line.startswith("HalfstepError: rank 1 (") for line in ended] == [True] * ends


# Who is slow.


def looks(works, monkeypatch, num_looks=3):
    """Entries of rank 0 over ranks that work for so many ms in each step; a step takes 100."""
    store = distributed.HashStore()
    ranks = [Progress(store, rank, len(works), beat_s=60.0) for rank in range(len(works))]
    clock = [0.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: clock[0])
    own = pace.Pace(ranks[0], torch.device("cpu"), look_s=0.5)
    for look in range(num_looks):
        own.look()
        for each, work in zip(ranks, works, strict=True):
            for step in range(10):
                each.enter(10 * look + step + 1)
            each.work_s = lambda work=work, look=look: (look + 1) * 10 * work / 1000
            each.post()
        clock[0] += 1.0
    own.look()
    for each in ranks:
        each.close()
    monkeypatch.undo()
    return list(own.entries)


def test_the_slowest_rank_is_compared_to_the_median_of_the_others(monkeypatch):
    entries = looks([20.0, 22.0, 61.0, 24.0], monkeypatch)
    assert len(entries) == 3
    last = entries[-1]
    assert (last["slowest"], last["num_ranks"], last["step"]) == (2, 4, 30)
    assert last["slowest_ms"] == pytest.approx(61.0)
    assert last["others_ms"] == pytest.approx(22.0)
    assert last["step_ms"] == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("slowest", "told"),
    [
        ([(2, 61.0), (2, 61.0)], [2]),
        ([(2, 41.0), (2, 61.0)], []),  # 19 ms of 100 are under a fifth
        ([(2, 61.0), (1, 61.0)], []),  # a checkpoint here, an evaluation there
        ([(2, 61.0)], []),
    ],
)
def test_who_makes_the_others_wait_for_a_fifth_of_two_looks_is_told(slowest, told):
    guard = Guard(RunStart(0.0))
    guard.see(Step(1, 1.0, 2.0, 1.0))
    alerts = []
    for number, (rank, work_ms) in enumerate(slowest):
        entry = {"kind": "ranks", "time": 1.0, "step": 10 * number, "num_ranks": 4, "step_ms": 100.0, "others_ms": 22.0}
        alerts += guard.see({**entry, "slowest": rank, "slowest_host": "a", "slowest_ms": work_ms, "troubles": []})
    assert [alert.rule for alert in alerts] == ["slow-rank"] * len(told)
    assert [alert.message for alert in alerts] == [
        f"rank {rank} (host a) works 61 ms by itself in a step, the others 22 ms: they wait 39 ms of the 100 ms that "
        "it takes"
        for rank in told
    ]


def test_nobody_is_compared_before_all_have_made_ten_steps(monkeypatch):
    store = distributed.HashStore()
    ranks = [Progress(store, rank, 2, beat_s=60.0) for rank in range(2)]
    own = pace.Pace(ranks[0], torch.device("cpu"), look_s=0.0)
    own.look()
    for each, num in zip(ranks, (10, 9), strict=True):
        for step in range(num):
            each.enter(step + 1)
        each.post()
    own.look()
    assert not own.entries
    ranks[1].enter(10)
    ranks[1].post()
    own.look()
    assert len(own.entries) == 1
    for each in ranks:
        each.close()


def test_a_clock_counts_what_is_between_start_and_stop(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now[0])
    clock = pace.WorkClock(torch.device("cpu"))
    for time_, call in ((1, "start"), (2, "start"), (4, "stop"), (8, "stop"), (16, "start"), (32, "stop")):
        now[0] = time_
        getattr(clock, call)()
    assert clock.seconds() == 3 + 16


@pytest.mark.gpu
def test_a_clock_on_cuda_counts_the_device():
    clock = pace.WorkClock(torch.device("cuda"))
    for _ in range(2):
        clock.start()
        torch.cuda._sleep(20_000_000)
        clock.stop()
        torch.cuda.synchronize()
    assert clock.seconds() > 0.002  # the first of them, of 10 ms at 2 GHz


# Two ranks that go on.


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def make(engine, **options):
    torch.manual_seed(1)
    net = Net()
    if engine == "fsdp":
        fully_shard(net.body)
        model = fully_shard(net)
    else:
        model = DistributedDataParallel(net)
    alerts = []

    def keep(event):
        if isinstance(event, Alert):
            alerts.append((event.rule, event.rank, event.message))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, Stepper(model, optimizer, "bf16", sinks=[keep], **options), alerts


def nan_on_rank_1(steps):
    model, stepper, alerts = make("ddp")
    rank = distributed.get_rank()
    reasons = {}
    for step in range(1, 9):
        times = float("nan") if rank == 1 and step in steps else 1.0
        report = stepper.step(lambda times=times: times * model(torch.ones(4, 8)).float().square().mean())
        if not report.applied:
            reasons[step] = report.reason
    stepper.close()
    return [alert for alert in alerts if alert[0] == "bad-rank"], reasons, model.module.head.weight.detach()


def test_a_rank_with_nan_in_its_data_is_skipped_by_all_and_named_the_third_time(world2):
    (first, reasons, weights), (second, others, same) = world2.run(nan_on_rank_1, (3, 5, 6))
    assert list(reasons) == [3, 5, 6]
    assert reasons == others
    assert all(reason.startswith("the loss of rank 1 is not finite") for reason in reasons.values())
    assert torch.equal(weights, same)
    assert weights.isfinite().all()
    message = "the loss of rank 1 was not finite in 3 of the last 6 steps, and that of no other rank"
    assert first == [("bad-rank", 0, message)]
    assert second == [("bad-rank", 1, message)]


def test_twice_is_not_again_and_again(world2):
    (alerts, _, _), _ = world2.run(nan_on_rank_1, (3, 5))
    assert alerts == []


@contextlib.contextmanager
def looking(stepper):
    """Rank 0 looks at the ranks when all of them call what this gives, and at no other time."""
    progress, own = stepper.ranks.progress, stepper.ranks._pace
    beats, own._look_s = progress.on_beat, 0.0
    progress.on_beat, own._before = [], {}

    def look():
        progress.post()
        distributed.barrier()
        if progress.rank == 0:
            own.look()

    look()
    yield look
    progress.on_beat, own._look_s, progress.trouble = beats, pace.LOOK_S, ""


def full_disk_on_rank_1(folder):
    """Its log can write nothing from step 5 to step 12 on, and keeps two entries meanwhile."""
    from halfstep.watch import appender, log

    rank = distributed.get_rank()
    model, stepper, alerts = make("ddp", log=folder)
    write, most, is_full, losses = os.write, log.MOST_KEPT, False, []

    def full(file, data):
        if is_full and file == stepper._watcher.session._log._file._file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    def train(steps):
        for _ in range(steps):
            losses.append(stepper.step(lambda: model(torch.ones(4, 8)).float().square().mean()).loss)
        stepper._watcher.flush()

    with looking(stepper) as look:
        train(4)
        file = Path(folder) / f"rank-{rank:05d}.jsonl"
        wait_for(lambda: file.exists() and '"step":4,' in file.read_text())
        if rank == 1:
            appender.os.write, log.MOST_KEPT, is_full = full, 2, True
        train(8)
        wait_for(lambda: rank == 0 or stepper.ranks.progress.trouble)
        is_full = False
        appender.os.write, log.MOST_KEPT = write, most
        look()
        train(12)
    stepper.close()
    return losses, [alert for alert in alerts if alert[0] == "rank-trouble"]


def wait_for(condition):
    """For another thread, or a process."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def entries(folder, rank):
    text = (Path(folder) / f"rank-{rank:05d}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_rank_whose_disk_is_full_goes_on_and_rank_0_names_it(world2, tmp_path):
    (losses, alerts), (others, none) = world2.run(full_disk_on_rank_1, str(tmp_path / "log"))
    assert len(losses) == 24
    assert losses == others
    assert [entry["step"] for entry in entries(tmp_path / "log", 0) if entry["kind"] == "step"] == list(range(1, 25))
    steps = [entry["step"] for entry in entries(tmp_path / "log", 1) if entry["kind"] == "step"]
    (gap,) = [entry for entry in entries(tmp_path / "log", 1) if entry["kind"] == "gap"]
    assert steps[:4] == [1, 2, 3, 4]
    assert steps[-1] == 24
    assert gap["num_lost"] >= 24 - len(steps) > 0
    ((_, _, message),) = alerts
    assert message.startswith("rank 1 (host")
    assert "rank-00001.jsonl: No space left on device; the run goes on" in message
    assert none == []


def slow_rank_1(engine, folder):
    # A share that a machine with other work keeps to as well.
    watch = Watch(rules={"slow-rank": {"share": 0.05}})
    model, stepper, alerts = make(engine, log=folder, watch=watch)
    with looking(stepper) as look:
        for _ in range(2):
            for _ in range(10):
                if distributed.get_rank() == 1:
                    time.sleep(0.06)
                stepper.step(lambda: model(torch.ones(4, 8)).float().square().mean())
            look()
        for _ in range(2):
            stepper.step(lambda: model(torch.ones(4, 8)).float().square().mean())
    stepper.close()
    return [alert for alert in alerts if alert[0] == "slow-rank"]


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_rank_that_is_slow_is_named_with_what_the_others_wait(world2, tmp_path, engine):
    (alert,), none = world2.run(slow_rank_1, engine, str(tmp_path / "log"))
    assert none == []
    assert alert[:2] == ("slow-rank", 0)
    assert alert[2].startswith("rank 1 (host ")
    looks_ = [entry for entry in entries(tmp_path / "log", 0) if entry["kind"] == "ranks"]
    assert [entry["slowest"] for entry in looks_] == [1, 1]
    assert all(entry["slowest_ms"] > 60.0 for entry in looks_)
    assert all(entry["others_ms"] < entry["slowest_ms"] for entry in looks_)


# Jobs that end.


def torchrun(folder, fault, *options):
    environment = {
        **os.environ,
        "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options]
    return subprocess.Popen(
        [*launch, str(HERE / "reference" / "elastic.py"), str(folder), fault],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def end(process):
    """With its ranks, if it still runs: they have sessions of their own."""
    if process.poll() is None:
        process.terminate()
        process.communicate(timeout=60)


def ended(folder, fault, *options):
    process = torchrun(folder, fault, *options)
    try:
        said = process.communicate(timeout=300)[0]
    finally:
        end(process)
    return process.returncode, said


def reason(folder, rank):
    end = [entry for entry in entries(folder / "log", rank) if entry["kind"] == "end"]
    return end[-1].get("reason", end[-1]["state"]) if end else None


def test_a_job_whose_rank_is_killed_starts_again_and_loses_nothing_but_the_steps_since(world2, tmp_path):
    torn = tmp_path / "torn"
    torn.mkdir()
    status, output = ended(torn, "kill", "--max-restarts=1")
    assert status == 0, output
    # The one that was left ended with the name of the one that was killed, before it was started again.
    ends = [entry for entry in entries(torn / "log", 0) if entry["kind"] == "end"]
    assert [end["state"] for end in ends] == ["failed", "finished"]
    pid = next(entry["pid"] for entry in entries(torn / "log", 1) if entry["kind"] == "run")
    assert f"pid {pid}) is gone" in ends[0]["reason"]
    assert ends[0]["reason"].startswith("HalfstepError: rank 1 (host ")
    assert "is gone" in output
    # It is as if nothing had been.
    _, weights = world2.run(undisturbed, str(tmp_path / "whole"))[0]
    saved = torch.load(torn / "weights.pt")
    assert all(torch.equal(saved[name], weight) for name, weight in weights.items())
    assert [int(step) for step in json.loads((torn / "losses.json").read_text())] == list(range(9, 15))
    for rank in (0, 1):
        lines = entries(torn / "log", rank)
        (seam,) = [at for at, entry in enumerate(lines) if entry["kind"] == "seam"]
        assert lines[seam]["step"] == 8
        kept = [entry for entry in lines[:seam] if entry["kind"] == "step" and entry["step"] <= 8]
        kept += [entry for entry in lines[seam:] if entry["kind"] == "step"]
        whole = {e["step"]: e["loss"] for e in entries(tmp_path / "whole" / "log", rank) if e["kind"] == "step"}
        if rank == 1:  # killed with the last steps in memory
            whole = {step: loss for step, loss in whole.items() if step in {entry["step"] for entry in kept}}
        assert {entry["step"]: entry["loss"] for entry in kept} == whole
        assert [step for step in whole if step > 8] == list(range(9, 15))


def undisturbed(folder):
    return elastic.train(folder, "none", distributed.get_rank())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("hang", "has not come to a collective: outside of the stepper, last in step 9 for"),
        ("raise", "failed in step 10: ValueError: no such token"),
        ("leave", "came to the end of the script: last seen"),
    ],
)
def test_the_others_of_a_rank_that_stops_end_with_its_name(tmp_path, fault, words):
    status, output = ended(tmp_path, fault)
    assert status == 1
    assert words in output
    assert reason(tmp_path, 0).startswith("HalfstepError: rank 1 (host ")
    assert words in reason(tmp_path, 0)
    assert "weights.pt" not in os.listdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_job_that_is_ended_from_outside_leaves_whole_logs(tmp_path, number):
    process = torchrun(tmp_path, "wait")
    try:
        wait_for((tmp_path / "waits").exists)
        time.sleep(0.5)
        process.send_signal(number)
        output = process.communicate(timeout=60)[0]
    finally:
        end(process)
    assert process.returncode != 0
    for rank in (0, 1):
        steps = [entry["step"] for entry in entries(tmp_path / "log", rank) if entry["kind"] == "step"]
        assert steps == list(range(1, 10)), output
        assert "stopped by" in reason(tmp_path, rank), output
