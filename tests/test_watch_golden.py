"""The band of golden runs: from their logs, by a formula that a slow twin repeats."""

import json
import math
import random

import pytest

from halfstep.errors import HalfstepError
from halfstep.watch.check import check
from halfstep.watch.entry import RunStart, Step
from halfstep.watch.golden import read_band
from halfstep.watch.settings import Watch


def write(folder, *entries, rank=0):
    """A log of entries; a number is the loss of one more step."""
    folder.mkdir(exist_ok=True)
    number, lines = 0, [RunStart(0.0, rank, session="s", pid=0).to_entry()]
    for entry in entries:
        if isinstance(entry, dict):
            number = entry["step"] if entry["kind"] == "seam" else 0
        else:
            number += 1
            entry = Step(number, float(number), entry, 1.0).to_entry()
        lines.append(entry)
    lines.append({"kind": "end", "time": 9e9, "state": "finished"})
    (folder / f"rank-{rank:05d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def losses(seed, length, level=1.0, sigma=0.05):
    draw = random.Random(seed)
    return [level * (1 + 3 * step**-0.5) * math.exp(draw.gauss(0, sigma)) for step in range(1, length + 1)]


def middle_of(values):
    values = sorted(values)
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2


def plain_band(runs):
    band = []
    for start in range(0, min(map(len, runs)) // 100 * 100, 100):
        ends = []
        for run in runs:
            block = [loss for loss in run[start : start + 100] if math.isfinite(loss)]
            middle = middle_of(block)
            width = max(1.4826 * middle_of([abs(loss - middle) for loss in block]), 0.01 * abs(middle))
            ends += [middle - width, middle + width]
        band.append((start + 100, min(ends), max(ends)))
    return band


@pytest.mark.parametrize("num_runs", [1, 3])
@pytest.mark.parametrize("level", [1.0, -2.0])
@pytest.mark.parametrize("sigma", [0.001, 0.1])
def test_a_band_is_what_the_formula_says(tmp_path, num_runs, level, sigma):
    runs = [losses(seed, 450 - 100 * (seed == 1), level, sigma) for seed in range(num_runs)]
    band = read_band([write(tmp_path / str(seed), *run) for seed, run in enumerate(runs)])
    steps, low, high = zip(*plain_band(runs), strict=True)
    assert tuple(band.steps) == steps
    assert band.low == pytest.approx(low, rel=1e-6)
    assert band.high == pytest.approx(high, rel=1e-6)
    assert list(band.steps) == ([100, 200, 300] if num_runs == 3 else [100, 200, 300, 400])


def test_a_loss_without_noise_has_a_band_of_one_percent(tmp_path):
    band = read_band([write(tmp_path / "run", *[2.0] * 100)])
    assert (band.low, band.high) == ([1.98], [2.02])


def test_steps_that_a_seam_replaced_do_not_count(tmp_path):
    first, second = losses(0, 250), losses(1, 150, 0.5)
    seam = {"kind": "seam", "time": 1.0, "step": 120}
    resumed = read_band([write(tmp_path / "resumed", *first, seam, *second)])
    plain = read_band([write(tmp_path / "plain", *first[:120], *second)])
    assert resumed == plain
    assert list(resumed.steps) == [100, 200]


def test_a_seam_with_nothing_after_it_takes_back_what_was(tmp_path):
    seam = {"kind": "seam", "time": 1.0, "step": 120}
    assert list(read_band([write(tmp_path / "run", *losses(0, 250), seam)]).steps) == [100]


def test_a_run_that_began_anew_counts_from_there(tmp_path):
    first, second = losses(0, 350), losses(1, 200, 0.5)
    anew = RunStart(5.0, session="t").to_entry()
    assert read_band([write(tmp_path / "anew", *first, anew, *second)]) == read_band(
        [write(tmp_path / "plain", *second)]
    )


def test_blocks_that_are_mostly_not_finite_are_left_out(tmp_path):
    run = losses(0, 400)
    run[100:151] = ["NaN"] * 51
    run[200:250] = ["Infinity"] * 50
    run = [float(loss) for loss in run]
    band = read_band([write(tmp_path / "run", *run)])
    assert list(band.steps) == [100, 300, 400]
    assert (band.low[1], band.high[1]) == pytest.approx(plain_band([run[200:300]])[0][1:], rel=1e-6)


def test_folders_without_a_log_are_an_error(tmp_path):
    good = write(tmp_path / "good", *losses(0, 200))
    with pytest.raises(HalfstepError, match=r"^log .*none.rank-00000\.jsonl: it cannot be read"):
        read_band([good, str(tmp_path / "none")])
    short = write(tmp_path / "short", *losses(0, 99))
    with pytest.raises(HalfstepError, match=r"^golden runs .*good, .*short: they have no 100 steps in common"):
        read_band([good, short])
    other_rank = write(tmp_path / "rank one", *losses(0, 200), rank=1)
    with pytest.raises(HalfstepError, match="it cannot be read"):
        read_band([other_rank])


@pytest.mark.parametrize("num_golden", [1, 3])
def test_a_run_of_another_seed_stays_in_the_band_and_a_worse_one_leaves_it(tmp_path, num_golden):
    golden = tuple(write(tmp_path / f"golden-{seed}", *losses(seed, 800)) for seed in range(num_golden))
    settings = Watch(golden=golden)
    for seed in (10, 11):
        report = check(write(tmp_path / "good", *losses(seed, 1100)), settings)
        assert not report.found, str(report)
    worse = losses(20, 800)
    worse[500:] = [loss * 1.15 for loss in worse[500:]]
    report = check(write(tmp_path / "worse", *worse), settings)
    assert [(alert.rule, alert.step) for alert in report.alerts] == [("golden-divergence", 700)]
