"""Attention masks are no fault, however they are written, and a fault among masks is found all the same."""

from __future__ import annotations

import math

import pytest
import torch
from reference.trace_nets import MASKED, WIDTH, Attention, sequences, source
from torch import nn

from halfstep.diagnosis.capture import Capture
from halfstep.diagnosis.examination import examine
from halfstep.diagnosis.trace import trace_of
from halfstep.policy import Policy
from halfstep.record import LOSS

pytestmark = pytest.mark.usefixtures("kernels_stay")
POLICIES = ["fp16", "bf16", "fp32"]


def examined(model, x, policy, loss=None, scale=1.0):
    return examine(Capture(model, lambda: (loss or mean_square)(model(x)), Policy.parse(policy), scale=scale))


def mean_square(out):
    return out.float().square().mean()


def build(name):
    torch.manual_seed(0)
    return MASKED[name](), sequences()[0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MASKED)
def test_a_mask_is_no_fault(name, policy):
    model, x = build(name)
    seen = examined(model, x, policy)
    assert seen.outcome.is_finite
    assert not seen.is_bad, seen.fault and seen.fault.producer


class After(nn.Module):
    """A fault behind masked attention."""

    def __init__(self, attention, fault):
        super().__init__()
        self.attention, self.fault = attention, fault

    def forward(self, x):
        return self.fault(self.attention(x))


class Overflows(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x).half() * 30000.0 * 30000.0


class NoRoot(nn.Module):
    def forward(self, x):
        return (x - 100).sqrt()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MASKED)
def test_a_fault_behind_a_mask_is_found(name, policy):
    attention, x = build(name)
    fault = Overflows() if policy == "fp16" else NoRoot()
    seen = examined(After(attention, fault), x, policy)
    expected = ("inf", "mul") if policy == "fp16" else ("nan", "sqrt")
    producer = seen.fault.producer
    assert (producer.module, producer.phase, producer.kind, producer.op) == ("fault", "forward", *expected)
    assert seen.fault.origin is None


class NoSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.sub(gradient).reciprocal()


class BadGradient(nn.Module):
    def forward(self, x):
        return NoSlope.apply(x)


@pytest.mark.parametrize("name", MASKED)
def test_a_fault_of_the_backward_pass_behind_a_mask_is_found(name):
    attention, x = build(name)
    producer = examined(After(attention, BadGradient()), x, "bf16").fault.producer
    assert (producer.module, producer.phase, producer.kind, producer.op) == ("fault", "backward", "inf", "reciprocal")


class TimesMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.full_like(x, -math.inf))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return (gradient.abs() + 1) * ctx.saved_tensors[0]


def test_a_gradient_times_a_mask_is_a_fault():
    class Wrong(nn.Module):
        def forward(self, x):
            return TimesMask.apply(x)

    torch.manual_seed(0)
    model = After(nn.Linear(WIDTH, WIDTH), Wrong())
    seen = examined(model, sequences()[0], "fp32")
    producer = seen.fault.producer
    assert (producer.module, producer.phase, producer.kind, producer.op) == ("fault", "backward", "inf", "mul")
    assert seen.fault.origin.op == "full_like"


class CopiesFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.full_like(x, math.inf))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.saved_tensors[0].clone()
        return gradient.sub(gradient).reciprocal()


def test_a_copy_of_what_the_forward_pass_did_not_mind_is_no_fault_of_the_backward_pass():
    class Wrong(nn.Module):
        def forward(self, x):
            return CopiesFirst.apply(x)

    torch.manual_seed(0)
    producer = examined(After(nn.Linear(WIDTH, WIDTH), Wrong()), sequences()[0], "fp32").fault.producer
    assert (producer.module, producer.phase, producer.op) == ("fault", "backward", "reciprocal")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_row_in_which_all_is_masked_is_the_fault_of_its_softmax_and_says_where_the_mask_is(policy):
    def all_masked(scores, hidden):
        return scores.masked_fill(torch.ones_like(hidden), -math.inf)

    torch.manual_seed(0)
    seen_model, x = Attention(all_masked), sequences()[0]
    seen = examined(seen_model, x, policy)
    producer, origin = seen.fault.producer, seen.fault.origin
    assert (producer.module, producer.kind, producer.op) == ("", "nan", "_softmax")
    assert origin.op == "masked_fill"
    assert origin.site.file == __file__
    text = str(trace_of(Capture(seen_model, lambda: mean_square(seen_model(x)), Policy(policy))))
    assert "It was handed inf from masked_fill at" in text


def test_a_masked_row_whose_nan_is_filled_later_has_its_fault_in_the_backward_pass():
    def all_masked(scores, hidden):
        masked = (scores + torch.full(hidden.shape, -math.inf)).softmax(-1)
        return masked.masked_fill(masked.isnan(), 0.0)

    torch.manual_seed(0)
    seen = examined(Attention(all_masked), sequences()[0], "fp32")
    producer = seen.fault.producer
    assert math.isfinite(seen.outcome.loss)
    assert (producer.phase, producer.kind, producer.op) == ("backward", "nan", "_softmax_backward_data")
    assert seen.fault.origin.op == "full"


def test_zero_times_a_mask_is_a_fault():
    def product(scores, hidden):
        return scores + hidden.float() * -math.inf

    producer = examined(Attention(product), sequences()[0], "fp32").fault.producer
    assert (producer.kind, producer.op, producer.function) == ("nan", "mul", "mul")


@pytest.mark.parametrize(
    ("make", "op"),
    [
        (lambda x: x * -300.0 * 300.0, "mul"),  # a product that overflows to -inf
        (lambda x: (x - x).log(), "log"),
        (lambda x: -(x * 1000.0) * 100.0, "mul"),
        (lambda x: (x.float() * -1e5).half(), "_to_copy"),
        (lambda x: -(x.float() ** 20).half(), "_to_copy"),  # far beyond, and all the way there
        (lambda x: x - 60000.0 - x * 6000.0, "sub"),
    ],
)
def test_an_infinity_out_of_arithmetic_is_no_mask(make, op):
    class Low(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return make((x * self.scale).half())

    producer = examined(Low(), torch.linspace(1.0, 4.0, 4), "fp16").fault.producer
    assert (producer.module, producer.phase, producer.kind, producer.op) == ("", "forward", "inf", op)


def test_a_probability_that_rounds_to_zero_or_one_is_no_mask():
    class Saturated(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return (self.scale * x).sigmoid().half().log()

    producer = examined(Saturated(), torch.tensor([-200.0, 200.0]), "fp32").fault.producer
    assert (producer.op, producer.kind) == ("log", "inf")


def test_a_mask_that_reaches_the_loss_is_named_itself():
    def loss(out):
        return out.float().masked_fill(out > 0, -math.inf).mean()

    torch.manual_seed(0)
    producer = examined(Attention(lambda s, hidden: s), sequences()[0], "fp32", loss).fault.producer
    assert (producer.module, producer.phase, producer.kind, producer.op) == (LOSS, "forward", "inf", "masked_fill")


def test_a_mask_that_reaches_the_loss_is_named_before_what_its_gradient_does():
    def loss(out):
        return out.float().masked_fill(out > 0, -math.inf).mean() * out.float().square().mean()

    torch.manual_seed(0)
    producer = examined(nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH), "fp32", loss).fault.producer
    assert (producer.phase, producer.op) == ("forward", "masked_fill")


@pytest.mark.parametrize("policy", POLICIES)
def test_an_infinity_that_fp32_has_as_well_and_that_does_no_harm_is_no_fault(policy):
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            h = self.linear(x).relu()
            with torch.no_grad():
                weight = (torch.ones_like(h) / h).clamp(max=2.0)
            return h * weight

    torch.manual_seed(0)
    assert not examined(Weighted(), torch.randn(4, WIDTH), policy).is_bad


def test_an_infinity_in_a_trained_weight_is_no_mask_and_in_a_frozen_one_it_is():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Embedding(1, WIDTH))
    with torch.no_grad():
        model[1].weight[0, 0] = -math.inf

    def loss(out):
        return (out + model[1].weight[0]).softmax(-1)[..., 1].mean()

    x = torch.randn(4, WIDTH)
    model[1].weight.requires_grad_(False)
    first = nn.ModuleDict({"first": model[0], "mask": model[1]})
    capture = Capture(first, lambda: loss(first["first"](x)), Policy("fp32"))
    assert not examine(capture).is_bad
    model[1].weight.requires_grad_(True)
    capture = Capture(first, lambda: loss(first["first"](x)).log(), Policy("fp32"))
    assert not examine(capture).is_bad  # it does no harm
    capture = Capture(first, lambda: loss(first["first"](x)) + model[1].weight.sum(), Policy("fp32"))
    producer = examine(capture).fault.producer
    assert (producer.module, producer.holds, producer.kind) == ("mask", "mask.weight", "inf")


def test_largest_distances_are_filled_with_inf_and_another_fault_is_found():
    """Infinity of the other sign is written as well, for what must not be the nearest."""

    class Nearest(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.bad = nn.Linear(WIDTH, WIDTH), False

        def forward(self, x):
            h = self.linear(x)
            distance = (h[:, None] - h[None]).square().sum(-1).masked_fill(torch.eye(len(x)).bool(), math.inf)
            nearest = distance.min(-1).values
            return (nearest - 1e6).sqrt() if self.bad else nearest

    torch.manual_seed(0)
    model = Nearest()
    for policy in POLICIES:
        assert not examined(model, torch.randn(6, WIDTH), policy).is_bad
    model.bad = True
    producer = examined(model, torch.randn(6, WIDTH), "fp32").fault.producer
    assert (producer.op, producer.kind) == ("sqrt", "nan")


class Poles(nn.Module):
    """Infinities at a zero, which the next operation leaves behind."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x):
        h = self.linear(x).relu().float()
        if self.kind == "log":
            return torch.where(h > 0, h.log(), 0.0)
        if self.kind == "reciprocal":
            return (1 / h).clamp(max=10.0)
        transitions = (torch.eye(WIDTH) + torch.eye(WIDTH).roll(1, 0)).clamp(max=1.0).log()
        return (self.linear(x).float().unsqueeze(-1) + transitions).logsumexp(-2)


@pytest.mark.parametrize("kind", ["log", "reciprocal", "chain"])
def test_a_pole_that_is_left_behind_does_not_hide_a_fault(kind):
    torch.manual_seed(0)
    producer = examined(After(Poles(kind), NoRoot()), torch.randn(8, WIDTH), "fp32").fault.producer
    assert (producer.module, producer.phase, producer.kind, producer.op) == ("fault", "forward", "nan", "sqrt")


def test_a_pole_that_reaches_the_loss_is_the_fault():
    class Log(nn.Module):
        def forward(self, x):
            return x.relu().log()

    torch.manual_seed(0)
    producer = examined(After(nn.Linear(WIDTH, WIDTH), Log()), torch.randn(8, WIDTH), "fp32").fault.producer
    assert (producer.module, producer.kind, producer.op) == ("fault", "inf", "log")


def test_the_notes_of_an_operation_to_its_own_backward_are_no_fault():
    """The forward variables of a CTC loss are -inf where no path leads."""

    def loss(out):
        letters, lengths = torch.tensor([[1, 2, 3]]), (torch.tensor([8]), torch.tensor([3]))
        return NoRoot()(nn.functional.ctc_loss(out.float().log_softmax(-1).unsqueeze(1), letters, *lengths))

    torch.manual_seed(0)
    producer = examined(nn.Linear(WIDTH, WIDTH), torch.randn(8, WIDTH), "bf16", loss).fault.producer
    assert (producer.module, producer.kind, producer.op) == (LOSS, "nan", "sqrt")


def test_whole_runs_over_masks_find_nothing():
    from halfstep.explain.trace import trace

    for name in ("masked_fill", "encoder"):
        report = trace(source(MASKED[name], batches=sequences), Policy("fp16"), 4)
        assert not report.found
        assert report.to_dict()["producer"] is None
