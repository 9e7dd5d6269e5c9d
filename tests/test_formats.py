"""What each format holds, against torch's own figures and against every value of the small formats."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from halfstep.errors import HalfstepError
from halfstep.formats import FORMATS, SIXTEEN_BIT, Format, format_of, get_format

NAMES = ["fp32", "tf32", "bf16", "fp16", "e4m3", "e5m2"]


def test_the_formats_are_the_ones_written_down():
    assert list(FORMATS) == NAMES
    assert frozenset({"bf16", "fp16"}) == SIXTEEN_BIT


@pytest.mark.parametrize("name", [name for name in NAMES if name != "tf32"])
def test_figures_are_those_of_torch(name):
    format = get_format(name)
    info = torch.finfo(format.dtype)
    assert format.max == info.max
    assert format.tiny == info.smallest_normal
    assert format.eps == info.eps
    assert format.smallest_subnormal == info.smallest_normal * info.eps
    assert format.bytes == info.bits // 8 == format.dtype.itemsize


def test_tf32_has_the_range_of_fp32_and_the_mantissa_of_fp16():
    tf32, fp32, fp16 = FORMATS["tf32"], FORMATS["fp32"], FORMATS["fp16"]
    assert tf32.tiny == fp32.tiny
    assert tf32.eps == fp16.eps
    # The largest fp32 with the 13 bits cleared that a tensor core does not read.
    bits = np.array(0x7F7FFFFF & ~0x1FFF, np.uint32)
    assert tf32.max == float(bits.view(np.float32))
    assert tf32.bytes == 4
    assert tf32.dtype == torch.float32


def test_the_published_figures():
    fp16, bf16 = FORMATS["fp16"], FORMATS["bf16"]
    assert fp16.max == 65504
    assert fp16.tiny == pytest.approx(6.1e-5, rel=1e-2)
    assert fp16.smallest_subnormal == pytest.approx(6.0e-8, rel=1e-2)
    assert bf16.eps / fp16.eps == 8
    assert (FORMATS["e4m3"].max, FORMATS["e5m2"].max) == (448, 57344)


@pytest.mark.parametrize("name", NAMES)
def test_format_of_is_the_way_back(name):
    format = FORMATS[name]
    assert format_of(format.dtype) is FORMATS["fp32" if name == "tf32" else name]
    assert get_format(name) is format


@pytest.mark.parametrize("name", ["", "fp64", "float16", "FP16", "half", "fp8", " bf16"])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(HalfstepError, match=f"^format {name!r}: .* Use one of {', '.join(NAMES)}"):
        get_format(name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fnuz])
def test_a_dtype_that_is_no_format_is_refused(dtype):
    with pytest.raises(HalfstepError, match=f"^dtype {str(dtype).removeprefix('torch.')}: it is not a training format"):
        format_of(dtype)


# ---- fits


def grid(name):
    """Every number of the format from zero up, then the one that would follow the largest; index parity is evenness."""
    format = FORMATS[name]
    if format.bytes == 2:
        patterns = torch.arange(2**15, dtype=torch.int16).view(format.dtype)
    else:
        patterns = torch.arange(2**7, dtype=torch.uint8).view(format.dtype)
    values = patterns.double().numpy()
    values = values[np.isfinite(values)]
    assert (np.diff(values) > 0).all()
    assert values[0] == 0
    assert values[-1] == format.max
    return np.append(values, 2 * values[-1] - values[-2])


def rounded(values, numbers):
    """Round to nearest, ties to the even neighbour, by looking at both neighbours: a plain twin of a cast."""
    above = np.minimum(np.searchsorted(numbers, values), len(numbers) - 1)
    below = np.maximum(above - 1, 0)
    up, down = numbers[above] - values, values - numbers[below]
    takes_up = (up < down) | ((up == down) & (above % 2 == 0))
    return numbers[np.where(takes_up, above, below)]


def probes(numbers):
    """Every number, every midpoint, and the fp32 neighbours of both, as float32, which holds all of them exactly."""
    midpoints = (numbers[1:] + numbers[:-1]) / 2
    points = np.concatenate([numbers, midpoints]).astype(np.float32)
    assert np.isin(points.astype(np.float64), np.concatenate([numbers, midpoints])).all()
    around = [np.nextafter(points, np.float32(0)), points, np.nextafter(points, np.float32(np.inf))]
    return np.unique(np.concatenate(around))


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3", "e5m2"])
def test_fits_is_what_rounding_says_over_the_whole_space(name):
    format, numbers = FORMATS[name], grid(name)
    # The number after bf16's largest is 2^128, beyond fp32 as well: its probes are infinities.
    values = probes(numbers[numbers < 2.0**128])
    values = np.append(values[np.isfinite(values)], np.float32(format.max * (1 + format.eps / 4)))
    nearest = rounded(values.astype(np.float64), numbers)
    expected = (nearest <= format.max) & ((nearest > 0) | (values == 0))
    assert {True, False} == set(expected.tolist())
    fits = np.array([format.fits(value) for value in values.tolist()])
    assert values[fits != expected].tolist() == []
    assert all(format.fits(-value) == fit for value, fit in zip(values[::7].tolist(), fits[::7], strict=True))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_fits_is_what_a_cast_of_torch_does(name):
    format, numbers = FORMATS[name], grid(name)
    values = torch.from_numpy(probes(numbers[numbers < 2.0**128]))
    values = torch.cat([-values, values, torch.tensor([3.4e38, torch.inf, -torch.inf, torch.nan])])
    cast = values.to(format.dtype)
    expected = (torch.isfinite(cast) & ((cast != 0) | (values == 0))).tolist()
    assert [format.fits(value) for value in values.tolist()] == expected


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_a_value_that_fits_is_cast_to_its_nearest_neighbour(name):
    # Beyond that torch has changed its mind: e4m3 has no infinity, so what is too large became NaN once and is clamped
    # to 448 now. fits does not depend on it: such a value does not fit.
    format, numbers = FORMATS[name], grid(name)
    values = torch.from_numpy(probes(numbers))
    cast = values.to(format.dtype).double()
    for value, got, nearest in zip(
        values.tolist(), cast.tolist(), rounded(values.double().numpy(), numbers), strict=True
    ):
        if format.fits(value):
            assert got == nearest
        else:
            assert got in (0, format.max, math.inf) or math.isnan(got)


def test_fits_at_the_edges_of_fp32_and_tf32():
    fp32, tf32 = FORMATS["fp32"], FORMATS["tf32"]
    tie = 2.0**128 - 2.0**103
    assert fp32.fits(math.nextafter(tie, 0))
    assert not fp32.fits(tie)
    assert not math.isinf(np.float64(math.nextafter(tie, 0)).astype(np.float32))
    assert fp32.fits(math.nextafter(2.0**-150, 1))
    assert not fp32.fits(2.0**-150)
    assert tf32.fits(math.nextafter(2.0**128 - 2.0**116, 0))
    assert not tf32.fits(2.0**128 - 2.0**116)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_never_fits_and_zero_always(name):
    format = FORMATS[name]
    assert not any(format.fits(value) for value in (math.inf, -math.inf, math.nan, 1e300, -1e300, 5e-324))
    assert format.fits(0.0)
    assert format.fits(-0.0)
    assert format.fits(0)
    assert format.fits(format.max)
    assert format.fits(-format.smallest_subnormal)


def test_a_format_is_a_value():
    assert Format("fp16", 5, 10, "float16") == FORMATS["fp16"]
    assert len(set(FORMATS.values())) == len(FORMATS)
    with pytest.raises(AttributeError):
        FORMATS["fp16"].name = "half"
