"""Loading: every state of an optimizer in the format it was saved in, and weights finer than 16 bit into the rest."""

import copy

import pytest
import torch
from reference.master_net import assert_same, exact
from torch import nn

from halfstep import HalfstepError, Stepper
from halfstep.loading import keep_formats

pytestmark = pytest.mark.usefixtures("kernels_stay")

POLICY = "bf16 master=split16"
X = torch.linspace(-2, 2, 64).reshape(8, 8).sin()


class Failing(nn.Linear):
    """A layer whose loading fails when it is told to."""

    fails = False

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        if self.fails:
            raise RuntimeError("no")


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Failing(16, 8))


def build(policy=POLICY, model=None, steps=3):
    model = net() if model is None else model
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), lr=1e-3), policy)
    for _ in range(steps):
        stepper.step(lambda: (model(X).float() - 1).square().mean())
    return model, stepper


# The model.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32])
def test_weights_in_another_format_keep_what_fp32_holds(dtype):
    model, stepper = build()
    weights = {name: value.to(dtype) for name, value in net(5).state_dict().items()}
    if dtype == torch.float64:
        weights = {name: value + 1e-3 / 3 for name, value in weights.items()}
    model.load_state_dict(weights)
    assert_same(exact(stepper), {name: value.float() for name, value in weights.items()})


def test_weights_in_the_format_of_the_model_are_the_new_ones():
    model, stepper = build()
    weights = {name: value.bfloat16() for name, value in net(5).state_dict().items()}
    model.load_state_dict(weights)
    assert_same(exact(stepper), {name: value.float() for name, value in weights.items()})


def test_a_part_of_a_state_changes_that_part():
    model, stepper = build()
    before = exact(stepper)
    weight = torch.full((16, 8), 0.123456789)
    model.load_state_dict({"0.weight": weight}, strict=False)
    assert_same(exact(stepper), before | {"0.weight": weight})


def test_a_wrapper_with_a_prefix_loads_exactly():
    class Wrapper(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.module = model

    model, stepper = build()
    weights = net(5).state_dict()
    Wrapper(model).load_state_dict({f"module.{name}": value for name, value in weights.items()})
    assert_same(exact(stepper), dict(weights))


def test_a_shape_that_does_not_fit_changes_nothing_of_its_weight():
    model, stepper = build()
    before = exact(stepper)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"0.weight": torch.zeros(3, 3)}, strict=False)
    assert_same(exact(stepper), before)


def test_what_a_failed_load_left_is_not_taken_by_the_next():
    model, stepper = build()
    model[2].fails = True
    with pytest.raises(RuntimeError, match="no"):
        model.load_state_dict(net(5).state_dict())
    model[2].fails = False
    weights = {name: value.bfloat16() for name, value in net(6).state_dict().items()}
    model.load_state_dict({name: value for name, value in weights.items() if name[0] == "2"}, strict=False)
    model.load_state_dict({name: value for name, value in weights.items() if name[0] == "0"}, strict=False)
    assert_same(exact(stepper), {name: value.float() for name, value in weights.items()})


def test_a_loaded_weight_beyond_fp16_is_refused_by_name():
    model, _ = build("fp16 master=split16")
    weights = net(5).state_dict()
    weights["2.weight"][0, 0] = -1e5
    with pytest.raises(HalfstepError, match=r"2\.weight with a weight of 100000.*65504"):
        model.load_state_dict(weights)


def test_a_parameter_that_is_no_tensor_of_the_state_is_torchs_own_affair():
    model, stepper = build()
    before = exact(stepper)
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.bias"):
        model.load_state_dict({})
    assert_same(exact(stepper), before)


# The stepper.


@pytest.mark.parametrize("target", ["fp32", "bf16 master=split16", "fp16 master=copy", "fp16 master=split16"])
@pytest.mark.parametrize("source", ["bf16 master=split16", "fp16 master=split16", "fp16 master=kahan"])
def test_a_run_goes_on_in_the_other_16_bit_format(source, target):
    model, stepper = build(source)
    other, resumed = build(target, net(9), steps=0)
    other.load_state_dict(model.state_dict())
    resumed.optimizer.load_state_dict(stepper.optimizer.state_dict())
    version = other[0].weight._version
    resumed.load_state_dict({**stepper.state_dict(), "scale": resumed.scale.state_dict()})
    if source != target:  # the 16-bit weight may have changed too
        assert other[0].weight._version > version
    for name, weight in exact(stepper).items():
        after = dict(resumed.weights())[name]
        if target == "fp16 master=split16":  # which keeps what is smaller than 2^-17 to 2^-40
            assert (after - weight).abs().max() <= 2.0**-40, name
        else:
            assert torch.equal(after, weight), name


@pytest.mark.parametrize("layout", ["copy", "split16", "split8", "kahan"])
def test_a_state_goes_back_into_the_stepper_that_it_comes_from(layout):
    """Every tie, which the layouts round to different sides: the 16-bit weight is compared as it lies there."""
    model, stepper = build(f"bf16 master={layout}", steps=1)
    bits = (torch.arange(16256, 16256 + 128) * 2**16 + 2**15).to(torch.int32)
    model.load_state_dict({"0.weight": bits.view(torch.float32).view(16, 8)}, strict=False)
    before = exact(stepper)
    stepper.load_state_dict(stepper.state_dict())
    assert_same(exact(stepper), before)


@pytest.mark.parametrize("layout", ["copy", "split16", "split8", "kahan"])
def test_a_saved_state_is_a_copy(layout):
    model, stepper = build(f"bf16 master={layout}")
    saved = stepper.state_dict()["masters"]["rests"]["0.weight"]
    before = saved.clone()
    stepper.step(lambda: (model(X).float() - 1).square().mean())
    assert torch.equal(saved, before)
    state = stepper.state_dict()
    before = state["masters"]["rests"]["0.weight"].clone()
    stepper.load_state_dict(state)
    stepper.step(lambda: (model(X).float() - 1).square().mean())
    assert torch.equal(state["masters"]["rests"]["0.weight"], before)


def test_a_module_is_watched_once():
    model, stepper = build()
    stepper.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    stepper.masters.settle(stepper.policy)
    assert [len(module._load_state_dict_post_hooks) for module in model] == [1, 0, 1]


@pytest.mark.parametrize("bad", [None, {}, {"layout": "split16"}])
def test_a_state_of_something_else_is_refused(bad):
    _, stepper = build()
    before = exact(stepper)
    with pytest.raises(HalfstepError, match="a state without the keys of Masters"):
        stepper.load_state_dict({**stepper.state_dict(), "masters": bad})
    assert_same(exact(stepper), before)


# The optimizer.


class Nested(torch.optim.Optimizer):
    """Keeps its states in a dict and a list."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state["sums"] = {"first": torch.zeros_like(p)}
                state["seconds"] = [torch.zeros_like(p), torch.zeros(3, dtype=torch.int64)]
            state["sums"]["first"].add_(p.grad)
            state["seconds"][0].addcmul_(p.grad, p.grad)
            state["seconds"][1].add_(1)


def test_nested_states_keep_their_formats():
    model = net()
    stepper = Stepper(model, Nested(model.parameters()), POLICY)
    for _ in range(3):
        stepper.step(lambda: (model(X).float() - 1).square().mean())
    saved = copy.deepcopy(stepper.optimizer.state_dict())
    stepper.optimizer.load_state_dict(copy.deepcopy(saved))
    loaded = stepper.optimizer.state_dict()
    for number, state in saved["state"].items():
        mine = loaded["state"][number]
        pairs = [(mine["sums"]["first"], state["sums"]["first"]), *zip(mine["seconds"], state["seconds"], strict=True)]
        for value, expected in pairs:
            assert value.dtype == expected.dtype
            assert torch.equal(value, expected)


@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"foreach": False}], ids=str)
def test_states_of_a_run_in_pure_bf16_become_fp32(settings):
    source = net().bfloat16()
    optimizer = torch.optim.AdamW(source.parameters(), **settings)
    source(X.bfloat16()).float().square().mean().backward()
    optimizer.step()
    model = net(9)
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), **settings), POLICY)
    stepper.optimizer.load_state_dict(optimizer.state_dict())
    for parameter, other in zip(model.parameters(), source.parameters(), strict=True):
        moment = stepper.optimizer.state[parameter]["exp_avg"]
        assert moment.dtype == torch.float32
        assert torch.equal(moment, optimizer.state[other]["exp_avg"].float())
    assert stepper.step(lambda: (model(X).float() - 1).square().mean()).applied


def test_a_state_that_an_optimizer_makes_while_it_loads_is_left_to_it():
    class Making(Nested):
        def __setstate__(self, state):
            super().__setstate__(state)
            for values in self.state.values():
                values["made"] = torch.ones(1)

    model = net()
    stepper = Stepper(model, Making(model.parameters()), POLICY)
    stepper.step(lambda: (model(X).float() - 1).square().mean())
    stepper.optimizer.load_state_dict(copy.deepcopy(stepper.optimizer.state_dict()))
    assert all(state["made"] == 1 for state in stepper.optimizer.state.values())


def test_16_bit_states_that_an_optimizer_chose_stay_so():
    class Chosen(Nested):
        __module__ = "torchao.optim.chosen"  # not torch's own

        def step(self, closure=None):
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                self.state[p].setdefault("sum", torch.zeros_like(p, dtype=torch.bfloat16)).add_(p.grad)

    model = net()
    stepper = Stepper(model, Chosen(model.parameters()), POLICY)
    stepper.step(lambda: (model(X).float() - 1).square().mean())
    stepper.optimizer.load_state_dict(copy.deepcopy(stepper.optimizer.state_dict()))
    assert {state["sum"].dtype for state in stepper.optimizer.state.values()} == {torch.bfloat16}


def test_a_state_is_loaded_as_a_copy():
    model, stepper = build()
    saved = stepper.optimizer.state_dict()
    other, resumed = build(model=net(9), steps=0)
    resumed.optimizer.load_state_dict(saved)
    resumed.optimizer.state[other[0].weight]["exp_avg"].zero_()
    assert stepper.optimizer.state[model[0].weight]["exp_avg"].abs().sum() > 0


def test_formats_are_kept_until_it_is_taken_back():
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter])
    state = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.full((4,), 0.1)}}}
    state["param_groups"] = optimizer.state_dict()["param_groups"]
    remove = keep_formats(optimizer)
    with pytest.raises(ValueError, match="different number"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    for _ in range(2):
        optimizer.load_state_dict(copy.deepcopy(state))
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32
        assert torch.equal(optimizer.state[parameter]["exp_avg"], torch.full((4,), 0.1))
    remove()
    optimizer.load_state_dict(copy.deepcopy(state))
    assert optimizer.state[parameter]["exp_avg"].dtype == torch.bfloat16
