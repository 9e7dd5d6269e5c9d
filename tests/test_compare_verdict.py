"""The verdict: its words, its closed forms against a plain twin, its edges, and how often it is wrong."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter

import pytest
from reference import tost

from halfstep.compare.verdict import (
    MAX_SEEDS,
    classify,
    failure_rate_bounds,
    judge,
    paired_interval,
    sd_lower_bound,
    seeds_to_settle,
)
from halfstep.errors import HalfstepError

NAN, INF = math.nan, math.inf
FP32 = [1.00, 1.10, 0.90, 1.05, 0.97]


# ---- the words


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (-0.5, 0.5, "equivalent"),
        (0.1, 0.5, "equivalent"),
        (-2.0, 0.5, "not worse"),
        (-2.0, -1.5, "not worse"),
        (-1.0, 0.5, "not worse"),  # a border that is touched is not crossed
        (0.1, 1.5, "worse"),
        (0.1, 1.0, "worse"),
        (1.1, 1.5, "materially worse"),
        (1.0, 1.5, "worse"),
        (-0.1, 1.5, "inconclusive"),
        (0.0, 1.0, "inconclusive"),
        (-3.0, 3.0, "inconclusive"),
    ],
)
def test_the_interval_against_a_margin_of_one(low: float, high: float, word: str) -> None:
    assert classify(low, high, 1.0) == word


def test_every_word_agrees_with_five_plain_tests() -> None:
    draw, words = random.Random(1), set()
    for _ in range(40):
        gap, sd = draw.choice([-0.6, 0.0, 0.15, 0.6]), draw.choice([0.03, 0.1, 0.3])
        candidate = [loss + draw.gauss(gap, sd) for loss in FP32]
        verdict = judge(FP32, candidate, margin=0.2)
        words.add(verdict.word)
        assert verdict.word == tost.word([c - r for r, c in zip(FP32, candidate, strict=True)], 0.2)
    assert words == {"equivalent", "not worse", "worse", "materially worse", "inconclusive"}


# ---- closed forms


def test_the_interval_is_the_textbook_one() -> None:
    low, high = paired_interval([1.0, 2.0, 3.0])
    half = 2.919986 * 1.0 / math.sqrt(3)  # t(0.95, 2) from any table
    assert (low, high) == pytest.approx((2 - half, 2 + half), rel=1e-6)
    assert tost.t_cdf(half * math.sqrt(3), 2) == pytest.approx(0.95, abs=1e-6)


@pytest.mark.parametrize("k", [3, 5, 10, 30])
def test_the_margin_is_the_lower_bound_of_sigma(k: int) -> None:
    values = [float(i) for i in range(k)]
    factor = sd_lower_bound(values) / math.sqrt(sum((v - (k - 1) / 2) ** 2 for v in values) / (k - 1))
    assert tost.chi2_cdf((k - 1) / factor**2, k - 1) == pytest.approx(0.95, abs=1e-6)


def test_the_margin_exceeds_sigma_in_one_case_of_twenty() -> None:
    draw = random.Random(2)
    over = sum(sd_lower_bound([draw.gauss(0, 1) for _ in range(5)]) > 1 for _ in range(4000))
    assert over / 4000 == pytest.approx(0.05, abs=3 * math.sqrt(0.05 * 0.95 / 4000))


@pytest.mark.parametrize(("n", "bound"), [(5, 0.4507), (10, 0.2589), (30, 0.0950)])
def test_no_failure_in_n_bounds_the_rate(n: int, bound: float) -> None:
    assert failure_rate_bounds(0, n) == (0.0, pytest.approx(bound, abs=1e-4))
    assert (1 - bound) ** n == pytest.approx(0.05, rel=2e-3)


def test_failure_bounds_solve_the_binomial() -> None:
    low, high = failure_rate_bounds(2, 7)
    at_least_2 = 1 - (1 - low) ** 7 - 7 * low * (1 - low) ** 6
    at_most_2 = sum(math.comb(7, i) * high**i * (1 - high) ** (7 - i) for i in range(3))
    assert (at_least_2, at_most_2) == pytest.approx((0.05, 0.05))
    assert failure_rate_bounds(4, 4)[1] == 1.0


@pytest.mark.parametrize(
    ("sd", "margin", "n"), [(2**0.5, 1.0, 14), (1.0, 1.0, 8), (2**0.5, 2.0, 5), (0.4**0.5, 1.0, 5)]
)
def test_seeds_needed_when_the_gap_is_nil(sd: float, margin: float, n: int) -> None:
    # rho 0, 0.5, 0, 0.8: sd of the differences is sigma sqrt(2 (1 - rho))
    assert seeds_to_settle(0.0, sd, margin) == n


@pytest.mark.parametrize("gap", [-0.3, 0.2, 0.7, 1.4])
def test_seeds_needed_reach_the_power_and_one_seed_fewer_does_not(gap: float) -> None:
    n = seeds_to_settle(gap, 1.0, 1.0)
    assert n is not None
    shares = [max(tost.settled_share(gap, 1.0, 1.0, k, 2000)) for k in (n - 1, n)]
    noise = 3 * math.sqrt(0.8 * 0.2 / 2000)
    assert shares[0] < 0.8 + noise
    assert shares[1] > 0.8 - noise


def test_seeds_needed_has_an_end() -> None:
    assert seeds_to_settle(0.0, 1.0, 0.0) is None, "without a margin and without a gap no number of seeds will do"
    assert seeds_to_settle(0.001, 1.0, 0.002) is None
    assert seeds_to_settle(0.0, 1.0, 2.5 / math.sqrt(MAX_SEEDS)) == pytest.approx(MAX_SEEDS, rel=0.02)
    assert seeds_to_settle(1.0, 0.0, 1.0) == 3
    assert seeds_to_settle(1.0, 1e-9, 1.0) == 3


def test_an_open_question_asks_for_more_than_there_are() -> None:
    verdict = judge(FP32, [1.1, 1.0, 1.0, 1.07, 1.01])
    assert verdict.word == "inconclusive"
    assert verdict.seeds_needed is not None
    assert verdict.seeds_needed > 5
    assert f"{verdict.seeds_needed} paired seeds" in verdict.reason


# ---- the edges


def test_fp32_against_itself_is_equivalent() -> None:
    verdict = judge(FP32, FP32)
    assert (verdict.word, verdict.gap, verdict.ci_low, verdict.ci_high) == ("equivalent", 0.0, 0.0, 0.0)
    assert verdict.rho == pytest.approx(1.0)
    assert "exactly 0" in verdict.reason
    assert judge([1.0] * 3, [1.0] * 3).word == "equivalent", "also where the margin is 0"


def test_a_gap_without_spread() -> None:
    r = [0.0, 1.0, 2.0]
    assert judge(r, [x + 0.25 for x in r]).word == "equivalent"
    assert judge(r, [x + 2.0 for x in r]).word == "materially worse"
    assert judge(r, [x - 2.0 for x in r]).word == "not worse"
    assert judge(r, [x + 0.5 for x in r], margin=0.5).word == "worse"


def test_equal_reference_seeds_leave_no_margin() -> None:
    verdict = judge([1.0] * 3, [1.0, 1.1, 0.9])
    assert (verdict.word, verdict.margin, verdict.seeds_needed) == ("inconclusive", 0.0, None)
    assert "give a margin" in verdict.reason
    assert judge([1.0] * 3, [1.1, 1.2, 1.15]).word == "materially worse"
    assert judge([1.0] * 3, [0.9, 0.8, 0.85]).word == "not worse"


@pytest.mark.parametrize("n", [0, 1, 2])
def test_under_three_pairs_there_is_no_verdict(n: int) -> None:
    verdict = judge(FP32[:n], [loss + 5 for loss in FP32[:n]])
    assert (verdict.word, verdict.seeds_needed, verdict.ci_low, verdict.found) == ("no verdict", 3, None, False)
    assert verdict.gap == (pytest.approx(5.0) if n else None)


def test_three_seeds_are_called_a_screening() -> None:
    assert "screening" in judge(FP32[:3], [loss + 5 for loss in FP32[:3]]).reason
    assert "screening" not in judge(FP32, [loss + 5 for loss in FP32]).reason


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_divergence_is_counted_apart_and_the_survivors_stay_visible(bad: float) -> None:
    verdict = judge(FP32, [1.0, bad, 0.9, 1.05, 0.97], candidate_name="fp16", reference_name="fp32")
    assert (verdict.word, verdict.found, verdict.num_diverged, verdict.num_pairs) == ("diverged", True, 1, 4)
    assert verdict.gap == 0.0
    assert verdict.reason.startswith("1 of 5 fp16 trials diverged, 1 of them where fp32 did not")


def test_one_seed_is_enough_to_see_a_divergence() -> None:
    assert judge([1.0], [NAN]).word == "diverged"


def test_a_reference_that_fails_as_well_is_said() -> None:
    verdict = judge([*FP32, NAN], [*FP32, NAN], reference_name="fp32")
    assert (verdict.word, verdict.num_pairs) == ("equivalent", 5)
    assert "fp32 fails as well, in 1 of 6 trials" in verdict.reason
    both = judge([1, NAN, 1, 1, 1.1], [1, 1, NAN, NAN, 1.2])
    assert both.word == "diverged"
    assert "McNemar p = 0.5)" in both.reason  # 2 against 1: P(at least 2 of 3 heads)
    assert judge([NAN] * 3, [1.0] * 3).word == "no verdict"


def test_zero_failures_are_not_sold_as_a_proof() -> None:
    assert "None of 5 trials diverged, which leaves room for a failure rate of up to 45 %." in judge(FP32, FP32).reason


@pytest.mark.parametrize("margin", [0.0, -1.0, NAN, INF])
def test_a_margin_must_be_a_number_above_zero(margin: float) -> None:
    with pytest.raises(HalfstepError, match="Give a finite margin above 0"):
        judge(FP32, FP32, margin)


def test_seeds_must_be_paired() -> None:
    with pytest.raises(HalfstepError, match="seed by seed"):
        judge([1.0, 2.0], [1.0])


def test_a_missing_scipy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(HalfstepError, match=r"halfstep\[torch\]"):
        judge(FP32, FP32)


# ---- how often it is wrong (benchmarks/verdict_calibration.py prints the table of docs/verdict.md)


def words(num_seeds: int, gap: float, rho: float, num_experiments: int, seed: int = 0) -> Counter[str]:
    """Words for normal losses of sigma 1 whose pairs correlate by ``rho``; ``gap`` in units of sigma."""
    draw, own = random.Random(seed), math.sqrt(1 - rho**2)
    found: Counter[str] = Counter()
    for _ in range(num_experiments):
        reference = [draw.gauss(0, 1) for _ in range(num_seeds)]
        found[judge(reference, [gap + rho * r + own * draw.gauss(0, 1) for r in reference]).word] += 1
    return found


@pytest.mark.parametrize("rho", [0.0, 0.9])
@pytest.mark.parametrize("num_seeds", [3, 5, 10])
def test_fp32_against_fp32_is_rarely_called_worse(num_seeds: int, rho: float) -> None:
    found = words(num_seeds, 0.0, rho, 1000)
    share = (found["worse"] + found["materially worse"]) / 1000
    # The true rate is below 5 %, the level of the one-sided t test; the rest is the noise of 1000 experiments.
    assert share <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 1000)


@pytest.mark.parametrize("gap", [3.0, 2.1])  # three sigma; three margins, which at ten seeds are 0.71 sigma on average
@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_a_gap_of_three_margins_is_found_with_ten_seeds(rho: float, gap: float) -> None:
    found = words(10, gap, rho, 300)
    assert (found["worse"] + found["materially worse"]) / 300 >= 0.8


@pytest.mark.parametrize("num_seeds", [3, 5, 10])
def test_a_gap_of_three_sigma_is_never_called_equivalent(num_seeds: int) -> None:
    for rho in (0.0, 0.9):
        assert words(num_seeds, 3.0, rho, 300)["equivalent"] == 0


@pytest.mark.parametrize("num_seeds", [3, 5, 10])
def test_a_gap_of_one_sigma_is_rarely_called_equivalent(num_seeds: int) -> None:
    # The worst case, where pairing removes nearly all the noise and only that of the margin is left.
    assert words(num_seeds, 1.0, 0.98, 500)["equivalent"] / 500 <= 0.05
