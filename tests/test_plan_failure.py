"""What a fake device cannot run becomes one line: operation, module, line, way round."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from halfstep.errors import HalfstepError
from halfstep.plan.failure import naming_failures
from halfstep.plan.fake import FakeDevice
from halfstep.plan.fake_step import fake_step
from halfstep.plan.ledger import Ledger
from halfstep.plan.subject import Subject
from halfstep.plan.target import target_of
from halfstep.record import Walk

HERE = Path(__file__).name


class Inner(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.function = function

    def forward(self, x):
        return self.function(self, self.linear(x))


def failure(function, card="RTX 3070", place=f"in blocks.0 ({HERE}:"):
    """The line that tells of ``function(module, x)``, which runs in the module ``blocks.0``."""
    device = FakeDevice(target_of(card))
    with device.building():
        model = nn.ModuleDict({"blocks": nn.Sequential(Inner(function))})
    with pytest.raises(HalfstepError) as raised, naming_failures(model), device.running(), Walk(model, Ledger()):
        model["blocks"](torch.ones(4, 6) * torch.arange(6)).sum().backward()
    message = str(raised.value)
    assert "\n" not in message
    assert place in message
    return message.replace(f"{HERE}:", "")


@torch.library.custom_op("halfstep_test_failure::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class CountsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.bincount(gradient.long().flatten()).sum()


@pytest.mark.parametrize(
    ("function", "operation", "why", "fix"),
    [
        (lambda m, x: torch.bincount(x.long().flatten()), "aten::bincount", "depends on values", "minlength=n"),
        (
            lambda m, x: x.repeat_interleave(x[:, 0].long(), 0),
            "aten::repeat_interleave",
            "the size of its result depends on values",
            "output_size=n",
        ),
        (lambda m, x: F.one_hot(x.long()), "aten::one_hot", "the size of its result", "num_classes=n"),
        (
            lambda m, x: pack_padded_sequence(x[..., None], torch.ones(4).long(), batch_first=True).data,
            "aten::_pack_padded_sequence",
            "depends on values",
            "the padded batch",
        ),
        (
            lambda m, x: torch.nested.nested_tensor([x, x]),
            "aten::_nested_tensor",
            "no form for tensors",
            "padded batch",
        ),
        (lambda m, x: twice(x.detach()) + x, "halfstep_test_failure::twice", "no form for tensors", "register_fake"),
        (lambda m, x: F.linear(x, x.T), "aten::", "RuntimeError", "Correct that line"),
        (lambda m, x: x * math.log(x.mean().item()), "", "math domain error; where code reads a value", "guard it"),
        (lambda m, x: x * (1 / x.mean().item()), "", "division by zero; where code reads a value", "guard it"),
        (lambda m, x: x.missing, "", "AttributeError: 'FakeTensor' object has no attribute 'missing'", "Correct"),
        (lambda m, x: int("x"), "", "ValueError: invalid literal", "Correct that line"),
        pytest.param(
            *(lambda m, x: torch.cuda.Event(enable_timing=True), "", "it calls CUDA itself", "Leave that call out"),
            marks=pytest.mark.skipif(torch.version.cuda is not None, reason="a build with CUDA makes events anywhere"),
        ),
    ],
)
def test_a_failure_names_operation_module_line_and_way_round(function, operation, why, fix):
    message = failure(function)
    assert message.startswith(operation)
    assert why in message
    assert fix in message


def test_a_failure_in_a_backward_function_has_its_forward_module():
    message = failure(lambda m, x: CountsBackward.apply(x))
    assert message.startswith("aten::bincount in blocks.0")


def test_moving_to_cuda_is_refused_where_a_cpu_is_planned_for():
    for move in (lambda m, x: x.cuda(), lambda m, x: x.to("cuda"), lambda m, x: x + torch.ones(1, device="cuda")):
        assert "it calls CUDA itself" in failure(move, "cpu")


def test_a_sparse_gradient_says_what_to_plan_instead():
    device = FakeDevice(target_of())
    with device.building():
        model = nn.Embedding(9, 3, sparse=True)
    refused = pytest.raises(HalfstepError, match=r"dense tensors only\. Plan with a dense gradient, sparse=False")
    with refused, naming_failures(model), device.running(), Walk(model, Ledger()):
        model(torch.zeros(4, dtype=torch.long)).sum().backward()


def test_what_is_raised_outside_the_model_says_so():
    model = nn.Linear(2, 2)
    named = pytest.raises(HalfstepError, match=rf"^outside the model \({HERE}:\d+\): KeyError: 'labels'\.")
    with named, naming_failures(model):
        raise KeyError("labels")


def test_a_halfstep_error_and_an_interrupt_pass_as_they_are():
    model, error = nn.Linear(2, 2), HalfstepError("a", "b", "c")
    with pytest.raises(HalfstepError) as raised, naming_failures(model):
        raise error
    assert raised.value is error
    with pytest.raises(KeyboardInterrupt), naming_failures(model):
        raise KeyboardInterrupt


def test_bf16_is_refused_for_a_card_without_it_with_what_it_computes():
    with pytest.raises(HalfstepError, match=r"T4.*bf16|bf16.*T4") as raised:
        fake_step(Subject("mlp"), "bf16", target_of("T4"))
    assert "fp16" in raised.value.fix
