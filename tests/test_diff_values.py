"""How far two kept tensors are apart: closed forms, what samples miss, what stands for infinity, what a cast loses."""

from __future__ import annotations

import math

import pytest
import torch

from halfstep.explain.divergence import difference
from halfstep.explain.stream import SAMPLE, beyond, keep, lost_by_cast

LARGE = 4 * SAMPLE


def apart(a, b, ratio=1.0):
    return difference(keep(torch.as_tensor(a)), keep(torch.as_tensor(b)), ratio)[0].item()


def test_it_is_the_largest_difference_at_the_scale_of_the_larger_tensor():
    assert apart([1.0, -4.0], [1.0, -3.0]) == 1 / 4
    assert apart([1.0, -3.0], [1.0, -4.0]) == 1 / 4
    assert apart([2.0, 0.0], [0.0, 0.0]) == 1.0
    assert apart([1.0, 2.0], [1.0, 2.0]) == 0.0
    assert apart([0.0], [0.0]) == 0.0
    assert apart(torch.zeros(0), torch.zeros(0)) == 0.0
    assert apart(torch.tensor([3 + 4j]), torch.tensor([3 + 0j])) == 1.0


def test_one_rounding_costs_one_unit_roundoff_at_most():
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    for dtype, u in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        assert 0.4 * u < apart(x, x.to(dtype)) <= u  # the largest has at least half of the worst relative error or so


def test_sums_are_taken_at_the_scale_of_their_terms():
    a, b = keep(torch.tensor([1e-6])), keep(torch.tensor([2e-6]))
    assert difference(a, b).tolist() == pytest.approx([0.5, 1e-6])
    assert difference(a._replace(terms=torch.tensor(1.0).double()), b)[0].item() == pytest.approx(1e-6)
    assert difference(a, b._replace(terms=torch.tensor(8.0).double()), 4.0)[0].item() == pytest.approx(0.5e-6 / 2)
    assert difference(a._replace(terms=torch.tensor(math.inf).double()), b)[0].item() == pytest.approx(0.5)


def test_what_is_not_finite_in_one_alone_is_infinitely_far():
    inf, nan = math.inf, math.nan
    assert apart([1.0, inf], [1.0, inf]) == apart([1.0, nan], [1.0, nan]) == 0.0
    for other in (3.0, -inf, nan):
        assert apart([1.0, inf], [1.0, other]) == apart([1.0, other], [1.0, inf]) == inf
    assert apart([0.0, nan], [0.0, 5.0]) == inf


def test_what_is_not_finite_between_the_samples_is_seen_as_well():
    a = torch.ones(LARGE)
    b = a.clone()
    b[3] = math.inf
    assert len(keep(b).sample) == SAMPLE
    assert keep(b).sample.isfinite().all()
    assert apart(a, b) == apart(b, a) == math.inf
    assert apart(b, b) == 0.0
    a[1] = 7.0  # the largest is exact, although it is in no sample
    assert keep(a).extremes.tolist() == [7.0, 0.0]
    assert keep(b).extremes.tolist() == [1.0, 1.0]


def test_the_sample_of_a_tensor_is_its_own_whatever_its_strides():
    x = torch.randn(300, 700)
    assert torch.equal(keep(x.T).sample, x.T.reshape(-1)[::4])
    y = torch.randn(4)
    kept = keep(y)
    y.zero_()
    assert kept.sample.count_nonzero() == 4


def test_what_stands_for_infinity_is_alike_in_every_format():
    full, half = torch.finfo(torch.float32).min, torch.finfo(torch.float16).min
    assert apart([1.0, full], torch.tensor([1.0, half], dtype=torch.float16)) == 0.0
    assert apart([1.0, -1e9], torch.tensor([1.0, -math.inf], dtype=torch.float16)) == 0.0
    assert apart(torch.tensor([1.0, -math.inf]), [1.0, -1e9]) == 0.0
    assert apart([1.0, -1e5], torch.tensor([1.0, -math.inf], dtype=torch.float16)) == math.inf
    assert apart([1.0, full], torch.tensor([2.0, half], dtype=torch.float16)) == 0.5  # and is no scale for the others
    assert apart([1.0, full], [1.0, -full]) == 2.0 * -full / 1.0
    assert beyond("int64") == math.inf


def test_values_at_two_loss_scales_are_compared_without_the_ratio():
    assert apart([1.0, 2.0], [8.0, 16.0], 8.0) == 0.0
    assert apart([1.0, 2.0], [8.0, 8.0], 8.0) == 0.5


def test_whole_numbers_and_truth_values_differ_or_do_not():
    assert apart([1, 2, 3], [1, 2, 3]) == 0.0
    assert apart([1, 2, 3], [1, 3, 2]) == 1.0
    assert apart([True, False], [True, True]) == 1.0
    a = torch.zeros(LARGE, dtype=torch.bool)
    b = a.clone()
    b[2] = True  # in no sample
    assert apart(a, b) == 1.0
    a[1] = True
    assert apart(a, b) == 1.0


def test_a_cast_loses_what_rounding_costs_what_it_flushes_and_what_overflows():
    half = torch.float16

    def lost(*values, dtype=half):
        x = torch.tensor(values)
        found = lost_by_cast(x, x.to(dtype))
        return None if found is None else found[0]

    assert lost(1.0, 3.0).item() == 0.0
    assert lost(1.0, 1 + 2.0**-11).item() == pytest.approx(2.0**-11, rel=1e-3)
    assert lost(1e-9, 2e-9).item() == 1.0
    assert lost(1.0, 1e-9).item() == pytest.approx(1e-9)
    assert lost(1.0, 1e5).item() == math.inf
    assert lost(1.0, -1e9).item() == 0.0  # a mask
    assert lost(1.0, math.inf, math.nan).item() == 0.0
    assert lost(1.0, 1e5, dtype=torch.bfloat16).item() < 2.0**-8
    assert lost(1.0, dtype=torch.float32) is None
    wide = torch.tensor([1e5], dtype=torch.bfloat16)
    assert lost_by_cast(wide, wide.half()).tolist() == [math.inf, math.inf]
    assert lost_by_cast(torch.tensor([1e-9, 4.0]), torch.tensor([0.0, 4.0]).half()).tolist() == pytest.approx(
        [2.5e-10, 1e-9]
    )
    assert lost_by_cast(torch.zeros(0), torch.zeros(0, dtype=half)) is None
