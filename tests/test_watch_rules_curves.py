"""The rules of curves, on the shapes that losses, gradient norms and pauses have, healthy and with a fault planted."""

import math
import random
from itertools import pairwise
from statistics import median

import pytest

from halfstep.watch.entry import RunStart, Step
from halfstep.watch.golden import Band
from halfstep.watch.guard import Guard, all_rules
from halfstep.watch.rules import stalled
from halfstep.watch.rules.loss_spike import robust_z
from halfstep.watch.settings import Watch
from halfstep.watch.window import Window

RUN = RunStart(0.0, session="s")
POWER = [1.8 + 8 * step**-0.3 for step in range(1, 5001)]


def found(rule, losses, norms=None, pauses=None, golden=None, **limits):
    """Step to what the rule finds after it."""
    window, rule, time = Window(RUN, golden), all_rules()[rule], 0.0
    findings = {}
    for number, loss in enumerate(losses, 1):
        time += 0.1 if pauses is None else pauses[number - 1]
        window.add(Step(number, time, loss, 1.0 if norms is None else norms[number - 1], count=32.0))
        if finding := rule.check(window, {**rule.limits, **limits}):
            findings[number] = finding
    return findings


def noisy(levels, sigma, seed=0):
    """Log-normal noise: what a small batch has."""
    draw = random.Random(seed)
    return [level * math.exp(draw.gauss(0, sigma)) for level in levels]


def gamma(levels):
    draw = random.Random(1)
    return [level * draw.gammavariate(4, 0.25) for level in levels]


def random_walk(length):
    """A run that has fitted its data: its loss is next to nothing and moves by factors."""
    draw, at, losses = random.Random(2), 0.0, []
    for step in range(length):
        at = 0.99 * at + 0.1 * draw.gauss(0, 1)
        losses.append(2.3 * math.exp(-step / 300) + 1e-3 * math.exp(at + draw.gauss(0, 0.3)))
    return losses


# Loss spike.

HEALTHY = {
    "power law": noisy(POWER, 0.02),
    "small batches": noisy(POWER, 0.5),
    "gamma noise": gamma(POWER),
    "accumulated, next to no noise": noisy(POWER, 0.002),
    "cosine": noisy([p - 0.15 * (1 - math.cos(math.pi * i / 5000)) for i, p in enumerate(POWER)], 0.02),
    "plateau that ends": noisy([2.3 if i < 2500 else 0.3 + 2 * math.exp(-(i - 2500) / 100) for i in range(5000)], 0.03),
    "easier data": noisy([p * (0.6 if i > 2500 else 1) for i, p in enumerate(POWER)], 0.03),
    "warm-up of the rate": noisy([p * (1 + 0.2 * max(0, min(1, (i - 200) / 300))) for i, p in enumerate(POWER)], 0.005),
    "ordered data": noisy([p * (1 + 0.1 * math.sin(i / 40)) for i, p in enumerate(POWER)], 0.03),
    "through zero": [3 - 6 * i / 5000 + random.Random(i).gauss(0, 0.2) for i in range(3000)],
    "fitted": random_walk(5000),
    "steep start": noisy([10 * math.exp(-i / 20) + 0.5 for i in range(1000)], 0.05),
    "steps down only": noisy([p / 3 if i % 500 == 499 else p for i, p in enumerate(POWER)], 0.02),
    "constant": [0.7] * 1000,
}


@pytest.mark.parametrize("losses", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_loss_is_no_spike(losses):
    assert found("loss-spike", losses) == {}


@pytest.mark.parametrize("factor", [1.5, 2, 10])
@pytest.mark.parametrize("sigma", [0.002, 0.02])
@pytest.mark.parametrize("length", [1, 30])
def test_a_spike_is_found_at_its_first_step(factor, sigma, length):
    for seed in range(4):
        at = random.Random(seed).randrange(300, 900)
        losses = noisy(POWER[:950], sigma, seed)
        losses[at - 1 : at - 1 + length] = [factor * loss for loss in losses[at - 1 : at - 1 + length]]
        findings = found("loss-spike", losses)
        assert min(findings) == at
        assert max(findings) < at + length
        assert findings[at].situation == "spike"


def test_a_spike_says_its_numbers():
    losses = [*noisy([2.0] * 200, 0.02), 6.03]
    (finding,) = found("loss-spike", losses).values()
    middle, z = median(losses[-100:-1]), robust_z(6.03, losses[-100:-1])
    assert finding.message == (
        f"the loss is 6.03, {6.03 / middle:.3g} times the median of 99 steps before it;"
        f" {z:.3g} robust standard deviations above it"
    )
    assert found("loss-spike", [2.0] * 200 + [3.0])[201].message.endswith(
        "1.5 times the median of 99 steps before it; nothing moved before"
    )


def test_batches_of_another_kind_are_no_spikes():
    draw = random.Random(3)
    losses = noisy([p * (2 if draw.random() < 0.1 else 1) for p in POWER], 0.05)
    assert found("loss-spike", losses) == {}
    losses[3000] *= 3
    assert 3001 in found("loss-spike", losses)


def test_a_loss_below_zero_has_spikes_too():
    draw = random.Random(4)
    losses = [-5 + 4 * 0.99**i + draw.gauss(0, 0.1) for i in range(1500)]
    assert found("loss-spike", losses) == {}
    losses[1200] += 3
    (finding,) = found("loss-spike", losses).values()
    assert "above the median" in finding.message
    assert finding.step is None


def test_the_margin_and_the_floor_of_a_spike_are_limits():
    losses = [1.0] * 300 + [1.2]
    assert not found("loss-spike", losses)
    assert found("loss-spike", losses, margin_pct=10.0)
    converged = [5.0] * 100 + [0.01] * 300 + [0.04]
    assert not found("loss-spike", converged)
    assert found("loss-spike", converged, floor_pct=0.1)
    wide = [*noisy([1.0] * 400, 0.1, 5), 1.7]
    assert not found("loss-spike", wide)
    assert found("loss-spike", wide, z=4.0).keys() == {401}


def test_the_margin_is_from_the_window_where_that_lies_above_the_last_block():
    assert not found("loss-spike", [1.0] * 200 + [1.2] * 80 + [1.3])
    assert found("loss-spike", [1.0] * 200 + [1.2] * 80 + [1.6]).keys() == {281}


def test_nothing_is_a_spike_in_the_first_hundred_steps_or_with_half_a_window():
    assert not found("loss-spike", [1.0] * 80 + [9.0] + [1.0] * 10)
    window, rule = Window(RUN), all_rules()["loss-spike"]
    for number in range(1, 301):
        window.add(Step(number, number, 1.0, 1.0))
    window.resume(300)
    for number in range(301, 301 + 49):
        window.add(Step(number, number, 1.0, 1.0))
    spike = Step(350, 350, 9.0, 1.0)
    window.add(spike)
    assert rule.check(window, rule.limits) is None
    window.resume(300)
    for number in range(301, 301 + 50):
        window.add(Step(number, number, 1.0, 1.0))
    window.add(Step(351, 351, 9.0, 1.0))
    assert rule.check(window, rule.limits).situation == "spike"


def test_losses_that_are_not_finite_are_no_part_of_the_noise_and_no_spike():
    losses = noisy(POWER[:500], 0.02)
    losses[400:440] = [math.nan, math.inf] * 20
    assert found("loss-spike", losses) == {}
    losses[450] *= 2
    assert found("loss-spike", losses).keys() == {451}


def test_a_loss_that_climbs_without_a_jump_is_found():
    levels = POWER[:2000] + [POWER[2000] * 1.003**i for i in range(400)]
    findings = found("loss-spike", noisy(levels, 0.02))
    assert {finding.situation for finding in findings.values()} == {"climb"}
    assert min(findings) == 2200  # e ** (0.003 x 150) = 1.57
    assert "of steps 1901 to 2000" in findings[2200].message
    assert "near step 2000" in findings[2200].action
    assert found("loss-spike", noisy(levels, 0.02), climb_pct=150.0).keys() == {2400}


def test_a_climb_has_to_leave_the_noise():
    assert not found("loss-spike", [0.4, 1.6] * 50 + [1.0, 2.2] * 50)
    assert found("loss-spike", [0.9, 1.1] * 50 + [1.5, 1.7] * 50)[200].situation == "climb"


def test_a_spike_that_stays_is_told_twice_and_not_more():
    losses = [2.0 * (1.01 if i % 2 else 1) * (3 if i >= 570 else 1) for i in range(1500)]
    guard = Guard(RUN, Watch(rules={name: name == "loss-spike" for name in all_rules()}))
    alerts = [alert for i, loss in enumerate(losses, 1) for alert in guard.see(Step(i, i, loss, 1.0))]
    assert [alert.step for alert in alerts] == [571, 700]
    assert "climbed and stayed up" in alerts[1].message


def z_of(others, loss):
    middle = median(others)
    return (loss - middle) / (1.4826 * median([abs(other - middle) for other in others]))


def plain_spikes(losses):
    """The definition, without a quick look: steps whose loss is a spike."""
    first = median(losses[:100])
    steps = set()
    for step in range(101, len(losses) + 1):
        loss, others = losses[step - 1], losses[step - 100 : step - 1]
        middle = median(others)
        rise = loss - middle
        if rise > 0.25 * abs(middle) and rise > 0.01 * abs(first) and rise > 1.5 * (max(others) - middle):
            positive = loss > 0 and min(others) > 0
            change = math.log if positive else float
            if z_of([change(other) for other in others], change(loss)) > 6:
                steps.add(step)
    return steps


@pytest.mark.parametrize("level", [2.0, -2.0, 0.1])
def test_on_a_plateau_the_quick_look_loses_no_spike(level):
    draw = random.Random(6)
    losses = [level + 0.1 * draw.gauss(0, 1) + (draw.random() < 0.02) * draw.uniform(0, 3) for _ in range(3000)]
    steps = {step for step, finding in found("loss-spike", losses).items() if finding.situation == "spike"}
    assert steps == plain_spikes(losses)
    assert len(steps) >= 10


# A loss that is not finite.


@pytest.mark.parametrize(
    ("loss", "norm", "words"),
    [
        (math.nan, math.nan, "the loss is NaN and the gradient norm NaN; 1 of the last 6 losses"),
        (math.inf, math.inf, "the loss is inf and the gradient norm inf; 1 of"),
        (-math.inf, 2.5, "the loss is -inf and the gradient norm 2.5; 1 of"),
    ],
)
def test_a_loss_that_is_not_finite_is_told_at_once(loss, norm, words):
    findings = found("loss-not-finite", [1.0] * 5 + [loss, 1.0], [1.0] * 5 + [norm, 1.0])
    assert findings.keys() == {6}
    assert findings[6].message.startswith(words)


def test_a_gradient_alone_is_no_matter_of_the_loss():
    assert found("loss-not-finite", [1.0] * 3, [math.nan, math.inf, 1.0]) == {}


def test_calibration_does_not_excuse_a_loss_and_it_is_told_once():
    scale = {"kind": "dynamic", "init": 65536.0, "growth": 2.0, "backoff": 0.5, "interval": 2000, "floor": 1.0}
    guard = Guard(RunStart(0.0, scale=scale), Watch(rules={name: name == "loss-not-finite" for name in all_rules()}))
    steps = [Step(i, i, math.nan, math.nan, 65536.0, applied=False) for i in range(1, 301)]
    alerts = [alert for step in steps for alert in guard.see(step)]
    assert [(alert.step, alert.severity) for alert in alerts] == [(1, "error")]


# Gradient norm drift.


@pytest.mark.parametrize(
    "norms",
    [
        noisy([0.3 + 10 * step**-0.6 for step in range(1, 5001)], 0.3),
        noisy([0.3 * (1 + 3 * step / 5000) for step in range(5000)], 0.3),
        noisy([0.05 + min(step, 2000) / 2000 for step in range(5000)], 0.3),
        noisy([0.5] * 5000, 1.0),
        [50.0 if step % 40 == 0 else 0.3 for step in range(5000)],
        [6.0 if 2000 <= step < 2149 else 0.3 for step in range(5000)],
    ],
    ids=["falls", "grows fourfold", "warm-up", "heavy tails", "peaks", "high for 149 steps"],
)
def test_a_healthy_gradient_norm_does_not_drift(norms):
    assert found("gradient-norm-drift", noisy(POWER, 0.03), norms) == {}


@pytest.mark.parametrize("factor", [8, 30])
def test_a_gradient_norm_that_grows_is_found_once(factor):
    norms = noisy([0.3 * factor ** min(1, max(0, (step - 2000) / 300)) for step in range(4000)], 0.3)
    findings = found("gradient-norm-drift", noisy([2.5] * 4000, 0.03), norms)
    assert min(findings) in (2300, 2400)
    assert "of steps 1101 to 2100, and the loss is no lower" in findings[2300].message if 2300 in findings else True
    guard = Guard(RUN, Watch(rules={name: name == "gradient-norm-drift" for name in all_rules()}))
    assert sum(len(guard.see(Step(i, i, 2.5, norm))) for i, norm in enumerate(norms, 1)) == 1


def test_a_run_that_learns_something_new_may_have_a_large_norm():
    norms = [0.3] * 2000 + [3.0] * 1000
    assert found("gradient-norm-drift", [2.3] * 2000 + [2.3 * 0.995**i for i in range(1000)], norms) == {}
    assert min(found("gradient-norm-drift", [2.3] * 3000, norms)) == 2200


def test_a_norm_that_is_far_below_its_start_may_move():
    norms = noisy([2 * math.exp(-step / 100) + (0.1 if step > 2000 else 0.01) for step in range(3000)], 0.3)
    assert found("gradient-norm-drift", [2.3] * 3000, norms) == {}
    assert min(found("gradient-norm-drift", [2.3] * 3000, norms, floor_pct=5.0)) == 2200


def test_a_norm_that_grows_in_its_first_blocks_warms_up():
    assert found("gradient-norm-drift", [2.3] * 1500, [0.3] * 200 + [3.0] * 1300) == {}


def test_norms_that_are_not_finite_say_nothing_of_a_drift():
    norms = [0.3] * 1000 + [math.inf] * 500
    assert found("gradient-norm-drift", [2.3] * 1500, norms) == {}
    assert found("gradient-norm-drift", [2.3] * 1500, [math.nan] * 1000 + [5.0] * 500) == {}


# Throughput.


def pauses_of(extra, length=3000, seed=8):
    draw = random.Random(seed)
    return [0.1 * math.exp(draw.gauss(0, 0.15)) + extra(step) for step in range(1, length + 1)]


@pytest.mark.parametrize(
    "extra",
    [
        lambda step: 120 * (step % 1000 == 0),
        lambda step: 20 * (step % 100 == 0),
        lambda step: 0.5 * (step < 150),
        lambda step: 0.3 * (step % 5 == 0),
        lambda step: 1.0 * (1000 < step <= 1100),
        lambda step: 0.02 * math.sin(step / 900),
    ],
    ids=["evaluation", "checkpoint", "slow start", "jitter", "slow for 100 steps", "swing"],
)
def test_pauses_that_a_healthy_run_has_are_no_drop(extra):
    assert found("throughput-drop", [1.0] * 3000, pauses=pauses_of(extra)) == {}


def test_a_run_that_gets_slower_and_stays_so_is_found():
    findings = found("throughput-drop", [1.0] * 3000, pauses=pauses_of(lambda step: 0.08 * (step > 1000)))
    assert min(findings) == 1200
    assert "1.8 times the usual 0.101 s; 177.1 a second instead of 318.1" in findings[1200].message
    assert not found("throughput-drop", [1.0] * 3000, pauses=pauses_of(lambda step: 0.08 * (step > 1000)), factor=2.0)


def test_longer_steps_that_hold_more_are_no_drop():
    window, rule = Window(RUN), all_rules()["throughput-drop"]
    time = 0.0
    for number in range(1, 2001):
        longer = 3.0 if number > 1000 else 1.0
        time += longer * 0.1
        window.add(Step(number, time, 1.0, 1.0, count=longer * 512))
        assert rule.check(window, rule.limits) is None


def test_less_in_a_step_that_takes_as_long_is_no_drop():
    window, rule = Window(RUN), all_rules()["throughput-drop"]
    for number in range(1, 2001):
        window.add(Step(number, 0.1 * number, 1.0, 1.0, count=512.0 if number <= 1000 else 100.0))
        assert rule.check(window, rule.limits) is None


def test_a_clock_that_stands_still_says_nothing():
    assert found("throughput-drop", [1.0] * 1000, pauses=[0.0] * 1000) == {}
    assert found("throughput-drop", [1.0] * 1000, pauses=[0.0] * 500 + [0.1] * 500) == {}


# Stalled.


def silent(window, seconds):
    window.now = window.last.time + seconds
    rule = all_rules()["stalled"]
    return rule.check(window, rule.limits)


@pytest.mark.parametrize(("pause", "limit"), [(0.5, 60), (10.0, 200)])
@pytest.mark.parametrize("length", [7, 250])
def test_a_run_is_stalled_after_twenty_pauses_and_a_minute(pause, limit, length):
    window = Window(RUN)
    for number in range(1, length + 1):
        window.add(Step(number, number * pause, 1.0, 1.0))
    assert silent(window, limit) is None
    finding = silent(window, limit + 1)
    assert (finding.step, finding.situation) == (length, str(length))
    assert finding.message == f"no step for {limit + 1} s after step {length}, where {pause:.3g} s is usual"
    assert stalled.longest_pause(pause) == limit


@pytest.mark.parametrize("num_steps", [1, 2])
def test_until_two_pauses_are_known_ten_minutes_are_no_silence(num_steps):
    window = Window(RUN)
    for number in range(1, num_steps + 1):
        window.add(Step(number, number * 90.0, 1.0, 1.0))
    assert silent(window, 600.0) is None
    assert silent(window, 601.0).message == f"no step for 601 s after step {num_steps}"
    assert stalled.longest_pause(None) == 600.0
    assert stalled.longest_pause(None, {"factor": 20.0, "seconds": 900.0}) == 900.0
    window.add(Step(num_steps + 1, 600.0 + num_steps * 90.0, 1.0, 1.0))
    assert all_rules()["stalled"].check(window, stalled.LIMITS) is None


def test_the_limits_of_the_settings_are_those_of_a_silence():
    window, rule = Window(RUN), all_rules()["stalled"]
    for number in range(1, 51):
        window.add(Step(number, float(number), 1.0, 1.0))
    window.now = window.last.time + 70.0
    assert rule.check(window, {"factor": 20.0, "seconds": 65.0}) is not None
    assert rule.check(window, {"factor": 75.0, "seconds": 65.0}) is None
    assert rule.check(window, {"factor": 20.0, "seconds": 75.0}) is None


def test_a_late_step_is_judged_by_the_pauses_before_it():
    window = Window(RUN)
    for time in (1.0, 2.0, 3.0, 65.0):
        window.add(Step(len(window.steps) + 1, time, 1.0, 1.0))
    finding = all_rules()["stalled"].check(window, stalled.LIMITS)
    assert finding.message == "no step for 62 s after step 3, where 1 s is usual"


def bursts(num_steps, step_s=1.0, enqueue_s=0.01):
    """Times of a host that runs ahead of its GPU, and waits for it at every tenth step."""
    time, times = 0.0, []
    for number in range(1, num_steps + 1):
        time = max(time + enqueue_s, number * step_s if number % 10 == 0 else 0.0)
        times.append(time)
    return times


@pytest.mark.parametrize("num_steps", [50, 57, 101, 250])
def test_the_usual_pause_is_that_of_the_gpu(num_steps):
    window = Window(RUN)
    for number, time in enumerate(bursts(num_steps, 10.0), 1):
        window.add(Step(number, time, 1.0, 1.0))
    assert stalled.usual_pause([step.time for step in window.steps]) == pytest.approx(10.0)
    assert silent(window, 199.0) is None
    assert "where 10 s is usual" in silent(window, 202.0).message


def test_a_clock_that_is_no_number_tells_no_pause():
    assert stalled.usual_pause([1.0, 2.0, math.nan]) is None
    assert stalled.usual_pause([1.0, math.inf, 3.0, math.inf]) is None


def test_a_host_that_waits_for_its_gpu_at_every_tenth_step_is_as_fast_as_the_gpu():
    times = bursts(1000, 0.1) + [100.0 + time for time in bursts(2000, 0.16)]
    pauses = [late - early for early, late in pairwise([0.0, *times])]
    findings = found("throughput-drop", [1.0] * 3000, pauses=pauses)
    assert min(findings) == 1200
    assert "takes 0.16 s, 1.6 times the usual 0.1 s; 200 a second instead of 320" in findings[1200].message


def test_a_silence_is_told_once_whether_a_clock_or_the_next_step_shows_it():
    rules = {name: name == "stalled" for name in all_rules()}
    live, replay = Guard(RUN, Watch(rules=rules)), Guard(RUN, Watch(rules=rules))
    told = {live: [], replay: []}
    time = 0.0
    for number in range(1, 500):
        quiet = {200: 100, 230: 300, 400: 70}.get(number, 0.0)
        for tick in range(0, int(quiet), 10):
            told[live] += live.tick(time + tick)
        time += 1.0 + quiet
        for guard, alerts in told.items():
            alerts += guard.see(Step(number, time, 1.0, 1.0))
    assert [alert.step for alert in told[live]] == [alert.step for alert in told[replay]] == [199, 229, 399]


def test_the_pause_across_a_seam_is_no_silence():
    guard = Guard(RUN, Watch(rules={name: name == "stalled" for name in all_rules()}))
    alerts = [alert for i in range(1, 151) for alert in guard.see(Step(i, i, 1.0, 1.0))]
    alerts += guard.see({"kind": "seam", "step": 120, "time": 9000.0})
    alerts += [alert for i in range(121, 400) for alert in guard.see(Step(i, 9000 + i, 1.0, 1.0))]
    assert alerts == []


# Divergence from golden runs.

BAND = Band([100, 200, 300, 400], [1.0, 0.8, 0.6, 0.5], [1.4, 1.2, 1.0, 0.9])


def level(*blocks):
    return [loss for loss in blocks for _ in range(100)]


@pytest.mark.parametrize(
    ("blocks", "steps"),
    [
        ((1.3, 1.1, 0.9, 0.8), []),
        ((0.1, 0.1, 0.1, 0.1), []),
        ((1.5, 1.1, 1.1, 0.8), []),
        ((1.5, 1.3, 0.9, 0.8), [200]),
        ((1.3, 1.1, 1.1, 1.0), [400]),
        ((1.3, 1.1, 0.9, 1.0, 9.0, 9.0), []),
        ((1.3, 1.1, 1.0, 0.9), []),
    ],
    ids=["inside", "below", "out and back", "two out", "the last two", "the band has ended", "on its edge"],
)
def test_two_blocks_above_the_band_are_a_divergence(blocks, steps):
    assert list(found("golden-divergence", level(*blocks), golden=BAND)) == steps


def test_a_divergence_says_its_numbers():
    finding = found("golden-divergence", level(1.5, 1.3), golden=BAND)[200]
    assert (
        finding.message
        == "the median loss is 1.3, where golden runs have 1.2 at most: steps 1 to 200 lie above their band"
    )


def test_without_a_band_nothing_diverges():
    assert found("golden-divergence", level(9.0, 9.0)) == {}


def test_blocks_with_no_finite_loss_are_not_above_the_band():
    assert found("golden-divergence", level(math.nan, math.nan, 9.0), golden=BAND) == {}


def resumed(band, first, *blocks):
    window, rule = Window(RUN, band), all_rules()["golden-divergence"]
    for number, loss in enumerate(level(*blocks), first):
        window.add(Step(number, number, loss, 1.0))
    return rule.check(window, rule.limits)


def test_a_block_across_two_of_the_band_is_compared_with_the_higher():
    assert resumed(BAND, 51, 1.39, 1.19) is None
    assert resumed(BAND, 51, 1.41, 1.19) is None
    assert resumed(BAND, 51, 1.41, 1.21) is not None
    assert resumed(BAND, 251, 9.0, 9.0) is None  # steps 401 to 450 are beyond


def test_a_band_with_a_hole_says_nothing_there():
    hole = Band([200, 400], [0.8, 0.5], [1.2, 0.9])
    assert resumed(hole, 1, 9.0, 9.0) is None
    assert resumed(hole, 101, 9.0, 9.0) is None
    assert resumed(hole, 201, 9.0, 9.0) is None
    assert resumed(hole, 151, 9.0, 9.0) is None
    ends_in_hole = Band([100, 200, 400], [0.0] * 3, [1.0] * 3)
    assert resumed(ends_in_hole, 51, 9.0, 9.0) is None
    assert resumed(ends_in_hole, 1, 9.0, 9.0) is not None
    starts_in_hole = Band([200, 400, 500], [0.0] * 3, [1.0] * 3)
    assert resumed(starts_in_hole, 251, 9.0, 9.0) is None
    assert resumed(starts_in_hole, 301, 9.0, 9.0) is not None


# All of them.


def test_a_quiet_step_is_looked_at_in_constant_time():
    """No look at a healthy step goes through the window."""

    class Steps:
        def __init__(self, steps):
            self.steps = steps

        def __len__(self):
            return len(self.steps)

        def __getitem__(self, index):
            return self.steps[index]

        def __iter__(self):
            raise AssertionError("it goes through the window")

    names = "loss-spike loss-not-finite gradient-norm-drift throughput-drop stalled golden-divergence".split()
    window = Window(RUN, BAND)
    for number, loss in enumerate(noisy([2.0] * 250, 0.02), 1):
        window.add(Step(number, number, loss, 1.0))
    window.steps = Steps(window.steps)
    for name in names:
        rule = all_rules()[name]
        assert rule.check(window, rule.limits) is None
