"""State of the loop: saved in the middle of a window, loaded elsewhere, and the run goes on with the same bits."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from reference.loop import Gate, assert_same
from torch import nn

from halfstep.errors import HalfstepError
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")


X = torch.linspace(-2, 2, 256).reshape(32, 8).sin()
Y = X.mean(1, keepdim=True) + 0.5
POLICIES = [
    "fp32",
    "bf16",
    "fp16 on_overflow=skip scale.init=512 scale.interval=2",
    "fp16 scale.init=131072 scale.interval=3",
    "fp32 scale=dynamic scale.init=64 scale.hysteresis=2 on_overflow=skip",
]
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


class Net(nn.Sequential):
    def __init__(self, seed=0):
        torch.default_generator.manual_seed(seed)
        super().__init__(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), Gate(), nn.Dropout(0.2), nn.Linear(16, 1))


def make(policy, optimizer="adamw", seed=0, accumulate=3, **kwargs):
    model = Net(seed)
    kwargs = {"accumulate": accumulate, "keep_casts": True, **kwargs}
    return Stepper(model, OPTIMIZERS[optimizer](model.parameters()), policy, **kwargs)


def micro_batch(stepper, step, bad=()):
    """Ragged, with its count on the device; some have a gradient that is not finite."""
    model, num = stepper.model, 5 + step % 7
    x, y = X.roll(step, 0)[:num], Y.roll(step, 0)[:num]
    model[3].where, model[3].value = "output" if step in bad else "nowhere", float("nan")
    loss = (8.0 if step % 5 == 1 else 1.0) if "131072" in str(stepper.policy) else 1.0
    return stepper.step(lambda: ((model(x).float() - y).square().sum() * loss, torch.tensor(num)))


def save(stepper):
    file = io.BytesIO()
    parts = {
        "model": stepper.model.state_dict(),
        "optimizer": stepper.optimizer.state_dict(),
        "stepper": stepper.state_dict(),
        "random": torch.get_rng_state(),
    }
    torch.save(parts, file)
    file.seek(0)
    return file


def load(stepper, file):
    parts = torch.load(file, weights_only=True)
    stepper.model.load_state_dict(parts["model"])
    stepper.optimizer.load_state_dict(parts["optimizer"])
    stepper.load_state_dict(parts["stepper"])
    torch.set_rng_state(parts["random"])
    return stepper


def everything(stepper):
    return [stepper.model.state_dict(), stepper.optimizer.state_dict(), stepper.state_dict()]


# --- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw fused"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(stop, policy, optimizer):
    """Stopped before any micro-batch, within a window and between two; with a skipped window before and after."""
    bad = (4, 10)
    whole = make(policy, optimizer, max_norm=1.0)
    torch.default_generator.manual_seed(1)
    file, reports = None, []
    for step in range(15):
        if step == stop:
            file = save(whole)
        reports.append(micro_batch(whole, step, bad))
    resumed = load(make(policy, optimizer, seed=99, max_norm=1.0), file)
    for step in range(stop, 15):
        report = micro_batch(resumed, step, bad)
        assert (report is None) == (reports[step] is None)
        if report is not None:
            assert str(report.to_dict()) == str(reports[step].to_dict())
    assert_same(everything(resumed), everything(whole))


def test_the_run_that_is_resumed_has_replays_and_skips():
    """Or the test above would show little."""
    stepper = make(POLICIES[3])
    torch.default_generator.manual_seed(1)
    reports = [report for step in range(15) if (report := micro_batch(stepper, step, (4, 10)))]
    assert sum(report.num_replays for report in reports) > 0
    assert {report.applied for report in reports} == {True, False}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_state_is_exact_when_loaded_and_saved_again(policy):
    stepper = make(policy)
    for step in range(5):
        micro_batch(stepper, step)
    state = stepper.state_dict()
    other = make(policy, seed=1)
    other.load_state_dict(state)
    assert_same(other.state_dict(), state)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_state_is_a_copy_both_ways(policy):
    stepper = make(policy)
    for step in range(4):
        micro_batch(stepper, step)
    state = stepper.state_dict()
    kept = copy.deepcopy(state)
    micro_batch(stepper, 4)
    other = make(policy, seed=1)
    other.load_state_dict(state)
    micro_batch(other, 4)
    micro_batch(other, 5)
    assert_same(state, kept)


def test_gradients_keep_their_format():
    """A state is never cast on its way: float64 gradients stay float64."""
    model = nn.Linear(4, 1).double()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", accumulate=2)
    stepper.step(lambda: model(torch.ones(2, 4, dtype=torch.float64) / 3).sum())
    gradients = [p.grad.clone() for p in model.parameters()]
    state = stepper.state_dict()
    stepper.flush()
    stepper.load_state_dict(state)
    assert_same([p.grad for p in model.parameters()], gradients)


def test_a_model_whose_parts_come_in_another_order_takes_the_state():
    class Pair(nn.Module):
        def __init__(self, names):
            super().__init__()
            for name in names:
                setattr(self, name, nn.Linear(8, 8 if name == "a" else 1))

        def forward(self, x):
            return self.b(self.a(x))

    first, second = Pair("ab"), Pair("ba")
    second.load_state_dict(first.state_dict())
    steppers = [Stepper(m, torch.optim.SGD(m.parameters(), lr=0.1), "fp32", accumulate=2) for m in (first, second)]
    steppers[0].step(lambda: first(X).sum())
    steppers[1].load_state_dict(steppers[0].state_dict())
    reports = [
        s.step(lambda m=m: m(X).square().mean()).to_dict() for s, m in zip(steppers, (first, second), strict=True)
    ]
    norms = [report.pop("grad_norm") for report in reports]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)  # summed in fp32, in the order of the parts
    assert reports[0] == reports[1]
    assert_same(dict(first.named_parameters()), dict(second.named_parameters()))


def test_a_window_that_was_saved_is_undone_to_where_it_began():
    """The statistics of the window's start travel too, or a skip after resuming could not put them back."""
    stepper = make("fp32")
    for step in range(3):
        micro_batch(stepper, step)
    before = copy.deepcopy(stepper.model.state_dict())
    micro_batch(stepper, 3)
    other = load(make("fp32", seed=5), save(stepper))
    micro_batch(other, 4, bad=(4,))
    assert not micro_batch(other, 5).applied
    assert_same(dict(other.model.state_dict()), dict(before))


def test_a_longer_window_than_this_run_has_ends_at_once():
    stepper = make("fp32", accumulate=6)
    for step in range(4):
        assert micro_batch(stepper, step) is None
    other = load(make("fp32", accumulate=2), save(stepper))
    assert micro_batch(other, 4).step == 1
    assert micro_batch(other, 5) is None
    assert micro_batch(other, 6).step == 2


def test_loading_gives_up_the_window_that_was_open():
    stepper, other = make("bf16"), make("bf16")
    state = stepper.state_dict()
    micro_batch(other, 7)
    other.load_state_dict(state)
    assert all(p.grad is None for p in other.model.parameters())
    assert other.flush() is None
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


# --- promotion -------------------------------------------------------------------------------------------------------


class Hot(nn.Module):
    """The gradient of ``hot.weight`` is beyond fp16 at any scale, and no trouble for fp32."""

    def __init__(self):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.body, self.hot = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            self.hot.weight.fill_(2.0**-13)

    def forward(self, x):
        return self.hot(self.body(x).tanh() * 2.0**13).sum(1)


def hot_stepper(policy="fp16 on_exhausted=promote scale.init=2"):
    model = Hot()
    return Stepper(model, torch.optim.SGD(model.parameters(), lr=1e-13), policy, accumulate=2)


def hot_batch(stepper, step):
    return stepper.step(lambda: (stepper.model(X.roll(step, 0)).float() - 10).square().sum())


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_promotion_is_part_of_the_state(stop):
    whole = hot_stepper()
    file, reports = None, []
    for step in range(6):
        if step == stop:
            file = save(whole)
        reports.append(hot_batch(whole, step))
    resumed = load(hot_stepper(), file)
    assert resumed.policy == whole.policy
    assert resumed.info == whole.info
    for step in range(stop, 6):
        report = hot_batch(resumed, step)
        assert (report and report.to_dict()) == (reports[step] and reports[step].to_dict())
    assert_same(everything(resumed), everything(whole))


def test_loading_a_promotion_twice_adds_one_rule():
    whole = hot_stepper()
    hot_batch(whole, 0)
    state = whole.state_dict()
    assert state["policy"] == "fp16 module:hot=fp32 on_exhausted=promote scale.init=2"
    whole.load_state_dict(state)
    assert whole.policy.modules == (("hot", "fp32"),)


def test_a_promotion_of_a_module_that_is_not_there_is_refused():
    state = hot_stepper().state_dict() | {"promoted": ["nowhere"]}
    with pytest.raises(HalfstepError, match="'nowhere': no module"):
        hot_stepper().load_state_dict(state)


# --- foreign states --------------------------------------------------------------------------------------------------


def other_model_state():
    model = nn.Linear(3, 1)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", accumulate=2)
    stepper.step(lambda: model(torch.ones(1, 3)).sum())
    return stepper.state_dict()


def without(*path):
    state = make("fp32").state_dict()
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return state


FOREIGN = {
    "empty": (dict, "written by something else"),
    "nothing": (lambda: None, "written by something else"),
    "a list": (lambda: [1, 2], "written by something else"),
    "of GradScaler": (lambda: torch.amp.GradScaler("cpu").state_dict(), "written by something else"),
    "of an optimizer": (lambda: make("fp32").optimizer.state_dict(), "written by something else"),
    "of a scale": (lambda: make("fp32").scale.state_dict(), "written by something else"),
    "without a scale": (lambda: without("scale"), "written by something else"),
    "without the unit": (lambda: without("unit"), "written by something else"),
    "without gradients": (lambda: without("window", "gradients"), "written by something else"),
    "with more": (
        lambda: make("fp32").state_dict() | {"window": make("fp32").state_dict()["window"] | {"more": 1}},
        "written by something else",
    ),
    "of another kind of scale": (lambda: make("fp16").state_dict(), "the state of a dynamic loss scale.*scale=none"),
    "of another model": (other_model_state, r"a saved gradient 'weight' of shape \(1, 3\)"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_state_is_refused_and_changes_nothing(name):
    give, message = FOREIGN[name]
    stepper = make("fp32")
    for step in range(4):
        micro_batch(stepper, step)
    before = copy.deepcopy(everything(stepper))
    with pytest.raises(HalfstepError, match=message):
        stepper.load_state_dict(give())
    assert_same(everything(stepper), before)
    micro_batch(stepper, 4)
    assert micro_batch(stepper, 5).applied


def test_the_state_of_a_window_names_every_gradient():
    model, extra = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stepper = Stepper(model, optimizer, "fp32", accumulate=2)
    optimizer.add_param_group({"params": [extra]})
    stepper.step(lambda: (model(torch.ones(1, 2)) * extra).sum())
    with pytest.raises(HalfstepError, match="a parameter that the model does not have"):
        stepper.state_dict()
    stepper.flush()
    assert stepper.state_dict()["window"]["gradients"] == {}
