"""In which format an operation answers, held against what torch does."""

import ast

import pytest
import torch

from halfstep.lint.formats import (
    UNSURE_16,
    answer,
    devices_of,
    format_of,
    region_devices,
    region_enabled,
    region_formats,
    widest,
)
from halfstep.lint.values import UNKNOWN, Choice, Const, Name, Object, Tensor

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
DTYPES |= {"int": torch.int64, "bool": torch.bool}


def region(*args, type="torch.amp.autocast", **keywords):
    return Object("region", type, (), ast.Pass(), args, tuple(keywords.items()))


def tensor(*formats):
    return Tensor(frozenset(formats))


@pytest.mark.parametrize("first", DTYPES)
@pytest.mark.parametrize("second", DTYPES)
def test_widest_is_the_promotion_of_torch(first, second):
    expected = torch.promote_types(DTYPES[first], DTYPES[second])
    (found,) = widest([tensor(first), tensor(second)])
    assert DTYPES[found] == expected


def test_widest_of_choices_and_unknowns():
    assert widest([tensor("fp16", "bf16"), tensor("fp16")]) == {"fp16", "fp32"}
    assert widest([tensor("fp16"), Const(1e-8), None]) == {"fp16"}
    assert widest([tensor("fp16"), UNKNOWN]) == frozenset()
    assert widest([tensor("fp16"), tensor()]) == frozenset()
    assert widest([tensor("fp16"), *[tensor("16 bit")]]) == {"16 bit"}


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (region(Const("cuda")), {"fp16"}),
        (region(Const("cpu")), {"bf16"}),
        (region(Const("cuda:1"), dtype=Name("torch.bfloat16")), {"bf16"}),
        (region(Const("cuda"), Name("torch.float16")), {"fp16"}),
        (region(Const("cuda"), enabled=Const(False)), set()),
        (region(Const("cuda"), Name("torch.float16"), Const(False)), set()),
        (region(Const("cuda"), enabled=UNKNOWN), {"fp16"}),
        (region(Choice(frozenset({Const("cuda"), Const("cpu")}))), {"fp16", "bf16"}),
        (region(UNKNOWN), UNSURE_16),
        (region(Const("cuda"), dtype=UNKNOWN), UNSURE_16),
        (region(type="torch.cuda.amp.autocast"), {"fp16"}),
        (region(Const(False), type="torch.cuda.amp.autocast"), set()),
        (None, set()),
    ],
)
def test_region_formats(context, expected):
    assert region_formats(context) == expected


def test_defaults_of_a_region_are_those_of_torch():
    for device, format in (("cuda", "fp16"), ("cpu", "bf16")):
        assert DTYPES[format] == torch.get_autocast_dtype(device)


def test_region_devices_and_switch():
    assert region_devices(region(Object("device", "torch.device", (), ast.Pass(), (Const("cuda:0"),)))) == {"cuda"}
    assert region_devices(region(type="torch.cpu.amp.autocast")) == {"cpu"}
    assert region_enabled(region(Const("cuda"))) is True
    assert region_enabled(region(Const("cuda"), enabled=UNKNOWN)) is None
    assert devices_of(Const(0)) == {"cuda"}
    assert devices_of(Const(True)) == frozenset()


def test_answers_of_operations():
    cuda, cpu = region(Const("cuda"), Name("torch.float16")), region(Const("cpu"), Name("torch.float16"))
    assert answer("matmul", [UNKNOWN, UNKNOWN], cuda) == {"fp16"}
    assert answer("matmul", [tensor("fp32"), tensor("fp32")], None) == {"fp32"}
    assert answer("exp", [tensor("fp16")], cuda) == {"fp32"}
    assert answer("exp", [tensor("fp16")], cpu) == {"fp16"}
    assert answer("relu", [tensor("fp16")], cuda) == {"fp16"}
    assert answer("no_such_operation", [tensor("fp16")], cuda) == frozenset()


@pytest.mark.parametrize(("operation", "expected"), [("softmax", "fp16"), ("sum", "fp16"), ("relu", "fp16")])
def test_answers_on_a_cpu_are_those_of_torch(operation, expected):
    with torch.autocast("cpu", dtype=torch.float16):
        x = torch.ones(2, 2) @ torch.ones(2, 2)
        y = {"softmax": lambda: x.softmax(-1), "sum": lambda: x.sum(), "relu": lambda: x.relu()}[operation]()
    cpu = region(Const("cpu"), Name("torch.float16"))
    assert answer(operation, [tensor("fp16")], cpu) == {expected}
    assert y.dtype == DTYPES[expected]


def test_format_of_needs_every_option_to_be_a_dtype():
    both = Choice(frozenset({Name("torch.float16"), Name("torch.bfloat16")}))
    assert format_of(both) == {"fp16", "bf16"}
    assert format_of(Choice(frozenset({Name("torch.float16"), Name("torch.relu")}))) == frozenset()
    assert format_of(UNKNOWN) == frozenset()
    assert format_of(None) == frozenset()
