"""Layouts of master weights: against exact arithmetic, over every 16-bit weight, and at every tie."""

from fractions import Fraction

import pytest
import torch
from reference import layouts as twin

from halfstep.layouts import LAYOUTS

DTYPES = [torch.bfloat16, torch.float16]
NAMES = list(LAYOUTS)
FP16_EXACT_FROM = 2.0**-17


def every_16bit(dtype):
    """All finite numbers of a 16-bit format, as fp32."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype).float()
    return values[values.isfinite()]


def between(dtype):
    """Fp32 numbers between neighbours of a format: ties, their fp32 neighbours, and quarters."""
    values = every_16bit(dtype)
    values = values[values >= 0].sort().values
    low, high = values[:-1], values[1:]
    points = [low + (high - low) * share for share in (0.25, 0.5, 0.75)]
    ties = points[1]
    points += [torch.nextafter(ties, low), torch.nextafter(ties, high), torch.nextafter(low, high)]
    points = torch.cat(points)
    return torch.cat([points, -points])


def random_weights(dtype, count=200_000):
    """Weights over all magnitudes that the format has."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.empty(count).uniform_(*((-9, 4) if dtype == torch.float16 else (-38, 37)), generator=generator)
    return torch.randn(count, generator=generator) * 10.0**exponents


def weights_of(dtype):
    weights = torch.cat([every_16bit(dtype), between(dtype), random_weights(dtype)])
    return weights[weights.abs() <= torch.finfo(dtype).max]


def stored(name, weights, dtype, seed=0):
    layout = LAYOUTS[name]
    high = torch.empty(weights.shape, dtype=dtype)
    low = None if layout.low_dtype is None else torch.empty(weights.shape, dtype=layout.low_dtype)
    layout.write(weights.clone(), high, low, seed)
    return high, low


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_reading_and_writing_back_changes_no_bit(name, dtype):
    """A step that is skipped on the device leaves high and low as they are, whatever the seed."""
    high, low = stored(name, weights_of(dtype), dtype)
    layout = LAYOUTS[name]
    again, low_again = stored(name, layout.read(high, low).clone(), dtype, seed=1)
    assert torch.equal(again.view(torch.int16), high.view(torch.int16))
    if low is not None:
        assert torch.equal(low_again, low)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["copy", "split16"])
def test_exact_layouts_give_every_weight_back(name, dtype):
    weights = weights_of(dtype)
    if dtype == torch.float16 and name == "split16":
        weights = weights[weights.abs() >= FP16_EXACT_FROM]
    high, low = stored(name, weights, dtype)
    assert torch.equal(LAYOUTS[name].read(high, low).view(torch.int32), weights.view(torch.int32))


def test_split16_of_bf16_holds_all_exponents_and_signs_of_fp32():
    """One number in 4,093 of all fp32 bit patterns, subnormals and both zeros among them."""
    bits = torch.arange(-(2**31), 2**31, 4093, dtype=torch.int64).to(torch.int32)
    weights = torch.cat([bits.view(torch.float32), torch.tensor([0.0, -0.0, 1e-45, -1e-45])])
    weights = weights[weights.abs() < torch.finfo(torch.bfloat16).max]
    high, low = stored("split16", weights, torch.bfloat16)
    assert torch.equal(LAYOUTS["split16"].read(high, low).view(torch.int32), weights.view(torch.int32))


def test_small_fp16_weights_are_kept_to_2_to_the_minus_40():
    """The remainder counts steps of 2^-24 / 2^16 there, and is rounded to one: half a step, a whole one at a tie."""
    weights = weights_of(torch.float16)
    weights = weights[weights.abs() < FP16_EXACT_FROM]
    high, low = stored("split16", weights, torch.float16)
    assert (LAYOUTS["split16"].read(high, low) - weights).abs().max() <= 2.0**-40


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["copy", "split16", "split8", "kahan"])
def test_the_16bit_weight_is_a_nearest_one(name, dtype):
    weights = weights_of(dtype)
    high, _ = stored(name, weights, dtype)
    error = (high.double() - weights).abs()
    # Half an ulp is added in fp32, which rounds the sum: fp16 subnormals within 2^-49 of a tie go to the other side.
    assert (error <= (weights.to(dtype).double() - weights).abs() + 2.0**-48).all()


def sample(dtype):
    """Few enough for exact arithmetic: ties and their neighbours, and random ones."""
    points = between(dtype)
    points = torch.cat([points[:: len(points) // 700], random_weights(dtype, 700)])
    return points[points.abs() <= torch.finfo(dtype).max]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 16])
def test_split_is_the_twin(bits, dtype):
    weights = sample(dtype)
    high, low = stored(f"split{bits}", weights, dtype)
    read = LAYOUTS[f"split{bits}"].read(high, low)
    for weight, h, rest, r in zip(weights.tolist(), high.tolist(), low.tolist(), read.tolist(), strict=True):
        assert (Fraction(h), rest) == twin.split(weight, dtype, bits), weight
        exact = twin.join(h, rest, dtype, bits, weight < 0)
        assert Fraction(r) == twin.half_even(exact, twin.ulp(exact, torch.float32)), weight


@pytest.mark.parametrize("dtype", DTYPES)
def test_kahan_is_the_twin(dtype):
    weights = sample(dtype)
    high, error = stored("kahan", weights, dtype)
    for weight, h, e in zip(weights.tolist(), high.tolist(), error.tolist(), strict=True):
        assert (Fraction(h), Fraction(e)) == twin.kahan(weight, dtype), weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "kept"), [("split8", 2.0**-8), ("kahan", 2.0**-9)])
def test_what_survives_a_step_is_eight_bits_below_the_16bit_weight(name, kept, dtype):
    """split8 keeps the error to half a step of 1/256 ulp (to a whole one at a tie), kahan to 1/256 of half an ulp."""
    weights = weights_of(dtype)
    weights = weights[weights.abs() >= torch.finfo(dtype).tiny * 2**9]  # the error of a smaller one is subnormal
    high, low = stored(name, weights, dtype)
    lost = (LAYOUTS[name].read(high, low).double() - weights).abs()
    ulp = weights.abs().double().log2().floor().exp2() * torch.finfo(dtype).eps
    assert (lost <= ulp * kept).all()
    assert lost.max() > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_stochastic_rounding_takes_one_of_two_neighbours_with_the_right_chance(dtype):
    weights = sample(dtype)[:60]
    draws = 4096
    high, _ = stored("stochastic", weights.repeat_interleave(draws), dtype, seed=3)
    high = high.view(-1, draws)
    for weight, row in zip(weights.tolist(), high, strict=True):
        down, up, chance = twin.chance_up(weight, dtype)
        seen = {Fraction(value) for value in row.unique().tolist()}
        assert seen <= {down, up}, weight
        share = float((row.double() == float(up)).double().mean())
        # Five standard errors of a share of 4,096 draws; a right one fails in 60 x 6e-7 of the cases. Of an fp16
        # subnormal the chance is right to 2^-13.
        assert abs(share - float(chance)) <= 5 * (float(chance * (1 - chance)) / draws) ** 0.5 + 2.0**-13, weight


@pytest.mark.parametrize("dtype", DTYPES)
def test_stochastic_rounding_is_drawn_by_the_seed_alone(dtype):
    weights = random_weights(dtype, 1000)
    weights = weights[weights.abs() < 60000]
    torch.manual_seed(1)
    first, _ = stored("stochastic", weights, dtype, seed=5)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second, _ = stored("stochastic", weights, dtype, seed=5)
    other, _ = stored("stochastic", weights, dtype, seed=6)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", NAMES)
def test_strided_weights_are_stored_as_they_lie(name):
    """Channels-last convolution weights are neither copied nor reordered."""
    weights = torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)
    layout = LAYOUTS[name]
    high = torch.empty_like(weights, dtype=torch.bfloat16)
    low = None if layout.low_dtype is None else torch.empty_like(weights, dtype=layout.low_dtype)
    layout.write(weights.clone(), high, low, 0)
    plain, plain_low = stored(name, weights.contiguous(), torch.bfloat16)
    assert high.is_contiguous(memory_format=torch.channels_last)
    if name != "stochastic":  # which draws in the order of memory
        assert torch.equal(high, plain)
        assert torch.equal(layout.read(high, low), layout.read(plain, plain_low))
