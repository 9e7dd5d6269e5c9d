"""Self-healing: a module that fp16 cannot hold goes on in fp32, no batch is lost, and the line to keep is said."""

from __future__ import annotations

import math

import pytest
import torch
from reference.loop import Gate, assert_same
from reference.norm_net import OPTIMIZERS, X, Y
from torch import nn

from halfstep.compare.run import compare
from halfstep.errors import HalfstepError, ScaleExhausted
from halfstep.events import Overflow, Promotion, StepReport
from halfstep.policy import Policy
from halfstep.source import load
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")


class Net(nn.Module):
    """``sums`` are so many Grams in a row, of parts that dropout and BatchNorm feed."""

    def __init__(self, num=1):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.sums = nn.ModuleList(Scaled() for _ in range(num))
        self.head, self.gate = nn.Linear(8, 1), Gate()

    def forward(self, x):
        x = self.body(x)
        for part in self.sums:
            x = part(x)
        return self.head(self.gate(x))


class Scaled(nn.Module):
    """(W x) / 2^20 with a W of 2^20: finite in fp32, inf in fp16 before the division."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return (self.up(x) * 2.0**20) * 2.0**-20


def loss_of(model, x=X):
    return (model(x).float() - Y).square().mean()


def make(model, policy="fp16", optimizer="adamw", **kwargs):
    events = []
    kwargs = {"on_exhausted": "promote", "sinks": [events.append], **kwargs}
    return Stepper(model, OPTIMIZERS[optimizer](model.parameters()), policy, **kwargs), events


def promotions(events):
    return [e for e in events if isinstance(e, Promotion)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_forward_fault_is_healed_within_its_micro_batch(accumulate, optimizer):
    """No window is lost, the scale does not fall for it, and it does what the policy line does from the start."""
    torch.manual_seed(1)
    stepper, events = make(Net(), "fp16 scale.init=256", optimizer, accumulate=accumulate, max_norm=1.0)
    state = torch.get_rng_state()
    reports = [stepper.step(lambda: loss_of(stepper.model)) for _ in range(4 * accumulate)]
    reports = [report for report in reports if report]
    assert [report.applied for report in reports] == [True] * 4
    assert (reports[0].scale, reports[0].num_replays) == (256.0, 1)
    (event,) = promotions(events)
    assert event.step == 1
    assert event.module == "sums.0"
    assert event.reason == "sums.0 makes it (inf) in the forward pass"
    assert event.policy == str(stepper.policy) == "fp16 module:sums.0=fp32 on_exhausted=promote scale.init=256"
    assert stepper.info.effective == event.policy
    assert event.to_dict() == {"step": 1, "module": "sums.0", "policy": event.policy, "reason": event.reason}

    torch.manual_seed(1)
    twin, _ = make(Net(), event.policy, optimizer, accumulate=accumulate, max_norm=1.0)
    torch.set_rng_state(state)
    expected = [twin.step(lambda: loss_of(twin.model)) for _ in range(4 * accumulate)]
    assert [r.loss for r in reports] == [r.loss for r in expected if r]
    assert_same(stepper.model.state_dict(), twin.model.state_dict())


def test_events_come_in_the_order_of_what_happens():
    stepper, events = make(Net(), "fp16 scale.init=256")
    stepper.step(lambda: loss_of(stepper.model))
    assert [type(e) for e in events] == [Promotion, Overflow, StepReport]


def test_several_modules_are_promoted_together_and_only_if_that_helps():
    stepper, events = make(Net(3), "fp16 scale.init=256")
    assert stepper.step(lambda: loss_of(stepper.model)).applied
    assert [e.module for e in promotions(events)] == ["sums.0", "sums.1", "sums.2"]
    assert [str(e.policy).count("=fp32") for e in promotions(events)] == [1, 2, 3]
    assert promotions(events)[-1].policy == str(stepper.policy)


def test_a_gradient_that_a_lower_scale_mends_promotes_nobody():
    """Once the loss is finite, the gradient is not yet, at this scale: that is for a replay."""
    stepper, events = make(Net(), "fp16 scale.init=16777216")
    report = stepper.step(lambda: loss_of(stepper.model))
    assert report.applied
    assert report.num_replays > 1
    assert [e.module for e in promotions(events)] == ["sums.0"]


def test_a_module_that_fp32_does_not_heal_stays_as_it_was():
    """Two are at fault, and the second is in fp32 as well: none is promoted, and the batch is skipped as ever."""
    model = Net()
    model.gate.where, model.gate.value = "output", math.nan
    stepper, events = make(model, "fp16 scale.init=256")
    report = stepper.step(lambda: loss_of(model))
    assert (report.applied, report.reason[:15]) == (False, "the loss is nan")
    assert promotions(events) == []
    assert str(stepper.policy) == "fp16 on_exhausted=promote scale.init=256"
    assert stepper.scale.value == 128.0
    model.gate.where = "nowhere"
    assert stepper.step(lambda: loss_of(model)).applied
    assert len(promotions(events)) == 1


def test_a_bad_batch_promotes_nobody():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    stepper, events = make(model, "fp16 scale.init=4")
    x = X.clone()
    x[0, 0] = math.nan
    assert not stepper.step(lambda: loss_of(model, x)).applied
    assert promotions(events) == []
    assert stepper.step(lambda: loss_of(model)).applied


def test_a_finite_run_promotes_nobody_and_replays_as_ever():
    model = nn.Sequential(nn.Linear(8, 8), Gate(16.0), nn.Linear(8, 1))
    stepper, events = make(model)
    report = stepper.step(lambda: loss_of(model))
    assert report.applied
    assert report.num_replays > 0
    assert promotions(events) == []


@pytest.mark.parametrize("layout", ["split16", "copy", "kahan"])
def test_a_module_with_16_bit_weights_is_widened_as_it_is_promoted(layout):
    stepper, events = make(Net(), f"fp16 scale.init=256 master={layout}")
    weights = {name: weight.clone() for name, weight in stepper.weights()}
    assert stepper.model.sums[0].up.weight.dtype == torch.float16
    stepper.optimizer.param_groups[0]["lr"] = 0.0
    stepper.optimizer.param_groups[0]["weight_decay"] = 0.0
    assert stepper.step(lambda: loss_of(stepper.model)).applied
    assert [e.module for e in promotions(events)] == ["sums.0"]
    assert stepper.model.sums[0].up.weight.dtype == torch.float32
    assert stepper.model.head.weight.dtype == torch.float16
    assert_same({name: weight.clone() for name, weight in stepper.weights()}, weights)


def test_a_resumed_run_keeps_its_promotions_and_says_nothing_again():
    stepper, _ = make(Net(), "fp16 scale.init=256")
    stepper.step(lambda: loss_of(stepper.model))
    other, events = make(Net(), "fp16 scale.init=256")
    other.model.load_state_dict(stepper.model.state_dict())
    other.load_state_dict(stepper.state_dict())
    assert str(other.policy) == str(stepper.policy)
    assert other.step(lambda: loss_of(other.model)).num_replays == 0
    assert promotions(events) == []


def test_a_name_with_brackets_is_promoted_once():
    model = Net()
    parts = nn.ModuleDict({"a[0]": model.sums[0]})
    model.sums, model.forward = parts, lambda x: model.head(parts["a[0]"](model.body(x)))
    stepper, events = make(model, "fp16 scale.init=256")
    for _ in range(3):
        assert stepper.step(lambda: loss_of(model)).applied
    assert [e.policy for e in promotions(events)] == [
        "fp16 module:sums.a[[]0]=fp32 on_exhausted=promote scale.init=256"
    ]


def test_the_exhausted_scale_of_a_skipping_run_promotes_with_an_event():
    stepper, events = make(Net(), "fp16 on_overflow=skip scale.init=2")
    applied = [stepper.step(lambda: loss_of(stepper.model)).applied for _ in range(4)]
    assert applied == [False, False, True, True]
    assert [(e.step, e.module) for e in promotions(events)] == [(2, "sums.0")]


def test_an_lbfgs_is_healed_in_its_evaluations():
    model = Net()
    model.body[2].p = 0.0
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    stepper = Stepper(model, optimizer, "fp16 scale.init=256", on_exhausted="promote")
    assert stepper.step(lambda: loss_of(model)).applied
    assert stepper.policy.modules == (("sums.0", "fp32"),)


# --- the setting ---------------------------------------------------------------------------------------------------


def test_the_keyword_overrides_the_policy_and_its_text_shows_it():
    model = nn.Linear(8, 1)
    stepper, _ = make(model, "fp16")
    assert stepper.info.requested == "fp16 on_exhausted=promote"
    stepper, _ = make(model, Policy("fp16", on_exhausted="promote"), on_exhausted="stop")
    assert str(stepper.policy) == "fp16"
    stepper, _ = make(model, "fp16 on_exhausted=promote", on_exhausted=None)
    assert stepper.policy.on_exhausted == "promote"
    with pytest.raises(HalfstepError, match="on_exhausted 'heal': not a value that it can take"):
        make(model, on_exhausted="heal")


def test_with_stop_nothing_is_promoted():
    stepper, events = make(Net(), "fp16 scale.init=2", on_exhausted="stop")
    with pytest.raises(ScaleExhausted, match=r"Keep that module in fp32 \(policy 'fp16 .*module:sums.0=fp32'\)"):  # noqa: PT012
        for _ in range(4):
            stepper.step(lambda: loss_of(stepper.model))
    assert promotions(events) == []


# --- fragile -------------------------------------------------------------------------------------------------------


def test_fragile_trains_to_the_end_without_losing_a_step():
    _, trials = compare(load("fragile"), ["fp32", "fp16 on_exhausted=promote"], seeds=2, steps=12)
    exact, healed = (
        [trial for trial in trials if trial.policy == policy] for policy in ("fp32", "fp16 on_exhausted=promote")
    )
    for trial, twin in zip(healed, exact, strict=True):
        assert (trial.stopped, trial.steps_skipped) == (None, 0)
        assert trial.effective == "fp16 module:pool=fp32 on_exhausted=promote"
        assert trial.final_loss == pytest.approx(twin.final_loss, rel=1e-2)  # fp16 has three digits


@pytest.mark.slow
def test_fragile_is_equivalent_to_fp32_over_its_own_seeds_and_steps():
    source = load("fragile")
    report, _ = compare(
        source, ["fp32", "fp16 on_exhausted=promote"], seeds=source.default_seeds, steps=source.default_steps
    )
    assert [policy.verdict.word for policy in report.policies] == ["reference", "equivalent"]
