"""A number of the source becomes in a format what torch makes of it."""

import math

import pytest
import torch

from halfstep.formats import FORMATS
from halfstep.lint.rounding import becomes_one, in_a_format, numbers, rounded, vanishes
from halfstep.lint.values import UNKNOWN, Choice, Const, Method, Name, Object

FP16, BF16 = FORMATS["fp16"], FORMATS["bf16"]


def finfo(bound, *dtypes):
    dtype = Name(dtypes[0]) if len(dtypes) == 1 else Choice(frozenset(Name(name) for name in dtypes))
    return Method(Object("finfo", "torch.finfo", (1, 0), None, (dtype,)), bound)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_rounds_like_torch(name):
    """Every number of the format, its neighbours' midpoints (ties), and a little to each side of those."""
    format = FORMATS[name]
    all_bits = torch.arange(0, 0x7FFF, 37, dtype=torch.int16)
    values = all_bits.view(format.dtype).double()
    values = values[values.isfinite()]
    following = (all_bits[: len(values)] + 1).view(format.dtype).double()
    middle = (values + following.where(following.isfinite(), values)) / 2
    every = torch.cat([values, middle, middle * (1 + 2**-30), middle * (1 - 2**-30)])
    every = torch.cat([every, -every, torch.tensor([format.max * 1.001, format.max * 1.01], dtype=torch.float64)])
    every = every.float()  # torch takes float64 to 16 bit by way of float32, which rounds twice
    expected = every.to(format.dtype).double().tolist()
    assert [rounded(value, format) for value in every.double().tolist()] == expected


def test_where_numbers_vanish_and_become_one():
    assert vanishes(1e-8, FP16)
    assert vanishes(2**-25, FP16)
    assert not vanishes(2**-25 * 1.001, FP16)
    assert not vanishes(1e-7, FP16)
    assert not vanishes(1e-12, BF16)
    assert not vanishes(0.0, FP16)
    assert becomes_one(1 - 1e-4, FP16)
    assert becomes_one(1 - 2**-12, FP16)
    assert not becomes_one(1 - 2.45e-4, FP16)
    assert becomes_one(1 - 1.95e-3, BF16)
    assert not becomes_one(1 - 1.96e-3, BF16)
    assert not becomes_one(1.0, FP16)


def test_one_known_format_is_enough_and_an_unknown_one_must_hold_in_both():
    eps = frozenset({1e-8})
    assert in_a_format(eps, frozenset({"fp16"}), vanishes)
    assert in_a_format(eps, frozenset({"fp16", "bf16"}), vanishes)
    assert not in_a_format(eps, frozenset({"bf16"}), vanishes)
    assert not in_a_format(eps, frozenset({"16 bit"}), vanishes)
    assert in_a_format(frozenset({1 - 1e-4}), frozenset({"16 bit"}), becomes_one)
    assert not in_a_format(eps, frozenset({"fp32"}), lambda number, format: True)


def test_every_number_that_a_constant_may_be_has_to_fail():
    assert not in_a_format(frozenset({1e-8, 1e-4}), frozenset({"fp16"}), vanishes)
    assert not in_a_format(frozenset(), frozenset({"fp16"}), vanishes)


def test_numbers_of_constants():
    assert numbers(Const(-1e9)) == {-1e9}
    assert numbers(Choice(frozenset({Const(1), Const(2.5)}))) == {1.0, 2.5}
    assert numbers(Const(True)) == frozenset()
    assert numbers(Const("x")) == frozenset()
    assert numbers(Name("torch.float16")) == frozenset()
    assert numbers(UNKNOWN) == frozenset()
    assert numbers(None) == frozenset()


def test_numbers_of_finfo_are_those_of_torch():
    for bound in ("min", "max", "eps", "tiny", "smallest_normal"):
        assert numbers(finfo(bound, "torch.float16")) == {getattr(torch.finfo(torch.float16), bound)}
        assert numbers(finfo(bound, "torch.bfloat16")) == {getattr(torch.finfo(torch.bfloat16), bound)}
    assert numbers(finfo("min", "torch.float32", "torch.float16")) == {-65504.0, torch.finfo(torch.float32).min}
    assert numbers(finfo("bits", "torch.float16")) == frozenset()
    assert numbers(finfo("min", "torch.float64")) == frozenset()
    assert math.isinf(rounded(torch.finfo(torch.float32).min, BF16))
