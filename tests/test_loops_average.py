"""Averages of weights, against torch.optim.swa_utils; what they do with skipped steps and 16-bit weights."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from reference.loop import Gate, assert_same
from reference.nets import CPU
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

from halfstep.average import WeightAverage
from halfstep.errors import HalfstepError
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")

X = torch.linspace(-2, 2, 192).reshape(24, 8).sin()
Y = X.mean(1, keepdim=True) + 0.5
DECAYS = [0.9, None]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.gate, self.head = Gate(), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.gate(self.body(x)))


def make(policy="fp32", model=None, **kwargs):
    model = Net() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return Stepper(model, optimizer, policy, hardware=CPU, **kwargs)


def step(stepper, number, value=1.0):
    x, y = X.roll(number, 0)[:16], Y.roll(number, 0)[:16]
    return stepper.step(lambda: (stepper.model(x).float() - y).square().mean() * value)


def bits(model):
    return {name: p.detach().clone() for name, p in model.state_dict().items()}


def averages(average):
    return average.state_dict()["averages"]


# --- the values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("decay", DECAYS)
def test_it_is_the_averaged_model_of_torch(decay, policy):
    stepper = make(policy)
    average = WeightAverage(stepper, decay)
    torchs = get_swa_multi_avg_fn() if decay is None else get_ema_multi_avg_fn(decay)
    twin = AveragedModel(stepper.model, multi_avg_fn=torchs)
    for number in range(8):
        assert average.update(step(stepper, number))
        twin.update_parameters(stepper.model)
    for name, p in twin.module.named_parameters():
        assert torch.equal(averages(average)[name], p)
    assert average.num_updates == twin.n_averaged.item() == 8
    # Evaluation, where torch has a second model.
    expected = twin.module.eval()(X)
    stepper.model.eval()
    with average.swapped(), torch.no_grad():
        assert torch.equal(stepper.model(X), expected)


def test_the_mean_is_the_mean():
    stepper = make()
    average, seen = WeightAverage(stepper, None), []
    for number in range(20):
        average.update(step(stepper, number))
        seen.append(bits(stepper.model))
    for name, value in averages(average).items():
        mean = torch.stack([each[name].double() for each in seen]).mean(0)
        # Twenty additions in fp32, each rounded by at most half a last place of the largest weight.
        bound = 20 * torch.finfo(torch.float32).eps * max(each[name].abs().max().item() for each in seen)
        assert (value - mean).abs().max().item() <= bound


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("master", ["split16", "copy"])
def test_weights_in_16_bit_are_averaged_in_fp32(master, decay):
    """A decay of 0.999 moves the average by less than bf16 resolves, and each step a weight by less than that."""
    stepper, exact = make(f"bf16 master={master}"), make("bf16 master=copy")
    assert stepper.model.head.weight.dtype == torch.bfloat16
    average, twin = WeightAverage(stepper, decay), WeightAverage(exact, decay)
    for number in range(4):
        average.update(step(stepper, number))
        twin.update(step(exact, number))
    for name, value in averages(average).items():
        assert value.dtype == torch.float32
        assert torch.equal(value, averages(twin)[name])
    weights = dict(stepper.weights())
    assert (averages(average)["head.weight"] != averages(average)["head.weight"].bfloat16()).any()
    assert (weights["head.weight"] != averages(average)["head.weight"]).any()


# --- when it advances ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", DECAYS)
def test_it_advances_on_applied_steps_alone(decay):
    stepper = make("bf16", accumulate=2)
    average = WeightAverage(stepper, decay)
    assert [average.update(step(stepper, number)) for number in range(4)] == [False, True, False, True]
    before = average.state_dict()
    assert [average.update(step(stepper, number, math.inf)) for number in range(2)] == [False, False]
    assert_same(average.state_dict(), before)
    assert average.num_updates == 2


def test_it_can_be_the_hook_of_applied_steps():
    stepper = make("fp16", accumulate=2)
    average, twin = WeightAverage(stepper), WeightAverage(stepper)
    stepper.on_applied = average.update
    for number in range(6):
        twin.update(step(stepper, number))
    assert_same(average.state_dict(), twin.state_dict())


def test_the_first_step_taken_in_is_the_average():
    stepper = make()
    average = WeightAverage(stepper)
    average.update(step(stepper, 0))
    for name, p in stepper.model.named_parameters():
        assert torch.equal(averages(average)[name], p)
        assert averages(average)[name].data_ptr() != p.data_ptr()


def test_a_frozen_base_is_not_kept_and_a_thawed_part_joins():
    model = Net()
    model.body.requires_grad_(False)
    stepper = make("bf16", model)
    average = WeightAverage(stepper)
    average.update(step(stepper, 0))
    assert averages(average).keys() == {"head.weight", "head.bias"}
    model.body.requires_grad_(True)
    model.head.requires_grad_(False)
    average.update(step(stepper, 1))
    assert averages(average).keys() == dict(model.named_parameters()).keys()
    assert torch.equal(averages(average)["body.0.weight"], model.body[0].weight)


# --- swapping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "bf16 master=split16", "fp16 master=split16"])
def test_a_run_that_swaps_in_and_out_is_the_run_that_does_not(policy):
    """In the middle of a window too, between a forward and a backward pass, and with cast weights held."""
    results = []
    for swaps in (True, False):
        stepper = make(policy, accumulate=2, keep_casts=True)
        average = WeightAverage(stepper, 0.5)
        for number in range(9):
            average.update(step(stepper, number))
            if swaps and number > 3:
                before = bits(stepper.model)
                with average.swapped():
                    assert any(not torch.equal(before[n], p) for n, p in stepper.model.named_parameters())
                    with stepper.inference():
                        stepper.model(X)
                assert_same(bits(stepper.model), before)
        stepper.flush()
        results.append([bits(stepper.model), copy.deepcopy(stepper.optimizer.state_dict()["state"])])
        results[-1].append({name: weight.clone() for name, weight in stepper.weights()})
    assert_same(*results)


def test_a_graph_that_was_made_before_can_be_differentiated_after():
    stepper = make("bf16")
    average = WeightAverage(stepper, 0.5)
    for number in range(3):
        average.update(step(stepper, number))
    gradients = []
    for swaps in (False, True):
        stepper.model.zero_grad()
        with stepper.region:
            loss = stepper.model(X).float().square().mean()
        if swaps:
            with average.swapped():
                pass
        with stepper.region.backward():
            loss.backward()
        gradients.append([p.grad.clone() for p in stepper.model.parameters()])
    assert_same(*gradients)


def test_cast_weights_that_are_held_are_those_of_the_average_inside():
    """A region opened by hand inside, in a window that keeps its casts."""
    stepper = make("bf16", accumulate=2, keep_casts=True)
    average = WeightAverage(stepper, 0.5)
    for number in range(5):
        average.update(step(stepper, number))
    plain = copy.deepcopy(stepper.model)
    for name, p in plain.named_parameters():
        p.data.copy_(averages(average)[name])
    twin = make("bf16", plain)
    for model in (stepper.model, plain):
        model.eval()
    with average.swapped(), stepper.region:
        inside = stepper.model(X)
    with twin.region:
        assert torch.equal(inside, plain(X))


def test_a_16_bit_model_shows_the_rounded_average():
    stepper = make("bf16 master=split16")
    average = WeightAverage(stepper, 0.5)
    for number in range(3):
        average.update(step(stepper, number))
    with average.swapped():
        for name, p in stepper.model.named_parameters():
            assert torch.equal(p, averages(average)[name].to(p.dtype))


def test_statistics_of_batch_norm_are_the_models_and_put_back():
    stepper = make()
    average = WeightAverage(stepper, None)
    for number in range(3):
        average.update(step(stepper, number))
    before = bits(stepper.model)
    with average.swapped():
        assert torch.equal(stepper.model.body[1].running_mean, before["body.1.running_mean"])
        update_bn([X[:12], X[12:]], stepper.model)
        assert not torch.equal(stepper.model.body[1].running_mean, before["body.1.running_mean"])
    assert_same(bits(stepper.model), before)


@pytest.mark.parametrize("raises", [KeyboardInterrupt, RuntimeError])
def test_an_exception_inside_puts_the_weights_back(raises):
    stepper = make()
    average = WeightAverage(stepper, 0.5)
    for number in range(3):
        average.update(step(stepper, number))
    before = bits(stepper.model)
    with pytest.raises(raises), average.swapped():
        raise raises
    assert_same(bits(stepper.model), before)
    assert average.update(step(stepper, 3))


# --- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", DECAYS)
def test_its_state_goes_through_a_file_to_the_bit(decay):
    stepper = make("bf16")
    average = WeightAverage(stepper, decay)
    for number in range(3):
        average.update(step(stepper, number))
    file = io.BytesIO()
    torch.save(average.state_dict(), file)
    file.seek(0)
    again = WeightAverage(stepper, decay)
    again.load_state_dict(torch.load(file))
    assert_same(again.state_dict(), average.state_dict())
    report = step(stepper, 3)
    assert average.update(report)
    assert again.update(report)
    assert_same(again.state_dict(), average.state_dict())


def test_a_state_is_a_copy():
    stepper = make()
    average = WeightAverage(stepper, 0.5)
    average.update(step(stepper, 0))
    state = average.state_dict()
    kept = copy.deepcopy(state)
    again = WeightAverage(stepper, 0.5)
    again.load_state_dict(state)
    for each in (average, again):
        each.update(step(stepper, 1))
    assert_same(state, kept)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_what_is_refused():
    stepper = make()
    for decay in (0.0, 1.0, 1.5, -0.1, math.nan):
        with pytest.raises(HalfstepError, match="an average moves by 1 - decay"):
            WeightAverage(stepper, decay)
    average = WeightAverage(stepper)
    with pytest.raises(HalfstepError, match="an average of nothing"), average.swapped():
        pass
    report = step(stepper, 0)
    average.update(report)
    with average.swapped(), pytest.raises(HalfstepError, match="the weights are the average"):
        average.update(report)
    with average.swapped(), pytest.raises(HalfstepError, match="swapped in already"), average.swapped():
        pass
    state = average.state_dict()
    state["averages"]["tail.weight"] = torch.ones(2)
    with pytest.raises(HalfstepError, match=r"'tail.weight' of shape \(2,\)"):
        average.load_state_dict(state)
    with pytest.raises(HalfstepError, match="a state without the keys"):
        average.load_state_dict({"n_averaged": 3})
