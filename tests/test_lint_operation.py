"""An operation is the same however it is spelled, and its operands and their expressions belong together."""

import ast

import pytest

from halfstep.lint.finding import Span
from halfstep.lint.operation import as_operand, in_float, is_plain, operations
from halfstep.lint.script import Script

HEAD = """\
import torch
import torch.nn.functional as F


def follow(x: torch.Tensor, y: torch.Tensor, sizes):
    x = x.half()
"""


def found(expression, *names):
    script = Script(f"{HEAD}    {expression}\n", "x.py")
    return script, list(operations(script, frozenset(names)))


@pytest.mark.parametrize(
    "expression",
    [
        "x.clamp(1e-8, 1)",
        "x.clamp_(1e-8, 1)",
        "torch.clamp(x, 1e-8, 1)",
        "x.clamp(min=1e-8)",
        "torch.clamp(x, min=1e-8)",
    ],
)
def test_a_clamp_is_one_however_it_is_spelled(expression):
    script, (operation,) = found(expression, "clamp")
    assert operation.name == "clamp"
    assert operation.tensor().formats == {"fp16"}
    assert operation.argument("min", 1).value == 1e-8
    assert script.source(operation.argument_node("min", 1)) == "1e-8"
    assert script.source(operation.nodes[0]) == "x"


@pytest.mark.parametrize("expression", ["x + y", "torch.add(x, y)", "x.add(y)", "x.add_(y)", "x += y"])
def test_an_addition_has_both_operands(expression):
    script, (operation,) = found(expression, "add")
    assert [script.source(node) for node in operation.nodes] == ["x", "y"]
    assert operation.tensor(0).formats == {"fp16"}
    assert operation.tensor(1).formats == frozenset()
    assert operation.is_in_place == (expression in {"x.add_(y)", "x += y"})


def test_what_is_passed_by_star_has_no_expression():
    _, (operation,) = found("torch.clamp(x, *sizes)", "clamp")
    assert operation.nodes == ()
    assert operation.argument_node("min", 1) is None


def test_left_out_is_none():
    _, (operation,) = found("x.clamp(1e-8)", "clamp")
    assert operation.argument("max", 2) is None
    assert operation.argument_node("max", 2) is None
    assert operation.tensor(2) is None


def test_a_list_of_tensors_stands_for_its_first():
    _, (operation,) = found("torch.cat([x, y])", "cat")
    assert operation.tensor().formats == {"fp16"}
    assert operation.is_call


def test_a_number_read_from_a_tensor_is_no_tensor():
    _, (operation,) = found("x.amax().item() + 1e-8", "add")
    assert operation.tensor() is None


def test_other_names_and_other_libraries_are_left():
    assert found("x.clamp(1)", "add")[1] == []
    assert found("sizes.clamp(1)", "clamp")[1] == []


def test_to_float():
    script = Script("a = x + y\nb = x.y[0]\n", "x.py")
    total, item = (statement.value for statement in script.tree.body)
    assert in_float(script, total).code == "(x + y).float()"
    assert in_float(script, item).code == "x.y[0].float()"
    assert in_float(script, item).span == Span(2, 4, 2, 10)
    assert as_operand(script, total) == "(x + y)"


@pytest.mark.parametrize(
    ("text", "plain"), [("x", True), ("self.x.y", True), ("f(x)", False), ("x[0]", False), ("f().x", False)]
)
def test_plain_expressions_can_be_written_twice(text, plain):
    assert is_plain(ast.parse(text, mode="eval").body) is plain
