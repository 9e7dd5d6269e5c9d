"""What a plan is made of, as text: sizes of a batch, and inputs of a bare model."""

import re

import pytest

from halfstep.errors import HalfstepError
from halfstep.plan.subject import Input, Subject, parse_inputs


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "8", float("nan")])
def test_a_batch_that_is_no_number_of_samples_is_refused(size):
    with pytest.raises(HalfstepError, match=re.escape(f"a batch of {size!r}: it is not a number of samples")):
        Subject("charlm", size)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3x224x224", [("float", (3, 224, 224))]),
        ("float:7", [("float", (7,))]),
        ("int:1024", [("int", (1024,))]),
        ("4x64x64, int, bool:77x2", [("float", (4, 64, 64)), ("int", ()), ("bool", (77, 2))]),
        ("float", [("float", ())]),
    ],
)
def test_inputs_are_kinds_and_shapes_of_one_sample(text, expected):
    assert parse_inputs(text) == tuple(Input(*each) for each in expected)
    assert Subject("net.py:Net", 4, text).inputs == text


@pytest.mark.parametrize("text", ["", "3x", "x3", "3x0", "-3", "int:", "int8:4", "3,,4", "3.5", "224*224", "int1024"])
def test_inputs_of_another_form_are_refused_with_an_example(text):
    with pytest.raises(HalfstepError, match="is not the shape of one sample") as error:
        Subject("net.py:Net", None, text)
    assert "3x224x224" in error.value.fix
