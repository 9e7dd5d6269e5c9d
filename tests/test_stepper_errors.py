"""Calls that cannot work: a clear error each, nothing half done, and a stepper that goes on as if it had not been."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
import torch
from reference.loop import Gate
from torch import nn

from halfstep.errors import HalfstepError
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")

X = torch.linspace(-2, 2, 64).reshape(8, 8).sin()
Y = X.mean(1, keepdim=True) + 0.5
POLICIES = ["fp32", "bf16", "fp16 on_overflow=skip scale.init=1024", "fp16 scale.init=1024"]
FORMS = ["closure", "forward"]


class Net(nn.Sequential):
    def __init__(self):
        torch.default_generator.manual_seed(0)
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8), Gate(), nn.Linear(8, 1))
        self.other = nn.Linear(1, 1)  # in no optimizer and in no loss

    def forward(self, x):
        for layer in (self[0], self[1], self[2], self[3]):
            x = layer(x)
        return x


def loss_of(model, step=0):
    return (model(X.roll(step, 0)) - Y).square().mean()


def make(policy="fp32", model=None, **kwargs):
    model = Net() if model is None else model
    trained = [p for name, p in model.named_parameters() if not name.startswith("other")]
    return Stepper(model, torch.optim.AdamW(trained, lr=0.01), policy, **{"keep_casts": True, **kwargs})


def micro_batch(stepper, form, closure):
    if form == "closure":
        return stepper.step(closure)
    with stepper.forward():
        loss = closure()
    return stepper.backward(loss)


def everything(stepper):
    gradients = [None if p.grad is None else p.grad.clone() for p in stepper.model.parameters()]
    values = [t.detach().clone() for t in stepper.model.state_dict().values()]
    return gradients, values


def assert_same(left, right):
    for a, b in zip(left[0] + left[1], right[0] + right[1], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


# --- what the constructor refuses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 1.5, math.nan, math.inf, "4"])
def test_accumulate_is_a_number_of_micro_batches(value):
    with pytest.raises(HalfstepError, match=r"accumulate=.*a window holds whole micro-batches. Use 1, 2, 3"):
        make(accumulate=value)


@pytest.mark.parametrize("value", [1, 7, np.int64(3)])
def test_accumulate_takes_whole_numbers(value):
    assert make(accumulate=value).accumulate == value


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.nan, math.inf, -math.inf])
def test_max_norm_is_a_positive_number(value):
    with pytest.raises(HalfstepError, match=r"max_norm=.*clipped to a positive number. Use None"):
        make(max_norm=value)


@pytest.mark.parametrize("value", [None, 1, 1e-9, 1e9, np.float64(0.5)])
def test_max_norm_takes_none_and_positive_numbers(value):
    stepper = make(max_norm=value)
    assert stepper.step(lambda: loss_of(stepper.model)).applied


def test_an_optimizer_built_before_the_model_was_changed():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[3] = nn.Linear(8, 5)
    with pytest.raises(
        HalfstepError, match=r"shape \(1, 8\).*built before the model was changed. Change the model first"
    ):
        Stepper(model, optimizer, "fp32")
    Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_trainable_weights_in_16_bit(dtype):
    model = Net()
    model[3].to(dtype)
    with pytest.raises(
        HalfstepError, match=rf"parameter 3.weight \(shape \(1, 8\)\) in {str(dtype)[6:]}.*Make it fp32.*master=split16"
    ):
        make(model=model)
    model[3].requires_grad_(False)
    make(model=model)  # a frozen weight may be what it likes


def test_a_scheduler_around_the_optimizer_is_no_reason_to_refuse_it():
    model = Net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert Stepper(model, optimizer, "fp32", scheduler=schedule).step(lambda: loss_of(model)).applied


def test_a_scheduler_that_needs_a_metric():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(HalfstepError, match=r"scheduler ReduceLROnPlateau: its step\(\) needs metrics"):
        Stepper(model, optimizer, "fp32", scheduler=schedule)


@pytest.mark.parametrize("policy", ["fp12", "fp16 module:nowhere=fp32", "bf16 op:sofmax=fp32", ""])
def test_a_policy_that_cannot_be(policy):
    with pytest.raises(HalfstepError):
        make(policy)


# --- what a loss must be ---------------------------------------------------------------------------------------------

LOSSES = {
    "a vector": (lambda m: (m(X) - Y).square(), r"a tensor of shape \(8, 1\).*Return a mean or \(sum, count\)"),
    "empty": (lambda m: m(X)[:0], r"a tensor of shape \(0, 1\)"),
    "a number": (lambda m: loss_of(m).item(), "a loss that is float"),
    "nothing": (lambda m: None, "a loss that is NoneType"),
    "a dict": (lambda m: {"loss": loss_of(m)}, "a loss that is dict"),
    "a list": (lambda m: [loss_of(m), 8], "a loss that is list"),
    "three values": (lambda m: (loss_of(m), 8, 8), "a loss that is tuple"),
    "whole numbers": (lambda m: torch.tensor(3), r"a tensor of shape \(\)"),
    "detached": (lambda m: loss_of(m).detach(), r"a loss without a gradient.*stepper.inference\(\)"),
    "loss and output": (lambda m: (loss_of(m), m(X)), r"a count that is a tensor of shape \(8, 1\).*or the mean alone"),
    "loss and text": (lambda m: (loss_of(m), "8"), "a count that is str"),
    "loss and None": (lambda m: (loss_of(m), None), "a count that is NoneType"),
    "swapped": (lambda m: (8, loss_of(m)), "a loss that is int"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", POLICIES[1::2])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_cannot_be_one_leaves_the_window_as_it_was(name, policy, form):
    closure, message = LOSSES[name]
    stepper = make(policy, accumulate=3)
    model = stepper.model
    micro_batch(stepper, form, lambda: loss_of(model, 0))
    gradients = everything(stepper)[0]
    with pytest.raises(HalfstepError, match=message):
        micro_batch(stepper, form, lambda: closure(model))
    assert_same((everything(stepper)[0], []), (gradients, []))
    micro_batch(stepper, form, lambda: loss_of(model, 1))
    report = micro_batch(stepper, form, lambda: loss_of(model, 2))

    twin = make(policy, accumulate=3)
    micro_batch(twin, form, lambda: loss_of(twin.model, 0))
    micro_batch(twin, form, lambda: loss_of(twin.model, 1))
    assert report.to_dict() == micro_batch(twin, form, lambda: loss_of(twin.model, 2)).to_dict()
    for a, b in zip(model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_loss_of_one_element_may_have_any_shape(policy, shape):
    stepper = make(policy)
    assert stepper.step(lambda: loss_of(stepper.model).reshape(shape)).applied


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_loss_that_reaches_no_parameter_of_the_optimizer(policy, form):
    """The window is given up with a clear error, and the next one is whole."""
    stepper = make(policy, accumulate=2)
    model = stepper.model
    twin = make(policy, accumulate=2)
    before = everything(stepper)
    closure = lambda: model.other(torch.ones(1, 1)).float().sum()  # noqa: E731
    assert micro_batch(stepper, form, closure) is None
    with pytest.raises(HalfstepError, match="a window without gradients: no parameter of the optimizer got one"):
        micro_batch(stepper, form, closure)
    model.other.zero_grad()
    assert_same(everything(stepper), before)
    for step in range(4):
        report = micro_batch(stepper, form, lambda step=step: loss_of(model, step))
        expected = micro_batch(twin, form, lambda step=step: loss_of(twin.model, step))
    assert report.to_dict() == expected.to_dict()


@pytest.mark.parametrize("policy", POLICIES)
def test_flush_of_a_window_without_gradients(policy):
    stepper = make(policy, accumulate=2)
    stepper.step(lambda: stepper.model.other(torch.ones(1, 1)).float().sum())
    with pytest.raises(HalfstepError, match="a window without gradients"):
        stepper.flush()
    assert stepper.flush() is None


# --- exceptions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["output", "gradient"])
@pytest.mark.parametrize("raises", [KeyboardInterrupt, RuntimeError, SystemExit, StopIteration])
@pytest.mark.parametrize("first", [0, 1])
def test_an_exception_in_a_replayed_micro_batch_leaves_the_finished_ones(where, raises, first):
    """Forward or backward, in the first micro-batch or a later one: the sums, the statistics and the window stay."""
    stepper, twin = make(POLICIES[3], accumulate=3), make(POLICIES[3], accumulate=3)
    model = stepper.model
    for step in range(first):
        stepper.step(lambda step=step: loss_of(model, step))
    before = everything(stepper)
    model[2].where, model[2].raises = where, raises
    with pytest.raises(raises):
        stepper.step(lambda: loss_of(model, 9))
    model[2].where = "nowhere"
    assert_same(everything(stepper), before)
    for step in range(first, 3):
        report = stepper.step(lambda step=step: loss_of(model, step))
    for step in range(3):
        expected = twin.step(lambda step=step: loss_of(twin.model, step))
    assert report.to_dict() == expected.to_dict()
    assert_same(everything(stepper), everything(twin))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", POLICIES[:3])
def test_an_exception_in_the_forward_pass_leaves_the_finished_micro_batches(policy, form):
    stepper = make(policy, accumulate=2)
    model = stepper.model
    micro_batch(stepper, form, lambda: loss_of(model, 0))
    gradients = everything(stepper)[0]
    model[2].where, model[2].raises = "output", KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        micro_batch(stepper, form, lambda: loss_of(model, 1))
    model[2].where = "nowhere"
    assert_same((everything(stepper)[0], []), (gradients, []))
    assert micro_batch(stepper, form, lambda: loss_of(model, 1)).applied


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", POLICIES[:3])
def test_a_backward_pass_that_fails_midway_gives_up_the_window(policy, form):
    """Without a copy, what it has added to the sums cannot be taken out again; half a gradient is not trained on."""
    stepper, twin = make(policy, accumulate=2), make(policy, accumulate=2)
    model = stepper.model
    before = everything(stepper)
    micro_batch(stepper, form, lambda: loss_of(model, 7))
    model[2].where, model[2].raises = "gradient", lambda: RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        micro_batch(stepper, form, lambda: loss_of(model, 8))
    model[2].where = "nowhere"
    assert_same(everything(stepper), before)
    for step in range(2):
        report = micro_batch(stepper, form, lambda step=step: loss_of(model, step))
        expected = micro_batch(twin, form, lambda step=step: loss_of(twin.model, step))
    assert report.to_dict() == expected.to_dict()
    assert_same(everything(stepper), everything(twin))


@pytest.mark.parametrize("policy", POLICIES)
def test_an_optimizer_that_fails_gives_up_the_window(policy):
    stepper = make(policy, accumulate=2)
    stepper.step(lambda: loss_of(stepper.model, 0))
    step = stepper.optimizer.step
    stepper.optimizer.step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        stepper.step(lambda: loss_of(stepper.model, 1))
    stepper.optimizer.step = step
    assert all(p.grad is None for p in stepper.model.parameters())
    assert stepper.step(lambda: loss_of(stepper.model, 0)) is None
    assert stepper.step(lambda: loss_of(stepper.model, 1)).applied


@pytest.mark.parametrize("policy", POLICIES)
def test_a_hook_that_fails_comes_after_a_step_that_is_complete(policy):
    def fail(report):
        raise ZeroDivisionError

    for kwargs in ({"on_applied": fail}, {"sinks": [fail]}):
        stepper, twin = make(policy, **kwargs), make(policy)
        twin.step(lambda twin=twin: loss_of(twin.model))
        with pytest.raises(ZeroDivisionError):
            stepper.step(lambda stepper=stepper: loss_of(stepper.model))
        assert_same(everything(stepper), everything(twin))
        assert stepper.state_dict()["scale"] == twin.state_dict()["scale"]
        assert stepper.num_steps == 1


def test_a_sink_that_fails_at_an_overflow_leaves_sums_that_fit_the_lowered_scale():
    stepper, twin = make(POLICIES[3], accumulate=2), make("fp16 scale.init=512", accumulate=2)
    model = stepper.model
    for each in (stepper, twin):
        each.step(lambda each=each: loss_of(each.model, 0))

    def fail(event):
        raise ZeroDivisionError

    stepper.sinks = (fail,)
    model[2].limit = 0.0
    with pytest.raises(ZeroDivisionError):
        stepper.step(lambda: loss_of(model, 1))
    stepper.sinks, model[2].limit = (), None
    assert stepper.scale.value.item() == 512.0
    for each in (stepper, twin):
        each.step(lambda each=each: loss_of(each.model, 1))
    assert_same(everything(stepper), everything(twin))


@pytest.mark.parametrize("policy", POLICIES[2:])
@pytest.mark.parametrize("where", ["output", "gradient"])
def test_no_region_is_open_after_an_exception(policy, where):
    stepper = make(policy, accumulate=2)
    stepper.model[2].where, stepper.model[2].raises = where, KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        stepper.step(lambda: loss_of(stepper.model))
    assert not torch.is_autocast_enabled("cpu")
    stepper = None
    gc.collect()
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()
