"""What a format loses at any scale, from the exponents alone, against rounding every value."""

from __future__ import annotations

import math

import pytest
import torch
from reference.ranges import brute_force_scale, counts, spread

from halfstep.explain.histogram import Histogram, best_scale
from halfstep.formats import FORMATS
from halfstep.record import Values
from halfstep.record.rows import measure

LOW = ("fp16", "bf16", "e5m2", "e4m3")


def histogram(values, scale=1.0):
    return Histogram.of([Values("fp32", tuple(values.shape), None, tuple(measure(values).tolist()))], scale)


@pytest.mark.parametrize("format", LOW)
def test_counts_at_every_scale_are_those_of_rounding_each_value(format):
    values = spread(4000)
    own = histogram(values)
    assert own.num_nonzero == int((values != 0).sum())
    for power in range(-30, 45):
        loss = own.loss(FORMATS[format], 2.0**power)
        flushed, subnormal, over = counts(values, format, 2.0**power)
        assert (loss.flushed, loss.subnormal, loss.overflows) == (flushed, subnormal, over > 0), power


def test_bf16_reaches_as_far_down_as_fp32_nearly():
    values = spread(4000, -125, -90)
    for power in range(-30, 20):
        loss = histogram(values).loss(FORMATS["bf16"], 2.0**power)
        assert (loss.flushed, loss.subnormal) == counts(values, "bf16", 2.0**power)[:2], power


@pytest.mark.parametrize("format", LOW)
def test_overflow_is_that_of_rounding(format):
    limit = FORMATS[format].max
    half_step = math.ldexp(FORMATS[format].eps, math.frexp(limit)[1] - 2)
    for value in (limit, limit + half_step / 2, limit + half_step, limit + 2 * half_step, 2 * limit):
        values = torch.tensor([value, 1.0])
        if math.isinf(values[0]):
            continue
        loss = histogram(values / 4).loss(FORMATS[format], 4.0)
        assert loss.overflows == (counts(values, format)[2] > 0), value
        assert loss.headroom_bits == pytest.approx(math.log2(limit / values[0].item()))


def test_a_tie_at_half_the_smallest_subnormal_is_the_one_that_is_not_seen():
    loss = histogram(torch.tensor([2.0**-25])).loss(FORMATS["fp16"])
    assert counts(torch.tensor([2.0**-25]), "fp16")[0] == 1
    assert (loss.flushed, loss.subnormal) == (0, 1)


def test_the_lost_sum_is_about_that_of_the_values():
    values = spread(20000, -30, -20)
    lost = 100 * values[values.abs() < 2.0**-25].abs().sum() / values.abs().sum()
    # The middle of a bin is off by a third of it at most, and evenly spread exponents lie a little below it.
    assert histogram(values).loss(FORMATS["fp16"]).lost_sum_pct == pytest.approx(lost.item(), rel=0.1)


def test_scaled_values_are_counted_as_what_they_were():
    values = spread(500)
    assert histogram(values * 256, 256.0) == histogram(values)


def test_nothing_and_zeros_lose_nothing():
    for empty in (Histogram(), histogram(torch.zeros(5)), histogram(torch.empty(0))):
        loss = empty.loss(FORMATS["fp16"])
        assert (loss.flushed, loss.subnormal, loss.lost_sum_pct, loss.headroom_bits) == (0, 0, 0.0, None)
        assert not loss.overflows
        assert empty.share(loss.flushed) == 0.0
        assert best_scale([(empty, FORMATS["fp16"])]) is None
    assert best_scale([]) is None


def test_what_is_not_finite_is_counted_aside():
    own = histogram(torch.tensor([math.nan, math.inf, -math.inf, 3.0, 0.0]))
    assert (own.num_nonfinite, own.num_nonzero, own.num_zeros, own.largest) == (3, 1, 1, 3.0)


CASES = {
    "small": [(spread(200, -40, -20), "fp16")],
    "wide, so that a part is lost at any scale": [(spread(200, -60, 14), "fp16")],
    "large": [(spread(200, 10, 20), "fp16")],
    "nothing to gain": [(spread(200, -8, 4), "fp16")],
    "bf16": [(spread(200, -40, 10), "bf16")],
    "bf16 from its lower end": [(spread(200, -125, -100), "bf16")],
    "two formats": [(spread(200, -60, 2), "fp16"), (spread(200, -100, 30, seed=1), "bf16")],
    "the largest rounds down to max": [(torch.tensor([65519.0, 2.0**-40]), "fp16")],
    "the largest rounds up to inf": [(torch.tensor([65520.0, 2.0**-40]), "fp16")],
    "e4m3": [(spread(100, -20, 3), "e4m3")],
}


@pytest.mark.parametrize("parts", CASES.values(), ids=CASES)
def test_the_best_scale_is_that_of_trying_all(parts):
    assert best_scale([(histogram(v), FORMATS[f]) for v, f in parts]) == brute_force_scale(parts)
