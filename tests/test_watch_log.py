"""The log: what is put is in the file, whatever the disk does, and the training process notices nothing."""

import errno
import json
import math
import os
import queue
import random
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from itertools import pairwise

import pytest

from halfstep.errors import HalfstepError
from halfstep.watch import appender, feed, log
from halfstep.watch.appender import Appender
from halfstep.watch.entry import Step, is_entry, line_of
from halfstep.watch.log import Log, file_of
from halfstep.watch.reading import Tail, read_entries

RUN = {"kind": "run", "time": 1.0, "session": "a"}
PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """A beat, and the wait before a write, that tests can afford."""
    monkeypatch.setattr(log, "_BEAT_S", 0.01)
    monkeypatch.setattr(log, "_GATHER_S", 0.001)


@pytest.fixture
def open_log(tmp_path):
    """Makes logs in one folder, and ends them; ``lost`` has what they told."""
    made = []

    def make(folder=tmp_path / "run", rank=0, on_idle=lambda: None, exporters=(), on_lost=None):
        made.append(Log(folder, rank, on_lost or make.lost.append, on_idle, exporters))
        return made[-1]

    make.lost = []
    make.path = file_of(tmp_path / "run", 0)
    yield make
    for one in made:
        one.close()
    for one in made:  # whatever state a test that fails has left them in
        one._thread.join(PATIENCE_S)
        one._file.close()
        for each in one._feeds:
            each.end()
            each._thread.join(PATIENCE_S)


@pytest.fixture
def may_go(open_log):
    """What hangs waits for this event, which comes at the latest before the logs are ended."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def open_appender():
    made = []

    def make(path):
        made.append(Appender(path))
        made[-1].open()
        return made[-1]

    yield make
    for one in made:
        one.close()


def until(condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def step(number, **values):
    return Step(number, 100.0 + number, 1.0, 0.5, **values)


def steps_in(path):
    return [entry["step"] for _, entry in Tail(path).read() if entry["kind"] == "step"]


def kinds_in(path):
    return [entry["kind"] for _, entry in Tail(path).read()]


class Disk:
    """Stands for os.write: takes ``room`` bytes and then fails with ``fault``."""

    def __init__(self, monkeypatch, fault=errno.ENOSPC, room=0):
        self.fault, self.room, self._write = fault, room, os.write
        monkeypatch.setattr(appender.os, "write", self)

    def __call__(self, file, data):
        if not self.room:
            raise OSError(self.fault, os.strerror(self.fault))
        num_written = self._write(file, data[: self.room])
        self.room -= num_written
        return num_written


# What is written.


def test_what_is_put_is_in_the_file_in_order(open_log):
    one = open_log()
    one.put(RUN)
    for number in range(1, 2501):
        one.put(step(number))
    end = {"kind": "end", "time": 3.0, "state": "finished"}
    one.put(end)
    one.close()
    entries = list(read_entries(open_log.path.parent, 0))
    assert entries == [RUN, *(step(number).to_entry() for number in range(1, 2501)), end]
    assert open_log.lost == []


def test_a_reader_sees_an_entry_while_the_run_goes_on(open_log):
    one = open_log()
    one.put(step(1))
    until(lambda: steps_in(open_log.path) == [1])


def test_what_is_put_after_the_end_goes_nowhere(open_log):
    one = open_log()
    one.put(step(1))
    one.close()
    one.close()
    one.put(step(2))
    assert steps_in(open_log.path) == [1]
    assert open_log.lost == []


def test_ranks_have_files_of_their_own(open_log):
    for rank in (0, 3):
        open_log(rank=rank).put(step(rank))
    for rank in (0, 3):
        until(lambda rank=rank: steps_in(file_of(open_log.path.parent, rank)) == [rank])


def test_numbers_that_are_not_finite_are_strict_json(open_log):
    one = open_log()
    one.put(Step(1, 1.0, math.nan, -math.inf, nonfinite_share=math.inf))
    one.put({"kind": "ranges", "time": 1.0, "step": 1, "deep": [{"of": (math.nan, 1.5)}]})
    one.close()

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    first, second = (json.loads(line, parse_constant=refuse) for line in open_log.path.read_text().splitlines())
    assert (first["loss"], first["grad_norm"], first["nonfinite_share"]) == ("NaN", "-Infinity", "Infinity")
    assert second["deep"] == [{"of": ["NaN", 1.5]}]
    again = Step.from_entry(first)
    assert math.isnan(again.loss)
    assert again.grad_norm == -math.inf


def test_what_json_cannot_hold_is_left_out_and_told_once(open_log):
    one = open_log()
    circle = {"kind": "ranges", "time": 1.0, "step": 1}
    circle["self"] = circle
    for bad in (circle, {"kind": "updates", "of": {1, 2}}, {"kind": "updates", "of": {1, 2}}):
        one.put(bad)
    one.put(step(1))
    one.close()
    assert steps_in(open_log.path) == [1]
    assert ["kind ranges" in line or "kind updates" in line for line in open_log.lost] == [True, True]


# An entry as text.


def test_a_number_of_fp32_comes_back_to_the_bit_from_nine_digits():
    draw = random.Random(0)
    patterns = [draw.getrandbits(32) for _ in range(4000)]
    patterns += [0, 1, 0x80000000, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000, 0x3DCCCCCD]
    for pattern in patterns:
        (value,) = struct.unpack("<f", struct.pack("<I", pattern))
        entry = json.loads(line_of(Step(1, 1.0, value, value).to_entry()))
        again = Step.from_entry(entry).loss
        if math.isnan(value):
            assert math.isnan(again)
            continue
        assert struct.pack("<d", again) == struct.pack("<d", value)
        if math.isfinite(value):
            digits = f"{entry['loss']!r}".partition("e")[0].replace(".", "").strip("-0")
            assert len(digits) <= 9


def test_a_number_of_fp64_keeps_all_its_digits():
    draw = random.Random(1)
    values = [draw.uniform(0, 10) for _ in range(2000)] + [0.1, 1 / 3, 1e300, 5e-324, 1e-40, 16777217.0, -2.2]
    for value in values:
        entry = json.loads(line_of(Step(1, value, value, value).to_entry()))
        again = Step.from_entry(entry)
        assert (again.loss, again.grad_norm, again.time) == (value, value, value)


def test_a_step_comes_back_whole_and_what_is_usual_is_left_out():
    unusual = Step(
        7, 1796072345.1234567, 0.25, 3.5, 1024.0, False, "why", 2, None, 0.125, ("a.weight", "b"), 4096.0, 312.5
    )
    assert Step.from_entry(json.loads(line_of(unusual.to_entry()))) == unusual
    assert step(3).to_entry() == {"kind": "step", "step": 3, "time": 103.0, "loss": 1.0, "grad_norm": 0.5}
    assert Step.from_entry(step(3).to_entry()) == step(3)


@pytest.mark.parametrize(
    "change",
    [
        {"step": None},
        {"step": -1},
        {"step": 1.5},
        {"step": True},
        {"step": 2**63},
        {"loss": "nan"},
        {"loss": None},
        {"loss": 10**400},
        {"grad_norm": []},
        {"time": {}},
        {"scale": "1"},
        {"applied": 1},
        {"parameters": ["a", 1]},
        {"parameters": "a"},
        {"count": [1]},
        {"kind": None},
        {"kind": ["step"]},
        {"kind": "seam", "step": "1"},
        {"kind": "layers", "parameters": ["a"], "norms": ["a"]},
        {"kind": "overflow", "scale": None},
        {"kind": "alert"},
    ],
)
def test_what_no_reader_could_use_is_no_entry(change):
    entry = step(1).to_entry()
    assert is_entry(entry)
    assert not is_entry({**entry, **change})


@pytest.mark.parametrize("key", ["kind", "step", "time", "loss", "grad_norm"])
def test_a_step_needs_its_keys(key):
    entry = step(1).to_entry()
    del entry[key]
    assert not is_entry(entry)


def test_what_is_optional_may_be_null_and_a_kind_to_come_may_hold_anything():
    assert is_entry({**step(1).to_entry(), "nonfinite_share": None, "reason": None, "loss": "-Infinity", "count": 3})
    assert is_entry({"kind": "of a later version", "step": "what"})
    assert not is_entry([step(1).to_entry()])


# Faults of the disk.


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_fails_in_the_middle_of_a_line_loses_nothing(open_log, monkeypatch, fault):
    one = open_log()
    one.put(RUN)
    one.put(step(1))
    until(lambda: steps_in(open_log.path) == [1])
    disk = Disk(monkeypatch, fault, room=25)
    for number in range(2, 6):
        one.put(step(number))
    until(lambda: open_log.lost)
    until(lambda: disk.room == 0)
    assert not open_log.path.read_bytes().endswith(b"\n"), "the line is torn"
    disk.room = 10**9
    one.put(step(6))
    until(lambda: steps_in(open_log.path) == [1, 2, 3, 4, 5, 6])
    assert kinds_in(open_log.path) == ["run"] + 6 * ["step"]
    tail = Tail(open_log.path)
    tail.read()
    assert tail.num_torn == 1
    assert open_log.lost == [
        f"log {open_log.path}: {os.strerror(fault)}; the run goes on, and its log as soon as it can be written"
    ]


def test_every_place_to_tear_loses_nothing_and_doubles_nothing(tmp_path, monkeypatch, open_appender):
    lines = [line_of(step(number).to_entry()).encode() for number in (1, 2, 3)]
    real = os.write
    for room in range(sum(map(len, lines)) + 4):
        disk = Disk(monkeypatch, room=room)
        one = open_appender(tmp_path / f"{room}.jsonl")
        num_written, fault = one.write(lines)
        disk.room = 10**9
        while fault is not None:
            one.open()
            rest = lines[num_written:]
            more, fault = one.write(rest) if rest else (0, None)
            num_written += more
        if num_written == len(lines) and one.is_open:
            one.write([b'{"kind":"end","state":"finished"}'])
        one.close()
        assert kinds_in(tmp_path / f"{room}.jsonl") == ["step", "step", "step", "end"], room
        assert steps_in(tmp_path / f"{room}.jsonl") == [1, 2, 3], room
        monkeypatch.setattr(appender.os, "write", real)


def test_a_disk_that_stays_full_keeps_the_last_entries_and_a_gap_counts_the_others(open_log, monkeypatch):
    monkeypatch.setattr(log, "MOST_KEPT", 50)
    one = open_log()
    one.put(RUN)
    until(lambda: kinds_in(open_log.path) == ["run"])
    disk = Disk(monkeypatch)
    for first in range(1, 201, 40):
        for number in range(first, first + 40):
            one.put(step(number))
        until(lambda number=number: one._queue.empty() and len(one._lines) == min(50, number))
    disk.room = 10**9
    until(lambda: steps_in(open_log.path))
    one.close()
    entries = list(read_entries(open_log.path.parent, 0))
    assert [entry["kind"] for entry in entries] == ["run", "gap"] + 50 * ["step"]
    assert entries[1]["num_lost"] == 150
    assert steps_in(open_log.path) == list(range(151, 201))
    assert len(open_log.lost) == 1


def test_a_disk_that_stays_full_keeps_the_last_lines_up_to_a_number_of_bytes(open_log, monkeypatch):
    def layers(number):
        return {"kind": "layers", "time": 1.0, "step": number, "parameters": ["w"], "norms": [number] * 50}

    sizes = [len(line_of(layers(number))) for number in range(10, 30)]
    monkeypatch.setattr(log, "MOST_BYTES", sum(sizes[-3:]) + 1)
    one = open_log()
    one.put(RUN)
    for number in range(10, 20):
        one.put(layers(number))
    until(lambda: len(kinds_in(open_log.path)) == 11)  # more at once than would be kept: the disk takes it
    assert one._num_bytes == 0
    disk = Disk(monkeypatch)
    for number in range(20, 30):
        one.put(layers(number))
    until(lambda: one._num_lost == 7)
    assert one._num_bytes == sum(map(len, one._lines)) == sum(sizes[-3:])
    disk.room = 10**9
    one.close()
    entries = [entry for _, entry in Tail(open_log.path).read()]
    assert [entry["kind"] for entry in entries] == ["run"] + 10 * ["layers"] + ["gap"] + 3 * ["layers"]
    assert entries[-4]["num_lost"] == 7
    assert [entry["step"] for entry in entries[-3:]] == [27, 28, 29]
    assert one._num_bytes == 0


def test_a_lost_disk_is_tried_once_a_beat(open_log, monkeypatch):
    monkeypatch.setattr(log, "_BEAT_S", 60.0)
    tries = []

    def fail(file, data):
        tries.append(bytes(data))
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(appender.os, "write", fail)
    one = open_log()
    for number in range(1, 6):
        one.put(step(number))
        until(lambda number=number: len(one._lines) == number)
    assert len(tries) == 1
    one.close()
    assert len(tries) == 2, "once more at the end"


def test_the_line_of_the_run_outlives_a_disk_that_is_full_from_the_start(open_log, monkeypatch):
    monkeypatch.setattr(log, "MOST_KEPT", 5)
    disk = Disk(monkeypatch)
    one = open_log()
    one.put(RUN)
    until(lambda: open_log.lost)
    for number in range(1, 11):
        one.put(step(number))
    until(lambda: one._num_lost == 5)
    disk.room = 10**9
    one.close()
    assert kinds_in(open_log.path) == ["run", "gap"] + 5 * ["step"]
    assert next(read_entries(open_log.path.parent, 0)) == RUN


def test_a_disk_that_is_full_to_the_end_is_told(open_log, monkeypatch):
    Disk(monkeypatch)
    one = open_log()
    for number in range(1, 4):
        one.put(step(number))
    one.close()
    assert [line.partition("jsonl: ")[2] for line in open_log.lost] == [
        "No space left on device; the run goes on, and its log as soon as it can be written",
        "its last 3 lines could not be written",
    ]


def test_the_devices_own_full_disk(open_log):
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    open_log.path.parent.mkdir()
    open_log.path.symlink_to("/dev/full")
    one = open_log()
    one.put(step(1))
    until(lambda: open_log.lost)
    one.close()
    assert "No space left on device" in open_log.lost[0]


def test_a_write_that_hangs_holds_nobody_up(open_log, monkeypatch, may_go):
    monkeypatch.setattr(log, "MOST_KEPT", 20)
    one = open_log()
    one.put(RUN)
    until(lambda: kinds_in(open_log.path) == ["run"])
    hangs = threading.Event()
    real = os.write

    def hang(file, data):
        hangs.set()
        assert may_go.wait(PATIENCE_S)
        return real(file, data)

    monkeypatch.setattr(appender.os, "write", hang)
    one.put(step(1))
    assert hangs.wait(PATIENCE_S)
    for number in range(2, 102):
        one.put(step(number))
    assert one._queue.qsize() <= 20
    may_go.set()
    until(lambda: 101 in steps_in(open_log.path))
    one.close()
    kinds = kinds_in(open_log.path)
    assert steps_in(open_log.path) == [1, *range(82, 102)]
    assert kinds.count("gap") == 1
    assert next(e for _, e in Tail(open_log.path).read() if e["kind"] == "gap")["num_lost"] == 80
    assert open_log.lost == []


def test_the_end_does_not_wait_for_a_write_that_hangs(open_log, monkeypatch, may_go):
    hangs = threading.Event()
    real = os.write

    def hang(file, data):
        hangs.set()
        assert may_go.wait(PATIENCE_S)
        return real(file, data)

    monkeypatch.setattr(appender.os, "write", hang)
    exporter = Collector()
    one = open_log(exporters=[exporter])
    one.put(step(1))
    assert hangs.wait(PATIENCE_S)
    one.close(timeout_s=0.02)
    assert open_log.lost == [
        f"log {open_log.path}: its last lines were not written within 0.02 s, and nobody waits for them"
    ]
    assert one._thread.daemon
    may_go.set()
    one._thread.join(PATIENCE_S)
    assert steps_in(open_log.path) == [1]
    assert one._feeds[0].join(PATIENCE_S)
    assert (len(exporter.entries), exporter.is_closed, len(open_log.lost)) == (1, 1, 1)


# A file that is taken away.


@pytest.mark.parametrize("what", ["file", "folder", "moved"])
def test_a_log_that_was_taken_away_goes_on_in_a_new_file(open_log, tmp_path, what):
    one = open_log()
    one.put(RUN)
    one.put(step(1))
    until(lambda: steps_in(open_log.path) == [1])
    if what == "moved":
        open_log.path.parent.rename(tmp_path / "elsewhere")
    else:
        open_log.path.unlink()
    if what == "folder":
        open_log.path.parent.rmdir()
    one.put(step(2))
    until(lambda: open_log.path.exists() and steps_in(open_log.path) == [2])
    first = next(read_entries(open_log.path.parent, 0))
    assert (first["kind"], first["session"]) == ("run", "a")
    assert first["time"] > RUN["time"], "the time that it was written, now"
    assert open_log.lost == [f"log {open_log.path}: it was deleted or moved; the run goes on in a new one"]
    if what == "moved":
        assert steps_in(tmp_path / "elsewhere" / open_log.path.name) == [1]


def test_a_folder_that_became_a_file_is_a_lost_log(open_log):
    one = open_log()
    one.put(step(1))
    until(lambda: steps_in(open_log.path) == [1])
    open_log.path.unlink()
    open_log.path.parent.rmdir()
    open_log.path.parent.write_text("in the way")
    one.put(step(2))
    until(lambda: len(open_log.lost) == 2)
    open_log.path.parent.unlink()
    until(lambda: open_log.path.exists() and steps_in(open_log.path) == [2])


def test_the_torn_line_of_a_process_before_stands_alone(open_log):
    open_log.path.parent.mkdir()
    open_log.path.write_bytes(line_of(step(1).to_entry()).encode() + b'\n{"kind":"step","st')
    one = open_log()
    one.put(step(2))
    one.close()
    assert steps_in(open_log.path) == [1, 2]


# Who else writes.


SECOND = """
import sys
from halfstep.errors import HalfstepError
from halfstep.watch.log import Log
try:
    Log(sys.argv[1], 0, print, print).close()
except HalfstepError as error:
    print(error)
"""


def test_a_second_process_is_refused_while_the_first_lives(open_log):
    one = open_log()

    def second():
        command = [sys.executable, "-S", "-c", SECOND, str(open_log.path.parent)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=ENVIRONMENT).stdout

    assert second() == (
        f"log {open_log.path}: another process that lives writes to it. Name another folder, or end that process.\n"
    )
    one.put(step(1))
    one.close()
    assert second() == ""
    assert steps_in(open_log.path) == [1]


def test_a_file_system_without_locks_is_used_all_the_same(open_log, monkeypatch):
    import fcntl

    def none(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    open_log().put(step(1))
    until(lambda: steps_in(open_log.path) == [1])


def test_a_file_that_is_refused_is_not_left_open(tmp_path, monkeypatch, open_appender):
    first, second = open_appender(tmp_path / "a.jsonl"), Appender(tmp_path / "a.jsonl")
    files, real = [], os.open
    monkeypatch.setattr(appender.os, "open", lambda *arguments: files.append(real(*arguments)) or files[-1])
    with pytest.raises(HalfstepError):
        second.open()
    first.close()
    assert not second.is_open
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(files[0])


def test_a_log_that_another_process_took_while_it_was_lost_is_given_up(open_log, open_appender):
    one = open_log()
    one.put(step(1))
    until(lambda: steps_in(open_log.path) == [1])
    open_log.path.unlink()
    other = open_appender(open_log.path)
    other.write([b'{"kind":"step","step":9,"time":1.0,"loss":1.0,"grad_norm":1.0}'])
    one.put(step(2))
    until(lambda: len(open_log.lost) == 2)
    other.close()
    one.put(step(3))
    one.close()
    assert steps_in(open_log.path) == [9]
    assert (list(one._lines), one._num_bytes) == ([], 0)
    assert open_log.lost[1].endswith("another process that lives writes to it; this run keeps no log any more")


def test_a_second_log_of_this_process_ends_the_first(open_log):
    first = open_log()
    first.put(step(1))
    second = open_log()
    first.put(step(2))
    first.put(step(3))
    second.put(step(4))
    second.close()
    first.close()
    assert steps_in(open_log.path) == [1, 4]
    assert open_log.lost == [
        f"log {open_log.path}: a second log of this process writes it from now on; what this one is told is not kept"
    ]


def pipe():
    return [os.fdopen(file, mode, buffering=0) for file, mode in zip(os.pipe(), ("rb", "wb"), strict=True)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_writes_nothing_and_keeps_no_lock(open_log):
    one = open_log()
    one.put(step(1))
    until(lambda: steps_in(open_log.path) == [1])
    (end, closes_end), (ready, says_ready) = pipe(), pipe()
    with end, closes_end, ready, says_ready:
        child = os.fork()
        if child == 0:
            try:
                closes_end.close()
                one.put(step(2))
                one.close()
                says_ready.write(b"!")
                end.read(1)  # lives on until the parent closes its side
            finally:
                os._exit(one._queue.qsize())
        says_ready.close()
        assert ready.read(1) == b"!"
        one.put(step(3))
        one.close()
        again = open_log()  # the child lives and would have the lock
        again.put(step(4))
        again.close()
    assert os.waitpid(child, 0)[1] == 0
    assert steps_in(open_log.path) == [1, 3, 4]


@pytest.mark.parametrize("what", ["file in the way", "no right"])
def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(open_log, tmp_path, monkeypatch, what):
    if what == "file in the way":
        (tmp_path / "run").write_text("")
        why = os.strerror(errno.EEXIST)
    else:
        why = os.strerror(errno.EACCES)

        def refuse(*_):
            raise PermissionError(errno.EACCES, why)

        monkeypatch.setattr(appender.os, "open", refuse)
    with pytest.raises(HalfstepError) as error:
        open_log()
    assert str(error.value) == f"log {open_log.path}: it cannot be written ({why}). Name a folder that can be written."


# Exporters and the beat.


class Collector:
    def __init__(self, fails_at=None):
        self.entries, self.is_closed, self.threads, self.fails_at = [], 0, [], fails_at

    def write(self, entry):
        self.threads.append(threading.current_thread())
        if len(self.entries) == self.fails_at:
            raise SystemExit("enough\nof it")
        self.entries.append(entry)

    def close(self):
        self.threads.append(threading.current_thread())
        self.is_closed += 1


class Hanging(Collector):
    """A tool that does not answer until it ``may_go``."""

    def __init__(self, may_go):
        super().__init__()
        self.may_go, self.hangs = may_go, threading.Event()

    def write(self, entry):
        self.hangs.set()
        assert self.may_go.wait(PATIENCE_S)
        super().write(entry)


def test_exporters_get_every_entry_from_a_thread_each_and_one_that_fails_is_dropped(open_log, monkeypatch):
    good, bad = Collector(), Collector(fails_at=3)
    one = open_log(exporters=[bad, good])
    Disk(monkeypatch)  # a lost file is no reason
    for number in range(1, 11):
        one.put(step(number))
    one.close()
    assert good.entries == [step(number).to_entry() for number in range(1, 11)]
    assert bad.entries == good.entries[:3]
    assert (good.is_closed, bad.is_closed) == (1, 1)
    assert (len(set(good.threads)), len(set(bad.threads))) == (1, 1)
    assert len({*good.threads, *bad.threads, one._thread, threading.current_thread()}) == 4
    told = [line.partition("jsonl: ")[2] for line in open_log.lost]
    assert told.count("exporter Collector, which gets nothing more, failed with SystemExit: enough of it") == 1
    assert len(told) == 3


def test_an_exporter_that_hangs_holds_up_neither_the_file_nor_the_clock_nor_another(open_log, may_go):
    ticks, good, hanging = [], Collector(), Hanging(may_go)
    one = open_log(on_idle=lambda: ticks.append(1), exporters=[hanging, good])
    one.put(step(1))
    assert hanging.hangs.wait(PATIENCE_S)
    num_ticks = len(ticks)
    for number in range(2, 11):
        one.put(step(number))
    until(lambda: steps_in(open_log.path) == list(range(1, 11)))
    until(lambda: len(good.entries) == 10)
    until(lambda: len(ticks) > num_ticks + 3)
    assert hanging.entries == []
    may_go.set()
    one.close()
    assert hanging.entries == good.entries
    assert (hanging.is_closed, open_log.lost) == (1, [])


def test_the_end_waits_for_exporters_as_long_as_it_may_and_names_those_it_leaves(open_log, monkeypatch, may_go):
    waits, real = [], feed.Feed.join
    monkeypatch.setattr(feed.Feed, "join", lambda self, timeout_s: waits.append(timeout_s) or real(self, timeout_s))
    good, hanging, endless = Collector(), Hanging(may_go), Collector()
    endless.close = lambda: may_go.wait(PATIENCE_S)
    one = open_log(exporters=[hanging, endless, good])
    one.put(step(1))
    one.put(step(2))
    until(lambda: steps_in(open_log.path) == [1, 2])
    assert hanging.hangs.wait(PATIENCE_S)
    until(lambda: len(good.entries) == len(endless.entries) == 2)
    one.close(timeout_s=0.3)
    assert not one._thread.is_alive(), "the file has ended"
    assert 0.3 >= waits[0] > 0.01 > waits[1] >= waits[2], "all in one time"
    assert open_log.lost == [
        f"log {open_log.path}: exporter {name} has not ended within 0.3 s; what it had not taken yet is lost"
        for name in ("Hanging", "Collector")
    ]
    assert all(each._thread.daemon for each in one._feeds)
    assert good.is_closed == 1


def test_a_slow_exporter_misses_the_oldest_entries_and_the_number_is_told(open_log, monkeypatch, may_go):
    monkeypatch.setattr(feed, "MOST_WAITING", 5)
    hanging = Hanging(may_go)
    one = open_log(exporters=[hanging])
    one.put(step(1))
    assert hanging.hangs.wait(PATIENCE_S)
    for number in range(2, 22):
        one.put(step(number))
    until(lambda: one._feeds[0]._num_lost == 15)
    assert [line.partition("jsonl: ")[2] for line in open_log.lost] == [
        "exporter Hanging is too slow: of the entries that wait for it, the last 5 are kept"
    ]
    may_go.set()
    one.close()
    assert [entry["step"] for entry in hanging.entries] == [1, 17, 18, 19, 20, 21]
    assert hanging.is_closed == 1
    assert steps_in(open_log.path) == list(range(1, 22))
    assert [line.partition("jsonl: ")[2] for line in open_log.lost[1:]] == [
        "exporter Hanging was too slow: it has missed 15 lines of the log"
    ]


def test_nothing_waits_for_an_exporter_that_has_failed(open_log, monkeypatch):
    monkeypatch.setattr(feed, "MOST_WAITING", 5)
    bad = Collector(fails_at=0)
    one = open_log(exporters=[bad])
    one.put(step(1))
    until(lambda: bad.is_closed)
    for number in range(2, 22):
        one.put(step(number))
    until(lambda: 21 in steps_in(open_log.path))
    one.close()
    assert one._feeds[0]._queue.qsize() == 1, "the end"
    assert len(open_log.lost) == 1


def test_an_exporter_whose_end_fails_is_told(open_log):
    one = Collector()

    def fail():
        raise ConnectionError("no route")

    one.close = fail
    open_log(exporters=[one]).close()
    assert [line.partition("jsonl: ")[2] for line in open_log.lost] == [
        "the end of exporter Collector failed with ConnectionError: no route"
    ]


def test_a_log_may_be_closed_from_an_exporters_thread(open_log):
    good, closing = Collector(), Collector()
    write = closing.write
    closing.write = lambda entry: (one.close(), write(entry))
    one = open_log(exporters=[closing, good])
    one.put(step(1))
    for each in one._feeds:
        assert each.join(PATIENCE_S)
    assert (len(closing.entries), closing.is_closed) == (len(good.entries), good.is_closed) == (1, 1)
    assert steps_in(open_log.path) == [1]
    assert open_log.lost == []


def test_on_idle_comes_about_once_a_beat_also_while_entries_flow(open_log):
    calls = []

    def idle():
        calls.append(time.monotonic())
        raise RuntimeError("the same each time")

    one = open_log(on_idle=idle)
    number, end = 0, time.monotonic() + PATIENCE_S
    while len(calls) < 5 and time.monotonic() < end:
        number += 1
        one.put(step(number))
    assert len(calls) >= 5
    one.close()
    assert steps_in(open_log.path) == list(range(1, number + 1))
    assert min(late - early for early, late in pairwise(calls)) >= 0.009
    assert len(open_log.lost) == 1


def test_a_log_may_be_closed_from_its_own_thread(open_log):
    one = open_log(on_idle=lambda: one.close())
    one.put(step(1))
    one._thread.join(PATIENCE_S)
    assert not one._thread.is_alive()
    assert steps_in(open_log.path) == [1]
    assert open_log.lost == []


def test_on_lost_may_fail(open_log, monkeypatch):
    Disk(monkeypatch)
    told = queue.SimpleQueue()

    def fail(line):
        told.put(line)
        raise RuntimeError("no")

    one = open_log(on_lost=fail)
    one.put(step(1))
    told.get(timeout=PATIENCE_S)
    one.close()
    assert not one._thread.is_alive()


# A process that ends, or is killed.


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
WRITER = """
import sys, time
from halfstep.watch import appender
from halfstep.watch.entry import RunStart, Step
from halfstep.watch.session import Session
from halfstep.watch.settings import Watch

folder, first, last, kills = sys.argv[1], *map(int, sys.argv[2:])
session = Session(RunStart(time=time.time()), Watch(), folder, print)
for number in range(first, last + 1):
    session.see(Step(number, time.time(), 1.0, 0.5))
if kills:
    real = appender.os.write
    def tear(file, data):
        text = bytes(data)
        real(file, text[: text.rindex(b'"step":') + 3])  # in the middle of the last line
        os.kill(os.getpid(), 9)
    import os
    time.sleep(0.1)
    appender.os.write = tear
    session.see(Step(last + 1, time.time(), 1.0, 0.5))
    session.see(Step(last + 2, time.time(), 1.0, 0.5))
    time.sleep(60)
"""


def run_writer(folder, first, last, kills):
    command = [sys.executable, "-S", "-c", WRITER, str(folder), str(first), str(last), str(kills)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)


def test_a_killed_process_leaves_a_log_that_the_next_goes_on_with(tmp_path):
    killed = run_writer(tmp_path, 1, 40, kills=1)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    raw = file_of(tmp_path, 0).read_bytes()
    assert raw
    assert not raw.endswith(b"\n")
    before = list(read_entries(tmp_path, 0))
    assert [entry["kind"] for entry in before] == ["run"] + 41 * ["step"]
    assert steps_in(file_of(tmp_path, 0)) == list(range(1, 42))
    # The interpreter's end closes a log that nobody has closed.
    after = run_writer(tmp_path, 41, 60, kills=0)
    assert after.returncode == 0, after.stderr
    assert after.stderr == ""
    entries = list(read_entries(tmp_path, 0))
    assert entries[: len(before)] == before
    assert [entry["kind"] for entry in entries[len(before) :]] == ["run"] + 20 * ["step"]
    assert steps_in(file_of(tmp_path, 0)) == [*range(1, 42), *range(41, 61)]


def test_a_process_ends_although_its_disk_hangs(tmp_path):
    script = textwrap.dedent(
        f"""
        import time
        from halfstep.watch import appender
        from halfstep.watch.log import Log
        appender.os.write = lambda file, data: time.sleep(600)
        one = Log({str(tmp_path)!r}, 0, print, print)
        one.put({{"kind": "end", "state": "finished"}})
        one.close(0.1)
        """
    )
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, timeout=60, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
