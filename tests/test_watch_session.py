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
        self.lowers_scale = True
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


@pytest.fixture
def open_session(tmp_path):
    """Makes sessions, and closes them; a log goes to ``run``."""
    made = []

    def make(settings=None, run=RUN, log=tmp_path / "run", on_alert=lambda: None):
        made.append(Session(run, settings or Watch(), log, on_alert))
        return made[-1]

    yield make
    for one in made:
        one.close()


def threads_of_logs():
    names = ("halfstep log", "halfstep exporter")
    return [thread for thread in threading.enumerate() if thread.name.startswith(names)]


def entries_of(folder, kind):
    return [entry for entry in read_entries(folder, 0) if entry["kind"] == kind]


def test_a_log_has_the_run_its_entries_and_its_end(open_session, tmp_path):
    one = open_session()
    one.see(step(1))
    one.see({"kind": "seam", "time": 2.0, "step": 1})
    one.close()
    one.close("too late")
    *entries, end = read_entries(tmp_path / "run", 0)
    assert entries == [RUN.to_entry(), step(1).to_entry(), {"kind": "seam", "time": 2.0, "step": 1}]
    assert (end["kind"], end["state"]) == ("end", "finished")
    assert RunStart.from_entry(entries[0]) == RUN


def test_a_run_that_failed_says_why(open_session, tmp_path):
    open_session().close("KeyError: 'x'")
    (end,) = entries_of(tmp_path / "run", "end")
    assert (end["state"], end["reason"]) == ("failed", "KeyError: 'x'")


@pytest.mark.usefixtures("stand_in")
def test_an_alert_of_the_clock_during_the_start_comes_after_the_runs_line(open_session, tmp_path, monkeypatch):
    class Early(log.Log):
        def __init__(self, folder, rank, on_lost, on_idle, exporters):
            super().__init__(folder, rank, on_lost, lambda: None, exporters)
            self.asking = threading.Thread(target=on_idle)
            self.asking.start()
            self.asking.join(0.05)

    monkeypatch.setattr(session, "Log", Early)
    one = open_session()
    one._log.asking.join(20)
    one.close()
    raw = [json.loads(line)["kind"] for line in file_of(tmp_path / "run", 0).read_text().splitlines()]
    assert raw == ["run", "alert", "end"]


@pytest.mark.usefixtures("stand_in")
def test_every_alert_of_two_threads_is_told_once_and_before_the_end(open_session, tmp_path, post, caplog):
    told, given = [], []
    one = open_session(Watch(notify=("command:x",)), on_alert=lambda: told.append)
    for number in range(1, 301):
        given += one.see(step(number))
    assert one.guard.has_ticked.wait(20)
    one.close()
    steps, ticks = list(range(1, 301)), [-tick for tick in range(1, one.guard.ticks + 1)]
    assert [a.step for a in given] == steps, "to the caller alone"
    assert [a.step for a in told] == ticks
    expected = Counter(steps + ticks)
    assert Counter(a.step for a in post.made[0].alerts) == expected
    assert Counter(record.args[0] for record in caplog.records) == expected
    # A tick's step is negative, which no reader takes.
    raw = [json.loads(line) for line in file_of(tmp_path / "run", 0).read_text().splitlines()]
    assert Counter(entry["step"] for entry in raw if entry["kind"] == "alert") == expected
    assert raw[-1]["kind"] == "end"
    order = [(entry["kind"], entry["step"]) for entry in raw if entry.get("step", 0) > 0]
    assert order == [(kind, number) for number in steps for kind in ("step", "alert")]
    assert (post.made[0].targets, post.made[0].run, post.made[0].num_closed) == (("command:x",), "run", 1)
    seen = [entry.step for entry in one.guard.entries if entry is not None]
    assert seen == steps, "in the order in which they came"


def test_an_alert_of_the_callers_is_kept_and_told_to_people_and_reads_well_in_pythons_log(
    open_session, tmp_path, post, caplog
):
    told = []
    one = open_session(Watch(notify=("command:x",)), on_alert=lambda: told.append)
    one.alert(alert(3, "the scale fell.", "Do this.\nThen that."))
    one.alert(alert(4, "100 % of it", "Wait..."))
    assert [(record.name, record.levelno) for record in caplog.records] == 2 * [("halfstep", logging.WARNING)]
    assert caplog.messages == [
        "step 3, rank 0, a-rule: the scale fell. Do this. Then that.",
        "step 4, rank 0, a-rule: 100 % of it. Wait...",
    ]
    one.close()
    assert [entry["step"] for entry in entries_of(tmp_path / "run", "alert")] == [3, 4]
    assert [a.step for a in post.made[0].alerts] == [3, 4]
    assert told == [], "it is the caller who knows of it already"


def test_without_a_log_there_is_no_thread(open_session):
    before = threading.active_count()
    one = open_session(log=None)
    assert threading.active_count() == before
    assert one.see(step(1)) == []
    one.close()
    assert not one.is_kept


@pytest.mark.usefixtures("stand_in")
def test_a_session_that_has_ended_keeps_and_judges_nothing_more(open_session, tmp_path):
    told = []
    one = open_session(on_alert=lambda: told.append)
    one.close()
    told.clear()
    assert one.see(step(1)) == []
    assert told == []
    assert entries_of(tmp_path / "run", "step") == []
    assert threads_of_logs() == []


@pytest.mark.usefixtures("stand_in")
def test_the_scale_is_lowered_while_the_guard_asks_for_it_and_the_session_lives(open_session):
    one = open_session(log=None)
    assert one.lowers_scale
    one.guard.lowers_scale = False
    assert not one.lowers_scale
    one.guard.lowers_scale = True
    assert one.lowers_scale
    one.close()
    assert not one.lowers_scale
    assert one.guard.lowers_scale, "of a guard that nobody asks any more"


# Faults.


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("keeps", [True, False])
def test_a_guard_that_has_failed_lowers_no_scale(open_session, tmp_path, monkeypatch, keeps):
    one = open_session(log=tmp_path / "run" if keeps else None)
    assert one.lowers_scale

    def fail(*_):
        raise ZeroDivisionError("in a rule")

    monkeypatch.setattr(one.guard, "see", fail)
    assert one.see(step(1)) == []
    assert not one.lowers_scale
    assert one.guard.lowers_scale, "what it asked for before"


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("nobody", [True, False])
def test_an_alert_of_the_clock_that_a_sink_fails_with_or_nobody_is_left_for_stops_nothing(
    open_session, tmp_path, caplog, nobody
):
    def fail(alert):
        raise RuntimeError("no")

    one = open_session(on_alert=lambda: None if nobody else fail)
    assert one.guard.has_ticked.wait(20)
    assert [a.step for a in one.see(step(1))] == [1]
    one.close()
    assert len(entries_of(tmp_path / "run", "step")) == 1
    num_failed = caplog.messages.count("a sink failed with the alert a-rule")
    assert num_failed == (0 if nobody else one.guard.ticks)
    assert not [message for message in caplog.messages if "silent" in message], "nothing reached the log's thread"


def test_a_guard_with_a_fault_is_off_and_says_so_once(open_session, tmp_path, monkeypatch, caplog):
    one = open_session()

    def fail(entry):
        raise ZeroDivisionError("in a rule")

    monkeypatch.setattr(one.guard, "see", fail)
    for number in (1, 2, 3):
        assert one.see(step(number)) == []
    one.close()
    assert len(entries_of(tmp_path / "run", "step")) == 3
    assert caplog.messages == ["the guard has a fault of its own and judges no more; the run and its log go on"]
    assert "in a rule" in caplog.text


def test_a_lost_log_is_told_to_pythons_log(open_session, caplog):
    one = open_session()
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
def test_settings_that_cannot_work_are_an_error_at_the_start(open_session, tmp_path, monkeypatch, settings, what):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HalfstepError, match=what):
        open_session(settings)
    assert threads_of_logs() == []
    assert not (tmp_path / "run").exists()


def test_what_was_made_is_ended_when_the_start_fails_later(open_session, tmp_path, monkeypatch, post):
    exporter = Collector()
    monkeypatch.setattr(session, "exporter_of", lambda target, run: exporter)
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(HalfstepError, match="it cannot be written"):
        open_session(Watch(notify=("command:x",), exporters=("tensorboard:x",)))
    assert (exporter.num_closed, post.made[0].num_closed) == (1, 1)
    assert threads_of_logs() == []


def test_exporters_need_a_log(open_session):
    with pytest.raises(HalfstepError, match="without a log: the thread that writes the log feeds them"):
        open_session(Watch(exporters=("tensorboard:x",)), log=None)


@pytest.mark.parametrize("rank", [0, 1])
def test_targets_and_named_exporters_belong_to_rank_0_and_an_object_to_each(
    open_session, tmp_path, monkeypatch, post, rank
):
    made = []
    monkeypatch.setattr(session, "exporter_of", lambda target, run: made.append((target, run)) or Collector())
    own = Collector()
    run = RunStart(time=1.0, rank=rank, num_ranks=2)
    open_session(Watch(notify=("command:x",), exporters=("tensorboard:x", own)), run).close()
    assert made == ([("tensorboard:x", "run")] if rank == 0 else [])
    assert len(post.made) == (1 if rank == 0 else 0)
    assert [entry["kind"] for entry in own.entries] == ["run", "end"]
    assert own.num_closed == 1
    assert [entry["rank"] for _, entry in Tail(file_of(tmp_path / "run", rank)).read() if "rank" in entry] == [rank]
