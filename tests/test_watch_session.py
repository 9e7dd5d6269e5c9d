"""The session: every alert reaches everybody once, from whichever thread, and only the start can fail."""

import json
import logging
import threading
import time
from collections import Counter

import pytest

from halfstep.errors import HalfstepError
from halfstep.events import Alert
from halfstep.watch import log, session
from halfstep.watch.entry import RunStart, Step
from halfstep.watch.log import file_of
from halfstep.watch.reading import Tail, read_entries
from halfstep.watch.session import Session
from halfstep.watch.settings import Watch

RUN = RunStart(time=1.0, session="a")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(log, "_BEAT_S", 0.001)
    monkeypatch.setattr(log, "_GATHER_S", 0.001)


def step(number):
    return Step(number, 100.0 + number, 1.0, 0.5)


def alert(number, message="it happened", action="Look at it."):
    return Alert("a-rule", number, "warning", message, action)


class StandIn:
    """Stands for the guard: an alert for every step, and for every ``every``-th look of the clock."""

    def __init__(self, run, settings, golden):
        self.entries, self.ticks, self.inside = [], 0, 0
        self.has_ticked = threading.Event()

    def see(self, entry):
        return self._in_turn(lambda: [alert(entry.step)] if isinstance(entry, Step) else [], entry)

    def tick(self, now):
        self.ticks += 1
        if self.ticks == 3:
            self.has_ticked.set()
        return self._in_turn(lambda: [alert(-self.ticks)], None)

    def _in_turn(self, answer, entry):
        self.inside += 1
        assert self.inside == 1, "two threads are in the guard"
        self.entries.append(entry)
        time.sleep(1e-5)
        alerts = answer()
        self.inside -= 1
        return alerts


class Post:
    """Stands for the notifier."""

    made = []  # noqa: RUF012

    def __init__(self, targets, run):
        self.targets, self.run, self.alerts, self.num_closed = targets, run, [], 0
        Post.made.append(self)

    def put(self, alert):
        self.alerts.append(alert)

    def close(self):
        self.num_closed += 1


class Collector:
    def __init__(self):
        self.entries, self.num_closed = [], 0

    def write(self, entry):
        self.entries.append(entry)

    def close(self):
        self.num_closed += 1


@pytest.fixture
def post(monkeypatch):
    monkeypatch.setattr(session, "Notifier", Post)
    Post.made = []
    return Post


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(session, "Guard", StandIn)


def log_threads():
    return [thread for thread in threading.enumerate() if thread.name == "halfstep log"]


def entries_of(folder, kind):
    return [entry for entry in read_entries(folder, 0) if entry["kind"] == kind]


def test_a_log_has_the_run_its_entries_and_its_end(tmp_path):
    one = Session(RUN, Watch(), tmp_path, print)
    one.see(step(1))
    one.see({"kind": "seam", "time": 2.0, "step": 1})
    one.close()
    one.close("too late")
    *entries, end = read_entries(tmp_path, 0)
    assert entries == [RUN.to_entry(), step(1).to_entry(), {"kind": "seam", "time": 2.0, "step": 1}]
    assert (end["kind"], end["state"]) == ("end", "finished")
    assert RunStart.from_entry(entries[0]) == RUN


def test_a_run_that_failed_says_why(tmp_path):
    one = Session(RUN, Watch(), tmp_path, print)
    one.close("KeyError: 'x'")
    (end,) = entries_of(tmp_path, "end")
    assert (end["state"], end["reason"]) == ("failed", "KeyError: 'x'")


@pytest.mark.usefixtures("stand_in")
def test_an_alert_of_the_clock_during_the_start_comes_after_the_runs_line(tmp_path, monkeypatch):
    class Early(log.Log):
        def __init__(self, folder, rank, on_lost, on_idle, exporters):
            super().__init__(folder, rank, on_lost, lambda: None, exporters)
            self.asking = threading.Thread(target=on_idle)
            self.asking.start()
            self.asking.join(0.05)

    monkeypatch.setattr(session, "Log", Early)
    one = Session(RUN, Watch(), tmp_path, lambda alert: None)
    one._log.asking.join()
    one.close()
    raw = [json.loads(line)["kind"] for line in file_of(tmp_path, 0).read_text().splitlines()]
    assert raw == ["run", "alert", "end"]


@pytest.mark.usefixtures("stand_in")
def test_every_alert_of_two_threads_is_told_once_and_before_the_end(tmp_path, post, caplog):
    told = []
    one = Session(RUN, Watch(notify=("command:x",)), tmp_path / "my-run", told.append)
    for number in range(1, 301):
        one.see(step(number))
    assert one.guard.has_ticked.wait(20)
    one.close()
    expected = Counter(range(1, 301)) + Counter(-tick for tick in range(1, one.guard.ticks + 1))
    assert Counter(a.step for a in told) == expected
    assert Counter(a.step for a in post.made[0].alerts) == expected
    assert Counter(record.args[0] for record in caplog.records) == expected
    # A tick's step is negative, which no reader takes.
    raw = [json.loads(line) for line in file_of(tmp_path / "my-run", 0).read_text().splitlines()]
    assert Counter(entry["step"] for entry in raw if entry["kind"] == "alert") == expected
    assert raw[-1]["kind"] == "end"
    order = [(entry["kind"], entry["step"]) for entry in raw if entry.get("step", 0) > 0]
    assert order == [(kind, number) for number in range(1, 301) for kind in ("step", "alert")]
    assert (post.made[0].targets, post.made[0].run, post.made[0].num_closed) == (("command:x",), "my-run", 1)
    seen = [entry.step for entry in one.guard.entries if entry is not None]
    assert seen == list(range(1, 301)), "in the order in which they came"


def test_an_alert_of_somebody_else_is_told_and_reads_well_in_pythons_log(tmp_path, caplog):
    told = []
    one = Session(RUN, Watch(), tmp_path, lambda alert: told.append(alert.step))
    one.alert(alert(3, "the scale fell.", "Do this.\nThen that."))
    one.alert(alert(4, "100 % of it", "Wait..."))
    assert [(record.name, record.levelno) for record in caplog.records] == 2 * [("halfstep", logging.WARNING)]
    assert caplog.messages == [
        "step 3, rank 0, a-rule: the scale fell. Do this. Then that.",
        "step 4, rank 0, a-rule: 100 % of it. Wait...",
    ]
    one.close()
    assert [entry["step"] for entry in entries_of(tmp_path, "alert")] == told == [3, 4]


def test_without_a_log_there_is_no_thread():
    before = threading.active_count()
    one = Session(RUN, Watch(), None, print)
    assert threading.active_count() == before
    one.see(step(1))
    one.close()
    assert not one.is_kept


def test_a_session_that_has_ended_keeps_and_judges_nothing_more(tmp_path, stand_in):
    told = []
    one = Session(RUN, Watch(), tmp_path, lambda alert: told.append(alert.step))
    one.close()
    told.clear()
    one.see(step(1))
    assert told == []
    assert entries_of(tmp_path, "step") == []
    assert log_threads() == []


# Faults.


@pytest.mark.usefixtures("stand_in")
def test_an_exception_of_a_sink_passes_when_everybody_else_has_been_told(tmp_path, post, caplog):
    def stop(alert):
        if alert.step > 0:
            raise KeyboardInterrupt

    one = Session(RUN, Watch(notify=("command:x",)), tmp_path, stop)
    with pytest.raises(KeyboardInterrupt):
        one.see(step(1))
    one.close()
    assert [a.step for a in post.made[0].alerts if a.step > 0] == [1]
    assert len(entries_of(tmp_path, "alert")) == 1


@pytest.mark.usefixtures("stand_in")
def test_a_sink_that_fails_in_the_logs_thread_stops_nothing(tmp_path, caplog):
    def fail(alert):
        if alert.step < 0:
            raise RuntimeError("no")

    one = Session(RUN, Watch(), tmp_path, fail)
    assert one.guard.has_ticked.wait(20)
    one.see(step(1))
    one.close()
    assert len(entries_of(tmp_path, "step")) == 1
    assert caplog.messages.count("a sink failed with the alert a-rule") >= 3


def test_a_guard_with_a_fault_is_off_and_says_so_once(tmp_path, monkeypatch, caplog):
    one = Session(RUN, Watch(), tmp_path, print)

    def fail(entry):
        raise ZeroDivisionError("in a rule")

    monkeypatch.setattr(one.guard, "see", fail)
    for number in (1, 2, 3):
        one.see(step(number))
    one.close()
    assert len(entries_of(tmp_path, "step")) == 3
    assert caplog.messages == ["the guard has a fault of its own and judges no more; the run and its log go on"]
    assert "in a rule" in caplog.text


def test_a_lost_log_is_told_to_pythons_log(tmp_path, caplog):
    one = Session(RUN, Watch(), tmp_path / "run", print)
    one.see({"kind": "updates", "time": 1.0, "step": 1, "of": object()})
    one.close()
    assert [message.partition("jsonl: ")[2].partition(",")[0] for message in caplog.messages] == [
        "an entry of kind updates is left out"
    ]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (Watch(rules={"no-such-rule": False}), "no-such-rule"),
        (Watch(notify=("nothing",)), "target of alerts"),
        (Watch(exporters=("nothing:x",)), "nothing"),
        (Watch(golden=("nowhere",)), "nowhere"),
    ],
)
def test_settings_that_cannot_work_are_an_error_at_the_start(tmp_path, monkeypatch, settings, what):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HalfstepError, match=what):
        Session(RUN, settings, tmp_path / "run", print)
    assert log_threads() == []
    assert not (tmp_path / "run").exists()


def test_what_was_made_is_ended_when_the_start_fails_later(tmp_path, monkeypatch, post):
    exporter = Collector()
    monkeypatch.setattr(session, "exporter_of", lambda target, run: exporter)
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(HalfstepError, match="it cannot be written"):
        Session(RUN, Watch(notify=("command:x",), exporters=("tensorboard:x",)), tmp_path / "run", print)
    assert (exporter.num_closed, post.made[0].num_closed) == (1, 1)


def test_exporters_need_a_log():
    with pytest.raises(HalfstepError, match="without a log: the thread that writes the log feeds them"):
        Session(RUN, Watch(exporters=("tensorboard:x",)), None, print)


@pytest.mark.parametrize("rank", [0, 1])
def test_targets_and_named_exporters_belong_to_rank_0_and_an_object_to_each(tmp_path, monkeypatch, post, rank):
    made = []
    monkeypatch.setattr(session, "exporter_of", lambda target, run: made.append((target, run)) or Collector())
    own = Collector()
    run = RunStart(time=1.0, rank=rank, num_ranks=2)
    one = Session(run, Watch(notify=("command:x",), exporters=("tensorboard:x", own)), tmp_path / "run", print)
    one.close()
    assert made == ([("tensorboard:x", "run")] if rank == 0 else [])
    assert len(post.made) == (1 if rank == 0 else 0)
    assert [entry["kind"] for entry in own.entries] == ["run", "end"]
    assert own.num_closed == 1
    assert [entry["rank"] for _, entry in Tail(file_of(tmp_path / "run", rank)).read() if "rank" in entry] == [rank]
