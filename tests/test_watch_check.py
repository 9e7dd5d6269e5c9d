"""``halfstep watch check``: what a log has in it, the rules say again."""

import json
import math
import os
import platform
import random
import subprocess
import sys
import time

import pytest

from halfstep.errors import HalfstepError
from halfstep.events import Alert
from halfstep.watch.check import check
from halfstep.watch.entry import RunStart, Step
from halfstep.watch.guard import Guard, all_rules
from halfstep.watch.settings import Watch

END = {"kind": "end", "time": 1.0, "state": "finished"}


def run(session="s", rank=0, at=0.0, **more):
    return RunStart(at, rank, session=session, **more).to_entry()


def steps(first, last, losses=None, pause=0.1, start=0.0):
    """Quiet steps, but where ``losses`` has another loss for a step."""
    draw = random.Random(first)
    return [
        Step(i, start + i * pause, (losses or {}).get(i, 2.0 + draw.gauss(0, 0.02)), 1.0).to_entry()
        for i in range(first, last + 1)
    ]


def write(folder, *entries, rank=0, end="\n"):
    folder.mkdir(exist_ok=True)
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    (folder / f"rank-{rank:05d}.jsonl").write_text("\n".join(lines) + end)
    return folder


def told(report):
    return [(alert.rank, alert.step, alert.rule) for alert in report.alerts]


def test_a_quiet_run_has_no_alerts(tmp_path):
    for rank in range(2):
        write(tmp_path, run(rank=rank), *steps(1, 1200), END, rank=rank)
    report = check(tmp_path)
    assert not report.found
    assert str(report).splitlines() == [
        "no alerts in 1,200 steps of 2 ranks",
        f"{tmp_path.name}: finished, the process ended; 1 session.",
    ]
    assert report.to_dict() == {
        "run": tmp_path.name,
        "state": "finished",
        "why": "the process ended",
        "num_steps": 1200,
        "num_ranks": 2,
        "num_sessions": 1,
        "num_torn": 0,
        "num_lost": 0,
        "unread": [],
        "found": False,
        "alerts": [],
    }


def test_an_alert_has_its_rank_and_what_ranks_share_is_one_row(tmp_path):
    for rank in range(3):
        losses = {300: 9.0, **({350: math.nan} if rank == 2 else {})}
        write(tmp_path, run(rank=rank), *steps(1, 400, losses), END, rank=rank)
    report = check(tmp_path)
    assert report.found
    assert told(report) == [
        (0, 300, "loss-spike"),
        (1, 300, "loss-spike"),
        (2, 300, "loss-spike"),
        (2, 350, "loss-not-finite"),
    ]
    assert set(report.to_dict()["alerts"][0]) == {"rule", "step", "rank", "severity", "message", "action"}
    (table,) = report.sheet().tables
    assert [[str(cell) for cell in row[:4]] for row in table.rows] == [
        ["0, 1, 2", "300", "loss-spike", "warning"],
        ["2", "350", "loss-not-finite", "error"],
    ]
    assert report.sheet().headline == "4 alerts in 400 steps of 3 ranks"
    json.dumps(report.to_dict(), allow_nan=False)


def test_a_replay_says_what_the_guard_said_live(tmp_path):
    entries = [
        run(),
        *steps(1, 400, {250: 9.0, 251: math.nan, 390: 30.0}),
        {"kind": "seam", "time": 50.0, "step": 300},
        *steps(301, 700, {500: math.inf, 650: 12.0}),
        END,
    ]
    guard = Guard(RunStart.from_entry(entries[0]))
    live = [alert for entry in entries for alert in guard.see(entry)]
    assert {alert.rule for alert in live} == {"loss-spike", "loss-not-finite"}
    replaced = [alert for alert in live if alert.step == 390]
    assert replaced
    counts = [alert for alert in live if alert not in replaced]
    assert list(check(write(tmp_path, *entries)).alerts) == sorted(counts, key=lambda alert: alert.step)


def test_after_a_seam_later_steps_of_before_do_not_count(tmp_path):
    seam = {"kind": "seam", "time": 1.0, "step": 250}
    report = check(
        write(tmp_path, run("a"), *steps(1, 320, {310: 9.0}), run("b"), seam, *steps(251, 500, start=9e3), END)
    )
    assert (report.num_steps, report.num_sessions) == (500, 2)
    assert told(report) == []  # step 310 was made again; and the pause until the resume was none


def test_a_seam_with_nothing_after_it_takes_back_what_was(tmp_path):
    report = check(write(tmp_path, run("a"), *steps(1, 320), run("b"), {"kind": "seam", "time": 1.0, "step": 250}, END))
    assert report.num_steps == 250


def test_alerts_come_by_step_and_then_by_rank(tmp_path):
    write(tmp_path, run(), *steps(1, 400, {370: math.nan}), END)
    write(tmp_path, run(rank=1), *steps(1, 400, {350: math.nan}), END, rank=1)
    assert told(check(tmp_path)) == [(1, 350, "loss-not-finite"), (0, 370, "loss-not-finite")]


def test_a_run_that_ended_once_and_went_on_can_be_stalled(tmp_path):
    now = time.time()
    again = run("b", host=platform.node(), pid=os.getpid(), at=now - 900)
    report = check(write(tmp_path, run("a"), *steps(1, 50), END, again, *steps(1, 50, start=now - 500)))
    assert (report.state, told(report)) == ("stalled", [(0, 50, "stalled")])


def test_a_start_anew_forgets_the_run_before(tmp_path):
    high = dict.fromkeys(range(1, 401), 50.0)
    report = check(write(tmp_path, run("a"), *steps(1, 400), END, run("b"), *steps(1, 350, high, start=9e3), END))
    assert (report.num_steps, report.num_sessions, report.state) == (350, 2, "finished")
    assert told(report) == []


def test_the_first_line_once_more_of_the_same_process_is_no_new_session(tmp_path):
    lost = {"kind": "gap", "time": 1.0, "num_lost": 12}
    report = check(write(tmp_path, run("a"), *steps(1, 250), run("a"), lost, *steps(263, 300, {300: 9.0}), END))
    assert (report.num_sessions, report.num_lost) == (1, 12)
    assert "12 entries were never written" in str(report)


def test_an_alert_of_the_engine_is_in_it_once_and_one_of_a_rule_is_made_anew(tmp_path):
    engine = Alert("scale-exhausted", 120, "error", "step 120: no scale is left", "Train in bf16.", 0)
    rule = Alert("loss-spike", 60, "warning", "as it was told with other limits", "Nothing.", 0)
    entries = [{"kind": "alert", "time": 1.0, **alert.to_dict()} for alert in (engine, rule)]
    failed = {"kind": "end", "time": 2.0, "state": "failed", "reason": "ScaleExhausted: no scale is left"}
    report = check(write(tmp_path, run(), *steps(1, 120), *entries, failed))
    assert report.alerts == (engine,)
    assert (report.state, report.why) == ("failed", "ScaleExhausted: no scale is left")


def test_lines_that_are_torn_or_broken_are_counted(tmp_path):
    broken = ['{"kind": "step", "step": 3', '{"kind": "step", "step": "x"}', "\x00\x00"]
    report = check(write(tmp_path, run(), *steps(1, 50), *broken, *steps(51, 60), END, '{"kind": "st', end=""))
    assert (report.num_steps, report.num_torn, report.state) == (60, 3, "finished")
    assert "3 lines of the log could not be read and had to be left out." in str(report)


def test_a_log_that_is_all_broken_from_a_point_on_is_read_to_its_end(tmp_path):
    report = check(write(tmp_path, run(), *steps(1, 50), *["x" * 1000] * 3000, *steps(51, 60), END))
    assert (report.num_steps, report.num_torn) == (60, 3000)


def test_a_rank_without_entries_is_named(tmp_path):
    write(tmp_path, run(), *steps(1, 50), END)
    (tmp_path / "rank-00001.jsonl").write_text("")
    report = check(tmp_path)
    assert (report.unread, report.state, report.num_ranks) == ((1,), "finished", 2)
    assert "No entry can be read in the log of rank 1: nothing is known" in str(report)


@pytest.mark.parametrize("text", [None, "", "no entry\n"])
def test_a_folder_without_a_log_is_an_error(tmp_path, text):
    if text is not None:
        (tmp_path / "rank-00000.jsonl").write_text(text)
    with pytest.raises(
        HalfstepError, match=r"it holds no log, rank-00000\.jsonl, with entries in it\. Name the folder"
    ):
        check(tmp_path)
    with pytest.raises(HalfstepError, match="it holds no log"):
        check(tmp_path / "none")


def test_a_log_that_lost_its_first_line_is_judged_too(tmp_path):
    report = check(write(tmp_path, *steps(5, 400, {300: 9.0}), END))
    assert told(report) == [(0, 300, "loss-spike")]


def test_a_run_that_goes_on_is_not_stalled_and_one_that_is_silent_is(tmp_path):
    now = time.time()
    here = run(host=platform.node(), pid=os.getpid(), at=now - 900)
    assert told(check(write(tmp_path / "new", here, *steps(1, 50, start=now - 5)))) == []
    silent = check(write(tmp_path / "old", here, *steps(1, 50, start=now - 500)))
    assert told(silent) == [(0, 50, "stalled")]
    assert silent.alerts[0].message.startswith("no step for 4")
    assert silent.state == "stalled"
    assert told(check(write(tmp_path / "done", here, *steps(1, 50, start=now - 500), END))) == []
    assert told(check(tmp_path / "old", Watch(rules={"stalled": False}))) == []


def test_the_limits_of_the_settings_tell_whether_a_run_is_stalled(tmp_path):
    now = time.time()
    here = run(host=platform.node(), pid=os.getpid(), at=now - 900)
    write(tmp_path, here, *steps(1, 50, start=now - 500))
    report = check(tmp_path, Watch(rules={"stalled": {"seconds": 800.0}}))
    assert (report.state, told(report)) == ("running", [])
    report = check(tmp_path, Watch(rules={"stalled": {"seconds": 300.0}}))
    assert (report.state, report.why) == ("stalled", "no entry for more than 300 s")
    assert check(tmp_path, Watch(rules={"stalled": True})).state == "stalled"


def test_a_process_that_is_gone_is_an_error_at_once(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = run(host=platform.node(), pid=gone.pid)
    report = check(write(tmp_path, here, *steps(1, 50, start=time.time() - 5)))
    (alert,) = report.alerts
    assert (alert.rule, alert.step, alert.severity) == ("stalled", 50, "error")
    assert alert.message == f"process {gone.pid} is gone and wrote no end"
    assert report.state == "lost"
    assert check(tmp_path, Watch(rules={"stalled": {"seconds": 90.0}})).alerts == report.alerts
    assert not check(tmp_path, Watch(rules={"stalled": False})).found


def test_the_worst_state_of_any_rank_is_that_of_the_run(tmp_path):
    write(tmp_path, run(), *steps(1, 50), END)
    write(tmp_path, run(rank=1), *steps(1, 50), {**END, "state": "failed", "reason": "lost"}, rank=1)
    assert check(tmp_path).state == "failed"


def test_limits_and_rules_of_the_settings_are_used(tmp_path):
    folder = write(tmp_path, run(), *steps(1, 400, {300: 2.4}), END)
    assert not check(folder).found
    assert told(check(folder, Watch(rules={"loss-spike": {"margin_pct": 10.0}}))) == [(0, 300, "loss-spike")]
    with pytest.raises(HalfstepError, match="no such rule"):
        check(folder, Watch(rules={"spike": False}))


def test_every_rule_of_the_guard_is_replayed():
    assert set(all_rules()) >= {
        "dead-gradient",
        "golden-divergence",
        "gradient-norm-drift",
        "loss-not-finite",
        "loss-spike",
        "lost-updates",
        "nonfinite-gradients",
        "scale-collapse",
        "scale-floor",
        "skipped-steps",
        "stalled",
        "throughput-drop",
    }
