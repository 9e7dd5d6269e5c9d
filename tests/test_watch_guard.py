"""The guard: what is said once, when the loss scale is lowered, and that a replay says the same."""

import random
from dataclasses import replace

import pytest
from reference.scale_runs import Run

from halfstep.errors import HalfstepError
from halfstep.watch.entry import RunStart, Step
from halfstep.watch.guard import Guard, all_rules
from halfstep.watch.rule import Finding, Rule
from halfstep.watch.settings import Watch
from halfstep.watch.window import SIZE

ONLY_SCALE = Watch(rules={name: False for name in all_rules() if name != "nonfinite-gradients"})


def guard_of(check, monkeypatch, kinds=("step",)):
    """A guard with one rule of the test's own."""
    rule = Rule("own", "warning", "", "", check, kinds=kinds)
    monkeypatch.setattr("halfstep.watch.guard.all_rules", lambda: {"own": rule})
    return Guard(RunStart(0.0))


def fired(guard, situations):
    """Steps at which the rule alerts, when it finds ``situations[i]`` in step i + 1."""
    return [alert.step for i in range(len(situations)) for alert in guard.see(Step(i + 1, float(i), 1.0, 1.0))]


# --- hysteresis ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_a_thing_is_said_again_only_after_a_window_without_it_and_then_two_and_four(seed, monkeypatch):
    draw = random.Random(seed)
    situations = []
    while len(situations) < 1500:
        situations += [draw.choice([None, None, "a", "b"])] * draw.choice([1, 5, 99, 100, 101, 140])
    guard = guard_of(
        lambda window, limits: situations[window.last.step - 1] and Finding("", "", situations[window.last.step - 1]),
        monkeypatch,
    )
    expected, quiet = [], {}
    for i, situation in enumerate(situations):
        if situation is not None and situation not in situations[max(0, i - quiet.get(situation, 1)) : i]:
            expected.append(i + 1)
            quiet[situation] = 2 * quiet.get(situation, SIZE // 2)
    assert fired(guard, situations) == expected
    assert len(expected) >= 2


def test_what_is_looked_at_rarely_stands_between_two_looks(monkeypatch):
    """A report comes every 500 steps, and says the same."""
    found = iter(["a", "a", None, "a", "b", "a"])
    guard = guard_of(
        lambda window, limits: None if (name := next(found)) is None else Finding("", "", name),
        monkeypatch,
        ("updates",),
    )
    said = []
    for number in range(1, 3001):
        assert guard.see(Step(number, 0.0, 1.0, 1.0)) == []
        if number % 500 == 0:
            said += [alert.step for alert in guard.see({"kind": "updates", "step": number})]
    assert said == [500, 2000, 2500, 3000]


def test_a_resumed_run_says_it_again(monkeypatch):
    guard = guard_of(lambda window, limits: Finding("", "", "a"), monkeypatch)
    assert fired(guard, [None] * 50) == [1]
    guard.see({"kind": "seam", "step": 20})
    assert [alert.step for alert in guard.see(Step(21, 0.0, 1.0, 1.0))] == [21]


def test_a_tick_says_what_a_step_would(monkeypatch):
    guard = guard_of(lambda window, limits: Finding(f"{window.now:g} s", "") if window.now > 60 else None, monkeypatch)
    assert guard.tick(100.0) == []  # nothing to judge yet
    guard.see(Step(1, 1.0, 1.0, 1.0))
    assert guard.tick(30.0) == []
    assert [alert.message for alert in guard.tick(61.0)] == ["61 s"]
    assert guard.tick(62.0) == []


def test_an_alert_has_all_that_a_person_needs(monkeypatch):
    rule = Rule("own", "warning", "", "", lambda window, limits: Finding("what", "do", step=3, severity="error"))
    monkeypatch.setattr("halfstep.watch.guard.all_rules", lambda: {"own": rule})
    (alert,) = Guard(RunStart(0.0, rank=5)).see(Step(7, 0.0, 1.0, 1.0))
    assert alert.to_dict() == {
        "rule": "own", "step": 3, "severity": "error", "message": "what", "action": "do", "rank": 5,
    }  # fmt: skip


def test_a_rule_that_fails_is_told_once_and_stops_nothing(monkeypatch):
    guard = guard_of(lambda window, limits: 1 / (window.last.step - 4 > 0), monkeypatch)
    (alert,) = [alert for number in range(1, 5) for alert in guard.see(Step(number, 0.0, 1.0, 1.0))]
    assert (alert.severity, alert.message) == ("note", "this rule failed: ZeroDivisionError: division by zero")


# --- settings --------------------------------------------------------------------------------------------------------


def test_a_rule_is_turned_off():
    fault = {"kind": "none", "fault": lambda step: 0.5 * (step == 10)}
    assert Run(**fault).run(20).said("nonfinite-gradients") == [("nonfinite-gradients", 10)]
    assert Run(**fault, watch=Watch(rules={"nonfinite-gradients": False})).run(20).said("nonfinite-gradients") == []
    assert Run(**fault, watch=Watch(rules={"nonfinite-gradients": {"share_pct": 0.6}})).run(20).alerts == []


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"nonfinite": False}, "rule 'nonfinite': no such rule of the guard"),
        ({"scale-floor": {"step": 3}}, "'step' of rule scale-floor: no such limit. It has steps"),
        ({"scale-floor": 3}, "rule scale-floor = 3: a rule is on, off, or has limits"),
    ],
)
def test_settings_that_mean_nothing(rules, text):
    with pytest.raises(HalfstepError, match=text):
        Guard(RunStart(0.0), Watch(rules=rules))


# --- the loss scale --------------------------------------------------------------------------------------------------


def test_the_scale_is_lowered_once_a_window_and_twice_at_most():
    """One step in 30 has a NaN at any scale: the scale itself halves each time, and the guard adds two halvings."""
    run = Run(fault=lambda step: 0.2 * (step % 30 == 0 and step > 100), floor=2.0**-20, watch=ONLY_SCALE).run(600)
    assert [(alert.step, alert.severity) for alert in run.alerts] == [(120, "warning"), (270, "error")]
    assert run.reductions == [130, 250]
    assert "although the guard lowered the loss scale 2 times" in run.alerts[1].message


def test_a_lone_fault_lowers_once_and_a_clean_window_starts_anew():
    run = Run(fault=lambda step: 0.2 * (step in (500, 800, 1100)), watch=ONLY_SCALE).run(1500)
    assert [(alert.step, alert.severity) for alert in run.alerts] == [
        (500, "warning"),
        (800, "warning"),
        (1100, "warning"),
    ]
    assert run.reductions == [510, 810, 1110]


def test_a_fault_that_stops_is_not_answered_twice():
    run = Run(fault=lambda step: 0.2 * (500 <= step < 512), watch=ONLY_SCALE, floor=2.0**-20).run(800)
    assert run.reductions == [510]
    assert [alert.step for alert in run.alerts] == [500]


def test_nothing_is_lowered_below_the_floor():
    run = Run(fault=lambda step: 0.2 * (step >= 500), watch=ONLY_SCALE, floor=256.0).run(800)
    assert [(alert.step, alert.severity) for alert in run.alerts] == [(500, "warning"), (507, "error")]
    assert "also at 256, the floor of the loss scale" in run.alerts[1].message
    assert run.scale == 256.0


def test_a_fault_in_the_forward_pass_lowers_nothing():
    run = Run(
        fault=lambda step: 1.0 * (step >= 500), loss=lambda step: float("nan") if step >= 500 else 2.0, watch=ONLY_SCALE
    ).run(800)
    assert run.reductions == []
    assert [(alert.step, alert.severity) for alert in run.alerts] == [(500, "error")]
    assert "no loss scale can mend it" in run.alerts[0].message


@pytest.mark.parametrize(
    ("kind", "text"), [("none", "there is no loss scale"), ("static", "the loss scale stays at 65536")]
)
def test_where_there_is_nothing_to_lower_it_only_tells(kind, text):
    run = Run(lambda step: 2.0**20, kind=kind, fault=lambda step: 0.2 * (step >= 500), watch=ONLY_SCALE).run(800)
    assert run.reductions == []
    assert [alert.step for alert in run.alerts] == [500]
    assert text in run.alerts[0].message


def test_a_request_lasts_until_it_is_granted_or_the_fault_is_gone():
    """Another rank does not agree."""
    run = Run(fault=lambda step: 0.2 * (step == 50), num_ranks=2, watch=ONLY_SCALE)
    wants = []
    for number in range(1, 200):
        run.one()
        run.deliver()
        run.reductions.clear()
        wants.append(run.guard.lowers_scale)
        if run.guard.lowers_scale:
            assert number < 60
            break
    guard = Guard(run.start, ONLY_SCALE)
    asked = []
    for entry in run.entries:
        guard.see(entry)
    for number in range(51, 200):
        guard.see(Step(number, float(number), 2.0, 1.0, 2.0**14))
        asked.append(guard.lowers_scale)
    assert asked == [True] * 99 + [False] * 50
    assert "the guard lowers it once if every rank asks" in run.alerts[0].message


@pytest.mark.parametrize("kind", ["none", "static", "dynamic"])
def test_a_promotion_is_a_new_situation(kind):
    run = Run(lambda step: 2.0**20, kind=kind, fault=lambda step: 0.2 * (step in (40, 70)), watch=ONLY_SCALE).run(50)
    run.see({"kind": "promotion", "time": 0.0, "step": 51, "module": "body.0", "policy": "", "reason": ""})
    run.run(60)
    assert [alert.step for alert in run.alerts] == [40, 70]


# --- a replay --------------------------------------------------------------------------------------------------------

RUNS = {
    "healthy": {},
    "fault": {"fault": lambda step: 0.3 * (step > 300)},
    "fault with replay": {"fault": lambda step: 0.3 * (step > 300), "replay": True},
    "harder batches": {"usable": lambda step: 2.0**15 if step < 300 else 2.0**6, "replay": True},
    "forward": {"fault": lambda step: step % 50 == 0, "loss": lambda step: float("nan") if step % 50 == 0 else 1.0},
    "bf16": {"kind": "none", "fault": lambda step: 0.002 * (step % 2)},
    "periodic": {"usable": lambda step: 2.0 ** (15 if step % 16 else 10), "interval": 12, "hysteresis": 1},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_replay_says_what_the_run_said(name):
    run = Run(**RUNS[name]).run(400)
    run.see({"kind": "seam", "time": 0.0, "step": 350})
    run.step = 350
    run.run(300)
    assert run.replayed() == run.alerts
    assert bool(run.alerts) == (name != "healthy")
    # As lines of a log, and twice by the same process, whose log was lost and made anew.
    guard = Guard(run.start)
    lines = [entry.to_entry() if isinstance(entry, Step) else entry for entry in run.entries]
    lines.insert(200, run.start.to_entry())
    assert [alert for line in lines for alert in guard.see(line)] == run.alerts


def test_another_process_begins_with_a_window_of_its_own():
    run = Run(fault=lambda step: 0.3 * (step > 300)).run(400)
    guard = Guard(run.start)
    again = [replace(run.start, session="b").to_entry(), *run.entries]
    assert [alert for entry in [*run.entries, *again] for alert in guard.see(entry)] == run.alerts * 2
