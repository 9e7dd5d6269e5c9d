"""Master weights that somebody changes between two steps, and several Steppers over one model."""

import copy
import gc
import pickle

import pytest
import torch
from reference.master_mlp import POLICY, adamw, build, named, net, step
from reference.master_net import assert_same, exact
from torch import nn

from halfstep import HalfstepError, Stepper
from halfstep.layouts import LAYOUTS

pytestmark = pytest.mark.usefixtures("kernels_stay")


# Between steps.


@pytest.mark.parametrize("accumulate", [1, 2])
def test_freezing_and_thawing(accumulate):
    model, stepper = build(accumulate=accumulate)

    def window():
        return [step(stepper) for _ in range(accumulate)][-1]

    window()
    model[0].weight.requires_grad_(False)
    window()  # a gradient that a window has is used, as torch does
    frozen, version = exact(stepper)["0.weight"], model[0].weight._version
    assert window().applied
    assert torch.equal(exact(stepper)["0.weight"], frozen)
    assert model[0].weight._version == version  # graphs that hold it stay valid
    model[0].weight.requires_grad_(True)
    window()
    assert not torch.equal(exact(stepper)["0.weight"], frozen)


def test_a_weight_changed_in_place_is_seen_although_a_group_is_added():
    model = net()
    stepper = Stepper(model, torch.optim.SGD(model[0].parameters(), lr=0.0), POLICY)
    step(stepper)
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    stepper.optimizer.add_param_group({"params": list(model[2].parameters())})
    step(stepper)
    assert (exact(stepper)["0.weight"] == 0.5).all()


def test_groups_that_are_exchanged_are_noticed():
    model = net()
    stepper = Stepper(model, adamw([model[0].bias]), POLICY)
    step(stepper)
    stepper.optimizer.param_groups[0]["params"] = [model[2].weight]
    assert step(stepper).applied
    assert model[2].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("convert", [nn.Module.float, nn.Module.half])
def test_a_model_that_was_converted_is_narrowed_again(convert):
    model, stepper = build()
    step(stepper)
    convert(model)
    values = {name: p.detach().float() for name, p in model.named_parameters()}
    assert_same({n: w.float() for n, w in exact(stepper).items()}, values)  # without the rest of another format
    for parameter in model.parameters():
        parameter.data = parameter.data.float() if parameter.dim() == 1 else parameter.data
    stepper.optimizer.param_groups[0]["lr"] = 0.0
    stepper.optimizer.param_groups[0]["weight_decay"] = 0.0
    assert step(stepper).applied
    assert model[0].weight.dtype == torch.bfloat16
    assert_same(exact(stepper), values)


def test_rests_that_are_lost_in_every_step_are_said_once():
    model, stepper = build()

    def clamp():
        with torch.no_grad():
            model[0].weight.clamp_(-1, 1)

    step(stepper)
    clamp()
    step(stepper)
    step(stepper)
    clamp()
    step(stepper)  # not twice in a row
    clamp()
    with pytest.warns(UserWarning, match=r"0\.weight was changed in place.*half an ulp are lost.*module:0=fp32"):
        step(stepper)
    clamp()
    step(stepper)
    other, drawn = build(policy="bf16 master=stochastic")
    for _ in range(3):
        step(drawn)
        with torch.no_grad():
            other[0].weight.clamp_(-1, 1)


# Several Steppers over one model.


def test_two_steppers_in_turn_move_one_exact_weight():
    """Each update is 1/100 of a bf16 ulp: one that dropped the other's rest would lose them all, or round up."""
    model = net()
    first, second = (Stepper(model, torch.optim.SGD(model.parameters(), lr=1e-5), POLICY) for _ in range(2))
    twin, seen = net(), {}
    optimizer = torch.optim.SGD(twin.parameters(), lr=1e-5)
    for stepper in (first, second):
        stepper.optimizer.register_step_pre_hook(lambda *_: seen.update({n: p.grad.float() for n, p in named(model)}))
    for number in range(20):
        step((first, second)[number % 2])
        for name, parameter in twin.named_parameters():
            parameter.grad = seen[name].clone()
        optimizer.step()
    assert_same(exact(first), {name: p.detach() for name, p in twin.named_parameters()})
    assert_same(exact(second), exact(first))


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize("layout", ["copy", "split16"])
@pytest.mark.parametrize("before", list(LAYOUTS))
def test_a_second_stepper_takes_over_the_exact_weights(before, layout, is_gone):
    model, stepper = build(policy=f"bf16 master={before}")
    for _ in range(3):
        step(stepper)
    weights, optimizer = exact(stepper), stepper.optimizer
    if is_gone:
        del stepper
        gc.collect()
    stepper = Stepper(model, optimizer, f"bf16 master={layout}")
    assert_same(exact(stepper), weights)
    assert step(stepper).applied


def test_a_second_stepper_in_the_other_16_bit_format_takes_over_the_exact_weights():
    """fp16 has more digits, and the weights here lie above 2^-17, from where its split16 is exact."""
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(0.1, 1, parameter.numel()).view_as(parameter))
    _, stepper = build(model)
    step(stepper)
    weights = exact(stepper)
    _, other = build(model, "fp16 master=split16")
    assert model[0].weight.dtype == torch.float16
    assert_same(exact(other), weights)


def test_a_stepper_whose_layout_was_taken_over_reads_no_stale_rest():
    model, first = build()
    step(first)
    _, second = build(model, "bf16 master=stochastic")
    assert_same(exact(first), exact(second))
    step(second)
    assert_same(exact(first), exact(second))
    assert step(first).applied


def test_an_embedding_hands_on_fp32_after_the_first_of_two_steppers_is_gone():
    model = nn.Embedding(8, 8)
    _, first = build(model)
    _, second = build(model)
    del first
    gc.collect()
    with second.region:
        assert model(torch.arange(8)).dtype == torch.float32
    second.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    second.masters.settle(second.policy)
    assert len(model._forward_hooks) == 1
    del second
    gc.collect()
    assert not model._forward_hooks


def test_a_rest_goes_with_its_parameter():
    from halfstep.master import _rests

    gc.collect()
    before = len(_rests)
    model, stepper = build()
    step(stepper)
    assert len(_rests) == before + 2
    del model, stepper
    gc.collect()
    assert len(_rests) == before


def test_a_copied_stepper_is_refused_since_it_would_lose_the_rests():
    _, stepper = build()
    step(stepper)
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(HalfstepError, match=r"copy or a pickle.*lose the rests.*load the state_dict"):
            make(stepper)
    _, plain = build(policy="bf16")
    assert step(copy.deepcopy(plain)).applied
