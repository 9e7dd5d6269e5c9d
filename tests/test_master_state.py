"""Master weights: exact saving, loading and export, also in another layout, and what is left when a Stepper goes."""

import copy
import io

import pytest
import torch
from reference.master_net import NAMES, OPTIMIZERS, Net, assert_same, batches, build, exact, train

from halfstep import HalfstepError
from halfstep.master import Masters, _rests

pytestmark = pytest.mark.usefixtures("kernels_stay")


def saved(stepper):
    """Through a file, as a user does."""
    file = io.BytesIO()
    torch.save((stepper.model.state_dict(), stepper.optimizer.state_dict(), stepper.state_dict()), file)
    file.seek(0)
    return torch.load(file)


def resume(policy, state, make=OPTIMIZERS["adamw"], **settings):
    model, stepper = build(policy, make, model=Net(seed=9), **settings)
    model.load_state_dict(state[0])
    stepper.optimizer.load_state_dict(state[1])
    stepper.load_state_dict(state[2])
    return model, stepper


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_a_resumed_run_takes_the_same_steps_to_the_bit(layout, format):
    policy = f"{format} master={layout}"
    model, stepper = build(policy, accumulate=2)
    train(stepper, model, batches(5))  # in the middle of a window
    state = saved(stepper)
    train(stepper, model, batches(5, seed=3))
    other, resumed = resume(policy, state, accumulate=2)
    train(resumed, other, batches(5, seed=3))
    assert_same(exact(resumed), exact(stepper))
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("target", ["fp32", *NAMES])
@pytest.mark.parametrize("source", ["fp32", *NAMES])
def test_a_run_goes_on_in_another_layout(source, target):
    model, stepper = build(f"bf16 master={source}")
    train(stepper, model, batches(20))
    state, before = saved(stepper), exact(stepper)
    other, resumed = resume(f"bf16 master={target}", state)
    after = exact(resumed)
    can_hold = target in ("fp32", "copy", "split16") or source in (target, "stochastic")
    for name, weight in before.items():
        if can_hold or weight.dim() == 1:
            assert torch.equal(after[name], weight), name
        else:
            # bf16's half ulp is 2^-9 relative, and a drawn rounding moves by up to a whole one.
            assert torch.allclose(after[name], weight, rtol=2.0**-7, atol=1e-38), name
    for parameter, state in resumed.optimizer.state.items():
        assert state["exp_avg"].dtype == torch.float32, parameter.shape
    assert train(resumed, other, batches(2))[-1].applied


def test_optimizer_states_are_not_rounded_on_the_way():
    model, stepper = build("bf16 master=split16")
    train(stepper, model, batches(3))
    state = copy.deepcopy(stepper.optimizer.state_dict())
    stepper.optimizer.load_state_dict(state)
    for number, values in stepper.optimizer.state_dict()["state"].items():
        for key, value in values.items():
            assert value.dtype == torch.float32
            assert torch.equal(value, state["state"][number][key])


@pytest.mark.parametrize("layout", ["copy", "split16"])
def test_fp32_weights_that_the_model_loads_keep_every_bit(layout):
    model, stepper = build(f"bf16 master={layout}")
    train(stepper, model, batches(1))
    weights = Net(seed=5).state_dict()
    model.load_state_dict(weights)
    for name, weight in stepper.weights():
        assert torch.equal(weight, weights[name]), name
    assert_same(stepper.fp32_state_dict(), dict(weights))


def test_exported_weights_make_a_plain_fp32_model():
    model, stepper = build("bf16 master=split16")
    train(stepper, model, batches(5))
    plain = Net(seed=7)
    plain.load_state_dict(stepper.fp32_state_dict())
    for name, weight in stepper.weights():
        assert torch.equal(dict(plain.named_parameters())[name], weight)


@pytest.mark.parametrize("layout", NAMES)
def test_exported_weights_are_copies(layout):
    model, stepper = build(f"bf16 master={layout}")
    train(stepper, model, batches(1))
    before = exact(stepper)
    for value in stepper.fp32_state_dict().values():
        value.zero_()
    assert_same(exact(stepper), before)


def test_rests_without_their_weights_are_refused():
    model, stepper = build("bf16 master=split16")
    train(stepper, model, batches(3))
    state = saved(stepper)
    _, fresh = build("bf16 master=split16", model=Net(seed=9))
    before = exact(fresh)
    with pytest.raises(HalfstepError, match=r"does not hold the 16-bit weight.*Load the model's state first"):
        fresh.load_state_dict(state[2])
    assert_same(exact(fresh), before)


def test_a_copied_or_pickled_model_loads_as_any_model():
    model, stepper = build("bf16 master=split16")
    for other in (copy.deepcopy(model), torch.load(_pickled(model), weights_only=False)):
        weights = Net(seed=5).state_dict()
        before = exact(stepper)
        other.load_state_dict(weights)
        assert torch.equal(other.up.weight, weights["up.weight"].bfloat16())
        assert_same(exact(stepper), before)


def _pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_a_stepper_that_goes_takes_its_hooks_along():
    model, stepper = build("bf16 master=split16")
    optimizer = stepper.optimizer
    assert any(module._load_state_dict_post_hooks for module in model.modules())
    del stepper
    assert not any(module._load_state_dict_post_hooks for module in model.modules())
    assert not optimizer._optimizer_load_state_dict_post_hooks


def test_a_promoted_module_gets_its_exact_fp32_weights_back():
    model, stepper = build("fp16 master=split16 on_exhausted=promote scale.init=1")
    train(stepper, model, batches(2))
    before = exact(stepper)
    stepper.region.promote("up")
    stepper.masters.settle(stepper.policy)
    assert model.up.weight.dtype == torch.float32
    assert model.up.weight.grad_dtype == torch.float32
    assert model.up.weight not in _rests  # whose memory is free again
    assert torch.equal(model.up.weight, before["up.weight"])
    train(stepper, model, batches(2))
    stepper._promoted.append("up")
    state, now = saved(stepper), exact(stepper)
    _, resumed = resume("fp16 master=split16 on_exhausted=promote scale.init=1", state)
    assert_same(exact(resumed), now)


def test_values_at_places():
    model, stepper = build("bf16 master=split8")
    train(stepper, model, batches(2))
    index = torch.tensor([0, 5, 17])
    assert isinstance(stepper.masters, Masters)
    for name, weight in exact(stepper).items():
        parameter = dict(model.named_parameters())[name]
        assert torch.equal(stepper.masters.values_at(parameter, index), weight.flatten()[index])
