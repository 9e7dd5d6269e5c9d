"""The window over the last steps, against a slow twin that counts everything anew at every step."""

import random
from itertools import pairwise

import pytest
from reference.scale_runs import Run

from halfstep.policy import LossScale
from halfstep.watch.entry import RunStart, Step
from halfstep.watch.level import NUM_CLEAN, Level
from halfstep.watch.window import SIZE, Window


def window(kind="dynamic", **scale):
    return Window(RunStart(0.0, scale={"kind": kind, **scale}))


def step(number, *, share=0.0, loss=2.0, scale=65536.0, parameters=("a.weight",), counted=None):
    if not share:
        return Step(number, number / 10, loss, 1.0, scale)
    return Step(number, number / 10, loss, float("inf"), scale, False, "the gradient norm is inf",
                nonfinite_share=counted, nonfinite_at_most=share, parameters=parameters)  # fmt: skip


def calibrated(**scale):
    """After 30 clean steps."""
    made = window(**scale)
    for number in range(1, 31):
        made.add(step(number))
    return made


def overflow(number, scale, share=1.0, parameters=("a.weight",)):
    return {"kind": "overflow", "time": 0.0, "step": number, "micro_batch": 0, "scale": scale,
            "overflowed_at": 2 * scale, "parameters": list(parameters), "nonfinite_share": share}  # fmt: skip


# --- the twin --------------------------------------------------------------------------------------------------------


def is_search(history, settings):
    """Whether the last of (scale, is clean) overflowed by a scale that finds its level: looks back from it."""
    scale = history[-1][0]
    begin = len(history) - 1
    while begin and history[begin - 1][0] == scale:
        begin -= 1
    here = [ok for _, ok in history[begin:-1]]
    if scale <= settings.floor or here.count(False) >= settings.hysteresis:
        return False
    has_held = "x" * NUM_CLEAN in "".join("x" if ok else "." for ok in here)
    has_grown = begin > 0 and history[begin - 1][0] < scale
    if not has_grown:
        return not has_held and scale > proven(history[:begin])
    return not has_held or failed_before(history[:begin], scale)


def proven(history):
    """The scale of the last proof that one holds: NUM_CLEAN clean steps, or that it grew."""
    for end in range(len(history), 0, -1):
        scale = history[end - 1][0]
        if end < len(history) and history[end][0] > scale:
            return scale
        if end >= NUM_CLEAN and all(one == (scale, True) for one in history[end - NUM_CLEAN : end]):
            return scale
    return 0.0


def failed_before(history, scale):
    """Whether an overflow at ``scale`` or below was seen since the scale last grew from where one had been."""
    fails = set()
    for before, (now, ok) in pairwise([(0.0, True), *history]):
        if fails and now > before[0] >= min(fails):
            fails = set()
        if not ok:
            fails.add(now)
    if fails and scale > history[-1][0] >= min(fails):
        fails = set()
    return bool(fails) and scale >= min(fails)


@pytest.mark.parametrize("seed", range(6))
def test_against_the_twin(seed):
    """Random scales, gradients that overflow now and then, and faults: every number of every step."""
    draw = random.Random(seed)
    settings = {
        "interval": draw.choice([5, 30, 60]),
        "hysteresis": draw.choice([1, 2]),
        "floor": draw.choice([1.0, 64.0]),
    }
    usable = [2.0 ** draw.gauss(12, 1.0) for _ in range(701)]
    fault = [draw.random() * (draw.random() < 0.02) for _ in range(701)]
    run = Run(usable.__getitem__, fault=fault.__getitem__, **settings)
    window, history, counted, skips, answered = run.guard.window, [], {}, [], 0

    def check(entry):
        nonlocal answered
        if not isinstance(entry, Step):
            answered = entry["step"]
            for old in [number for number in counted if number <= answered]:
                counted[old] = 0.0
            return
        history.append((entry.scale, entry.applied))
        if not entry.applied:
            search = is_search(history, run.settings)
            counted[entry.step] = 0.0 if search or entry.step <= answered else entry.nonfinite_at_most
            skips.append((entry.step, search))
        recent = range(entry.step - SIZE + 1, entry.step + 1)
        assert window.share == pytest.approx(sum(counted.get(number, 0.0) for number in recent) / SIZE, abs=1e-15)
        assert window.num_skipped == sum(not search and number in recent for number, search in skips)
        assert [fault.step for fault in window.faults] == [n for n in recent if counted.get(n)]
        assert len(window.steps) == min(SIZE, entry.step)

    see = run.see
    run.see = lambda entry: (see(entry), check(entry))
    run.run(700)
    assert skips
    assert any(not search for _, search in skips) or seed == 0


# --- calibration and growth ------------------------------------------------------------------------------------------


def test_the_first_calibration_does_not_count():
    made = window()
    for number in range(1, 12):
        made.add(step(number, share=1.0, scale=2.0 ** (17 - number)))
    assert not made.faults
    for number in range(12, 12 + NUM_CLEAN):
        assert made.calibrated_at is None
        made.add(step(number, scale=32.0))
    assert made.calibrated_at == 31
    made.add(step(32, share=0.5, scale=32.0))
    assert [fault.step for fault in made.faults] == [32]
    assert made.share == 0.005


def test_an_overflow_at_the_floor_counts_although_the_scale_was_never_found():
    made = window(init=4.0)
    for number, scale in enumerate((4.0, 2.0, 1.0, 1.0), 1):
        made.add(step(number, share=0.5, scale=scale))
    assert [fault.step for fault in made.faults] == [3, 4]


def test_a_scale_that_never_falls_is_not_one_that_is_found():
    """hysteresis=2 and an overflow in every third step: it is only skipped, for ever."""
    made = window(hysteresis=2)
    for number in range(1, 31):
        made.add(step(number, share=float(number % 3 == 0)))
    assert [fault.step for fault in made.faults] == [9, 12, 15, 18, 21, 24, 27, 30]


@pytest.mark.parametrize(("hysteresis", "num_excused"), [(1, 1), (2, 2)])
def test_the_steps_after_a_growth_do_not_count(hysteresis, num_excused):
    made = calibrated(hysteresis=hysteresis)
    for number in range(31, 31 + hysteresis):
        made.add(step(number, share=1.0, scale=2.0**17))
    assert not made.faults
    made.add(step(31 + hysteresis, share=1.0, scale=2.0**16))
    assert len(made.faults) == 1


def test_a_scale_that_grew_and_held_is_one_that_holds():
    made = calibrated()
    for number in range(31, 31 + NUM_CLEAN):
        made.add(step(number, scale=2.0**17))
    made.add(step(51, share=1.0, scale=2.0**17))
    assert len(made.faults) == 1


def test_where_it_failed_before_it_may_fail_again_at_any_time():
    """The scale comes back to it after each interval; 20 steps or 500 until it fails are the same thing."""
    level = Level(LossScale(kind="dynamic"))
    for _ in range(NUM_CLEAN):
        level.clean(1024.0)
    level.clean(2048.0)
    assert level.overflow(2048.0)
    for scale, num in ((1024.0, 300), (2048.0, 300)):
        for _ in range(num):
            level.clean(scale)
    assert level.overflow(2048.0)
    level.clean(1024.0)
    assert not level.overflow(1024.0)
    # Once the scale has grown from it, it is one that holds.
    for scale in (1024.0, 2048.0, 4096.0, 2048.0):
        for _ in range(NUM_CLEAN):
            level.clean(scale)
    assert not level.overflow(2048.0)


def test_a_replay_counts_each_try_for_itself():
    made = calibrated()
    made.overflow(overflow(31, 2.0**16, 0.9, ["a.weight"]))  # at 2^17, where the scale has just grown to
    made.add(step(31, scale=2.0**16))
    assert not made.faults
    made.overflow(overflow(32, 2.0**15, 0.25, ["a.weight", "b.weight", "b.bias"]))
    made.overflow(overflow(32, 2.0**14, 0.5, ["b.weight"]))
    made.add(step(32, scale=2.0**14))
    (fault,) = made.faults
    assert (fault.step, fault.share, fault.scale, fault.is_forward) == (32, 0.5, 2.0**15, False)
    assert list(fault.modules) == ["b", "a"]
    assert made.num_skipped == 0


def test_a_replay_that_was_undone_is_no_growth():
    """A batch that overflows down to the floor is skipped at the scale it began with; the next step runs at half."""
    made = calibrated(init=2.0**16, floor=2.0**12)
    for power in (15, 14, 13, 12):
        made.overflow(overflow(31, 2.0**power))
    made.add(step(31, share=1.0))
    assert made.faults[0].scale == 2.0**12
    made.add(step(32, scale=2.0**15, share=1.0))
    assert [fault.step for fault in made.faults] == [31, 32]


def test_replays_of_the_first_step_calibrate():
    made = window()
    for power in range(15, 9, -1):
        made.overflow(overflow(1, 2.0**power))
    made.add(step(1, scale=2.0**10))
    made.overflow(overflow(2, 2.0**9))
    made.add(step(2, scale=2.0**9))
    assert not made.faults


def test_overflows_may_come_long_before_the_step():
    made = calibrated()
    made.overflow(overflow(45, 2.0**15, 0.5))
    for number in range(31, 50):
        made.add(step(number, scale=2.0 ** (16 - (number >= 45))))
    assert [fault.step for fault in made.faults] == [45]


def test_a_loss_that_is_not_finite_is_never_the_scale():
    made = window()
    made.add(step(1, share=1.0, loss=float("nan")))
    assert made.faults[0].is_forward


@pytest.mark.parametrize("kind", ["none", "static"])
def test_without_a_dynamic_scale_every_fault_counts(kind):
    made = window(kind)
    made.add(step(1, share=0.5))
    assert made.share == 0.005


def test_what_was_counted_is_better_than_the_most_that_it_can_be():
    made = window("none")
    made.add(step(1, share=1.0, counted=0.25))
    assert made.share == 0.0025


# --- resume, reduction, promotion ------------------------------------------------------------------------------------


def test_a_resumed_run_is_calibrated_but_may_have_just_grown():
    made = calibrated()
    made.resume(2000)
    made.add(step(2001, share=1.0, scale=2.0**17))
    assert not made.faults
    made.add(step(2002, share=1.0, scale=2.0**16))
    assert [fault.step for fault in made.faults] == [2002]


def test_a_run_resumed_within_its_calibration_goes_on_with_it():
    made = window()
    made.resume(5)
    for number in range(6, 12):
        made.add(step(number, share=1.0, scale=2.0 ** (16 - number)))
    assert not made.faults


def test_steps_that_do_not_follow_start_the_window_anew():
    made = calibrated()
    made.add(step(31, share=1.0))
    made.add(step(21))
    assert [one.step for one in made.steps] == [21]
    assert not made.faults


def test_what_came_before_a_reduction_has_had_its_answer():
    made = calibrated()
    for number in range(31, 41):
        made.add(step(number, share=0.5))
    made.reduce(45)
    assert (made.num_reductions, made.reduced_at, made.share) == (1, 45, 0.0)
    made.add(step(41, share=0.5))  # ran before, seen after
    assert not made.faults
    for number in range(42, 46):
        made.add(step(number))
    made.add(step(46, share=0.5))
    assert made.share == 0.005


def test_a_clean_window_forgives_reductions():
    made = calibrated()
    made.reduce(30)
    made.add(step(31, share=0.5))
    made.reduce(31)
    for number in range(32, 131):
        made.add(step(number))
        assert made.num_reductions == 2
    made.add(step(131))
    assert (made.num_reductions, made.reduced_at) == (0, None)


def test_a_promotion_is_another_situation():
    made = calibrated()
    made.add(step(31, share=0.5))
    made.reduce(31)
    made.overflow(overflow(32, 2.0**15))
    made.promote({"kind": "promotion", "step": 32, "module": "a", "policy": "", "reason": ""})
    made.add(step(32))
    assert (made.promoted, made.num_reductions, made.share) == ("a", 0, 0.0)


# --- skipped steps, layers, blocks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [2, 16, 150])
def test_skips_at_one_distance(period):
    made, seen = window("static"), []
    for number in range(1, 9 * period):
        is_bad = number % period == 0 and number != 7 * period
        made.add(step(number, share=float(is_bad)))
        seen.append(made.skip_period)
    assert set(seen[: 5 * period - 1]) == {None}
    assert set(seen[5 * period - 1 : 7 * period - 1]) == {period}
    assert set(seen[7 * period - 1 :]) == {None}


def test_skips_in_a_block_have_no_period():
    made = window("static")
    for number in range(1, 20):
        made.add(step(number, share=1.0))
    assert made.skip_period is None


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_probes_of_the_scale_have_no_period(hysteresis):
    run = Run(lambda step: 2.0**10, interval=50, hysteresis=hysteresis).run(1000)
    assert len(run.skipped) > 18
    assert run.guard.window.skip_period is None
    assert not run.guard.window.skips


def layers(number, **norms):
    return {"kind": "layers", "time": 0.0, "step": number, "parameters": list(norms), "norms": list(norms.values())}


def test_who_comes_back_from_zero_is_at_rest():
    made = window()
    made.add_layers(layers(100, a=0.0, b=1.0, c=0.0))
    made.add_layers(layers(200, a=0.0, b=0.0, c=2.0))
    made.add_layers(layers(300, a="NaN", b="NaN", c="NaN"))  # says nothing
    assert made.resting == {"c"}
    made.add_layers(layers(400, a=0.0, b=3.0))
    assert made.resting == {"b", "c"}
    assert [entry["step"] for entry in made.layers] == [100, 200, 400]


def test_blocks_are_medians_of_finite_steps():
    made = window("none")
    for number in range(1, 251):
        made.add(step(number, loss=float(number), share=float(number == 7)))
    first, second = made.blocks
    assert (first.first, first.last, second.first, second.last) == (1, 100, 101, 200)
    assert first.loss == 51.0  # of 1 to 100 without 7
    assert (second.loss, second.loss_spread) == (150.5, pytest.approx(1.4826 * 25))
    assert second.seconds == pytest.approx(0.1)
    made.resume(150)
    assert made.blocks == [first]
