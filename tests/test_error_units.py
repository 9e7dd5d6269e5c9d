"""Units of error: what one rounding costs in every format, and what tells a faulty product from a right one."""

import math

import pytest
import torch
from reference.audit_nets import low_product

from halfstep.explain.error import difference, in_units, largest, relative, scale_of, stored_format, unit_of, widen
from halfstep.formats import FORMATS

LOW = ["bf16", "fp16"]
DOUBLE = torch.float64


def units(value, exact, name="fp16", scale=None):
    return in_units(difference(value, exact), FORMATS[name], scale_of(exact) if scale is None else scale)


@pytest.mark.parametrize(("name", "u"), [("bf16", 2**-8), ("fp16", 2**-11), ("tf32", 2**-11), ("fp32", 2**-24)])
def test_the_unit_is_half_the_distance_from_one_to_the_next_number(name, u):
    assert unit_of(FORMATS[name]) == u
    assert stored_format(FORMATS[name].dtype).name == (name if name != "tf32" else "fp32")


def test_a_dtype_that_no_step_computes_in_has_no_format():
    assert stored_format(torch.float64) is None
    assert stored_format(torch.int64) is None
    assert stored_format(torch.complex64).name == "fp32"


@pytest.mark.parametrize("name", LOW)
def test_one_rounding_costs_at_most_one_unit_and_almost_all_of_it(name):
    """All 16-bit intervals at once: the middle between each two neighbours of one binade, from just above."""
    format = FORMATS[name]
    steps = torch.arange(2**format.mantissa_bits, dtype=DOUBLE) * format.eps
    between = 1 + steps + format.eps / 2 * (1 - 1e-9)
    for scale in (1.0, 2.0**-10, 2.0**10):
        exact = between * scale
        elementwise = in_units(difference(exact.to(format.dtype), exact), format, exact.abs())
        assert 0.99 < elementwise <= 1.0
        assert units(exact.to(format.dtype), exact, name) <= 1.0


@pytest.mark.parametrize("name", LOW)
def test_below_the_normal_numbers_the_unit_shrinks_no_further(name):
    format = FORMATS[name]
    exact = torch.linspace(0, 3, 1001, dtype=DOUBLE) * format.smallest_subnormal
    assert units(exact.to(format.dtype), exact, name) == pytest.approx(1.0, abs=0.01)


def test_what_is_not_finite_counts_where_one_alone_is():
    inf, nan = math.inf, math.nan
    value = torch.tensor([inf, -inf, nan, 1.0])
    assert difference(value, value).tolist() == [0, 0, 0, 0]
    assert difference(value, torch.tensor([1.0, inf, 0.0, nan])).tolist() == [inf] * 4
    assert units(torch.tensor([inf, 1.0]), torch.tensor([inf, 1.0], dtype=DOUBLE)) == 0.0
    assert units(torch.tensor([inf, 1.0]), torch.tensor([5.0, 1.0], dtype=DOUBLE)) == inf
    assert scale_of(value) == 1.0
    assert math.isnan(largest(value))
    assert largest(value[:2]) == inf
    assert scale_of(value[:3]) == 0.0


def test_nothing_is_zero_away():
    empty = torch.zeros(0, 3)
    assert units(empty, widen(empty)) == 0.0
    assert relative(largest(difference(empty, empty)), scale_of(empty)) == 0.0
    assert units(torch.zeros(2), torch.zeros(2, dtype=DOUBLE)) == 0.0


def test_relative_is_infinite_beside_an_exact_zero():
    assert relative(1e-3, 0.0) == math.inf


def test_a_copy_in_float64_is_never_the_same_memory():
    for dtype in (torch.float64, torch.float32):
        x = torch.ones(3, dtype=dtype, requires_grad=True)
        wide = widen(x)
        assert wide.dtype == DOUBLE
        assert not wide.requires_grad
        assert wide.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LOW)
def test_a_right_product_reads_a_fifth_and_one_that_adds_up_in_16_bit_three(name, seed):
    """Normal numbers, K = 1024. The worst of 65,536 results is near 4 sqrt(K) = 128, |A||B| near 2K / pi = 652.

    So half an ulp, 2^-5 in fp16 below 128 and 2^-4 above, is 0.10 or 0.20 units of 2^-11 x 652.
    """
    generator = torch.Generator().manual_seed(seed)
    format = FORMATS[name]
    a = torch.randn(256, 1024, generator=generator).to(format.dtype)
    b = torch.randn(1024, 256, generator=generator).to(format.dtype)
    right = (a.float() @ b.float()).to(format.dtype)
    exact, magnitude = widen(a) @ widen(b), widen(a).abs() @ widen(b).abs()
    assert units(right, exact, name, magnitude) == pytest.approx(0.15, abs=0.08)
    faulty = low_product(a[:32], b[:, :32])
    assert 2.0 < units(faulty, exact[:32, :32], name, magnitude[:32, :32]) < 6.0
