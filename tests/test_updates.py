"""The meter for lost updates: its ulp against every 16-bit number, its shares against exact arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from reference import updates as twin
from reference.update_nets import DTYPES, Holder, MasterSGD, adamw, step
from torch import nn

from halfstep.updates import UpdateMeter, spacing, ulp

FORMATS = pytest.mark.parametrize("format", DTYPES)
NUMBERS = {format: twin.magnitudes(format) for format in DTYPES}


def every_finite_number(format):
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[format])
    return numbers[numbers.isfinite()]


def in_units(value):
    """A float as the twin counts it."""
    numerator, denominator = float(value).as_integer_ratio()
    number, rest = divmod(numerator << twin.UNIT, denominator)
    assert rest == 0
    return number


def place_of(weight):
    return (weight.view(torch.int16) & 0x7FFF).tolist()


# --- the ulp ---------------------------------------------------------------------------------------------------------


@FORMATS
def test_ulp_of_every_number(format):
    weights = every_finite_number(format)
    assert len(NUMBERS[format]) == len(weights) // 2
    for place, size in zip(place_of(weights), ulp(weights).tolist(), strict=True):
        assert in_units(size) == twin.ulp(NUMBERS[format], place)


@FORMATS
def test_ulp_of_what_is_no_number(format):
    assert ulp(torch.tensor([math.inf, -math.inf, math.nan], dtype=DTYPES[format])).isnan().all()


@FORMATS
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_spacing_of_every_number_to_either_side(format, sign):
    weights = every_finite_number(format)
    sizes = spacing(weights, torch.full(weights.shape, sign))
    for weight, place, size in zip(weights.tolist(), place_of(weights), sizes.tolist(), strict=True):
        is_outward = weight == 0 or weight * sign > 0
        assert in_units(size) == twin.ulp(NUMBERS[format], place if is_outward else place - 1)


@FORMATS
def test_under_half_the_spacing_is_what_rounding_takes_back(format):
    numbers, dtype = NUMBERS[format], DTYPES[format]
    # All powers of two with their neighbours, zero, the largest, and every 61st number between.
    places = {0, len(numbers) - 1, *range(0, len(numbers), 61)}
    mantissa_bits = twin.BITS[format][1]
    places |= {p + off for p in range(0, len(numbers), 2**mantissa_bits) for off in (-1, 0, 1) if p + off >= 0}
    for sign in (1.0, -1.0):
        for weight in torch.tensor(sorted(places), dtype=torch.int16).view(dtype):
            half = in_units(spacing(weight, torch.tensor(sign))) // 2
            one, place = int(sign), place_of(weight)
            value = in_units(weight)
            finer = half >> 11
            assert twin.is_lost(numbers, value, one * (half - finer))
            assert not twin.is_lost(numbers, value, one * (half + finer))
            # The tie goes to the even neighbour, so half of all weights stay there too.
            assert twin.is_lost(numbers, value, one * half) == (place % 2 == 0)


def test_the_twin_rounds_as_torch_does():
    for format, dtype in DTYPES.items():
        torch.manual_seed(0)
        values = torch.randn(2000) * torch.randint(-30, 16, (2000,)).float().exp2()
        for value, rounded in zip(values.tolist(), values.to(dtype).tolist(), strict=True):
            assert twin.rounded(NUMBERS[format], in_units(value)) == (
                in_units(rounded) if math.isfinite(rounded) else None
            )


# --- shares against exact arithmetic ---------------------------------------------------------------------------------


def cases(format):
    """Weights, gradients and a rate whose product and sum are exact in fp32, so that torch rounds once."""
    torch.manual_seed(1)
    weights = torch.cat([torch.randn(900) / 2, torch.tensor([0.0, 0.5, -0.5, 1.0, -1.0, 2.0]).repeat(20)]).to(
        DTYPES[format]
    )
    weights = (weights * 2**14).round() / 2**14  # multiples of 2^-14 below 4 leave room for updates down to 2^-21
    gradients = torch.randint(-64, 65, weights.shape).to(DTYPES[format])
    gradients[torch.rand(weights.shape) < 0.1] = 0.0
    return weights, gradients, {"bf16": 2.0**-15, "fp16": 2.0**-18}[format]


@FORMATS
def test_plain_sgd_loses_what_exact_arithmetic_says(format):
    weights, gradients, lr = cases(format)
    model = Holder(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    meter = UpdateMeter(model, optimizer, every=1, num_samples=2000)
    step(optimizer, gradients)
    (module,) = meter.report().modules
    lost = [
        twin.is_lost(NUMBERS[format], in_units(weight), -in_units(lr * gradient))
        for weight, gradient in zip(weights.tolist(), gradients.tolist(), strict=True)
        if gradient
    ]
    assert 0.2 < sum(lost) / len(lost) < 0.8  # the case can tell
    assert module.num_samples == len(lost)
    assert module.unmoved_pct == module.below_half_ulp_pct == pytest.approx(100 * sum(lost) / len(lost), abs=1e-9)
    assert (module.module, module.format, module.num_weights) == ("weights", format, len(weights))


@FORMATS
def test_a_master_weight_shows_the_updates_that_it_keeps(format):
    weights, gradients, lr = cases(format)
    model = Holder(weights)
    optimizer = MasterSGD(model.parameters(), lr)
    meter = UpdateMeter(model, optimizer, every=1, num_samples=2000, exact=optimizer.exact)
    step(optimizer, gradients)
    report = meter.report()
    pairs = [(w, g) for w, g in zip(weights.tolist(), gradients.tolist(), strict=True) if g]
    sizes = []
    for weight, gradient in pairs:
        place = place_of(torch.tensor(weight, dtype=DTYPES[format]))
        is_outward = weight == 0 or weight * -gradient > 0
        gap = twin.ulp(NUMBERS[format], place if is_outward else place - 1)
        sizes.append(in_units(lr * abs(gradient)) / gap)
    assert report.unmoved_pct == 0.0
    assert report.below_half_ulp_pct == pytest.approx(100 * sum(size < 0.5 for size in sizes) / len(sizes), abs=1e-9)
    assert 20 < report.below_half_ulp_pct < 80
    # The weighted median of equal weights is the lower one of an even number.
    assert report.modules[0].median_ulps == sorted(sizes)[(len(sizes) - 1) // 2]
    assert report.advice == ""


def test_a_master_weight_can_lose_updates_too():
    model = Holder(torch.ones(50, dtype=torch.bfloat16))
    optimizer = MasterSGD(model.parameters(), 2.0**-30)  # fp32 has half an ulp of 2^-25 below 1
    meter = UpdateMeter(model, optimizer, every=1, exact=optimizer.exact)
    step(optimizer, torch.ones(50, dtype=torch.bfloat16))
    report = meter.report()
    # The master did not move, so only the gradient says that there was an update.
    assert (report.unmoved_pct, report.below_half_ulp_pct, report.modules[0].num_samples) == (100.0, 100.0, 50)
    assert "too small for its master weight" in report.advice
    assert "split16" not in report.advice


@FORMATS
@pytest.mark.parametrize("lr", [3e-5, 3e-4, 3e-3])
def test_first_step_of_adamw_is_lr_whatever_the_gradient(format, lr):
    torch.manual_seed(0)
    model = nn.Linear(100, 100, bias=False).to(DTYPES[format])
    # Moments in 16 bit round, and of the first step m / sqrt(v) is 1 to 2^-7; no half spacing is that near to lr.
    half = spacing(model.weight.detach(), torch.ones(()).expand(100, 100)) / 2
    assert not ((half / lr - 1).abs() < 2**-6).any()
    optimizer = adamw(model, lr, weight_decay=0.0)
    meter = UpdateMeter(model, optimizer, every=1, num_samples=10_000)
    gradient = torch.randn(100, 100).to(DTYPES[format])
    before = model.weight.detach().clone()
    step(optimizer, gradient)
    expected = spacing(before, -gradient.float()) / 2 > lr
    assert meter.report().unmoved_pct == pytest.approx(100 * expected.float().mean().item(), abs=1e-4)  # an fp32 mean
