"""Stepper(..., explain=True): the first bad step that replay cannot mend is traced, once, and nothing else changes."""

from __future__ import annotations

import math
import sys
import types
import weakref

import pytest
import torch
from reference.loop import Gate, assert_same
from reference.norm_net import OPTIMIZERS, X, Y
from reference.reads import Reads
from torch import nn

from halfstep.diagnosis.capture import Capture
from halfstep.errors import HalfstepError, ScaleExhausted
from halfstep.events import Promotion, StepReport
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3))
        self.gate, self.head = Gate(), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.gate(self.body(x)))


def loss_of(model, factor=1.0, x=X):
    return (model(x).float() - Y).square().mean() * factor


@pytest.fixture
def traced(monkeypatch):
    """The captures that were traced, each with what running it gave, and a report that is the capture's step."""
    seen = []

    def trace_of(capture):
        assert isinstance(capture, Capture)
        seen.append((capture, capture.run(), capture.run()))
        return f"trace of step {capture.step}"

    module = types.ModuleType("trace")
    module.trace_of = trace_of
    monkeypatch.setitem(sys.modules, "halfstep.diagnosis.trace", module)
    return seen


def make(policy, model=None, optimizer="adamw fused", **kwargs):
    model = model or Net()
    events = []
    stepper = Stepper(
        model,
        OPTIMIZERS[optimizer](model.parameters()),
        policy,
        explain=True,
        sinks=[events.append],
        watch=False,  # the explanations here are no reports
        **kwargs,
    )
    return stepper, events


def spoil(model, where, value=math.nan):
    model.gate.where, model.gate.value = where, value


def window(stepper, bad=None, where="output", value=math.nan):
    """One window, whose micro-batch number ``bad`` is spoiled by its own factor or gate."""
    model, report = stepper.model, None
    for number in range(stepper.accumulate):

        def closure(number=number):
            spoil(model, where if number == bad else "nowhere", value)
            return loss_of(model, x=X.roll(number, 0))

        report = stepper.step(closure)
    return report


REPLAY = "fp16 scale.init=256"
PLAIN = ["bf16", "fp32", "fp16 on_overflow=skip scale.init=256", "fp16 scale=static scale.init=256"]


# --- which step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [REPLAY, *PLAIN])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw fused"])
def test_a_loss_that_is_not_finite_is_explained_once(policy, optimizer, traced):
    stepper, events = make(policy, optimizer=optimizer)
    assert window(stepper).applied
    assert stepper.explanation is None
    for _ in range(2):
        assert not window(stepper, bad=0).applied
    assert window(stepper).applied
    assert [(c.step, c.scale, str(c.policy)) for c, *_ in traced] == [(2, stepper_scale(policy), policy)]
    assert stepper.explanation == "trace of step 2"
    assert events.count("trace of step 2") == 1
    assert math.isnan(traced[0][1].loss)
    steps = [e.step for e in events if isinstance(e, StepReport)]
    assert steps == [1, 2, 3, 4]


def stepper_scale(policy):
    return 256.0 if "256" in policy else 1.0


@pytest.mark.parametrize("policy", ["bf16", "fp32", "fp16 scale=static scale.init=256"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_gradient_that_is_not_finite_is_explained_where_no_scale_goes_down(policy, accumulate, traced):
    stepper, _ = make(policy, accumulate=accumulate)
    window(stepper)
    window(stepper, bad=accumulate - 1, where="gradient", value=math.inf)
    ((capture, outcome, again),) = traced
    assert capture.step == 2
    assert math.isfinite(outcome.loss)
    assert not outcome.is_finite
    assert outcome.loss == again.loss


@pytest.mark.parametrize("policy", [REPLAY, *PLAIN])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_the_micro_batch_at_fault_is_found_in_its_window(bad, policy, traced):
    """Its dropout too: the captured loss is that of the run itself, without what spoils it."""
    stepper, _ = make(policy, accumulate=3)
    losses = []
    stepper.model.register_forward_hook(lambda m, args, out: losses.append(out.detach().clone()))
    window(stepper)
    del losses[:]
    window(stepper, bad=bad, where="output", value=math.inf)
    of_run = next(out for out in losses if not out.isfinite().all())
    ((capture, *_),) = traced
    capture.run()
    assert torch.equal(losses[-1], of_run)


def test_what_a_replay_mends_is_not_explained(traced):
    stepper, _ = make("fp16")
    stepper.model.gate.limit = 16.0
    report = window(stepper)
    assert report.num_replays > 0
    assert report.applied
    assert traced == []


def test_a_gradient_that_no_scale_mends_is_explained_at_the_floor_before_it_stops(traced):
    stepper, _ = make(REPLAY)
    assert not window(stepper, bad=0, where="gradient").applied
    ((capture, outcome, _),) = traced
    assert (capture.scale, capture.step) == (1.0, 1)
    assert not outcome.is_finite
    with pytest.raises(ScaleExhausted):
        window(stepper, bad=0, where="gradient")
    assert stepper.explanation == "trace of step 1"


def test_calibration_of_a_fresh_scale_is_not_explained(traced):
    """Skipped steps bring it down from 2^16, and one more each time that it has grown."""
    stepper, _ = make("fp16 on_overflow=skip scale.interval=4")
    stepper.optimizer.param_groups[0]["lr"] = stepper.model.body[2].p = 0.0  # each gradient is the same
    stepper.model.gate.limit = 2.0**8
    applied = [window(stepper).applied for _ in range(40)]
    assert not applied[0]
    assert not all(applied[-12:])  # it grows and overflows again
    assert sum(applied[-12:]) >= 8
    assert traced == []
    # The scale has settled, so that an overflow in the middle of an interval is a fault.
    while not window(stepper).applied:
        pass
    window(stepper)
    window(stepper, bad=0, where="gradient", value=math.inf)
    assert len(traced) == 1


def test_an_exhausted_scale_is_explained_before_a_skipping_run_stops(traced):
    stepper, _ = make("fp16 on_overflow=skip scale.init=4")
    with pytest.raises(ScaleExhausted):  # noqa: PT012
        for _ in range(5):
            window(stepper, bad=0, where="gradient", value=math.inf)
    ((capture, *_),) = traced
    assert (capture.step, capture.scale) == (3, 1.0)


@pytest.mark.parametrize("policy", [REPLAY, *PLAIN])
def test_a_window_that_counts_nothing_is_not_explained(policy, traced):
    stepper, _ = make(policy)
    assert not stepper.step(lambda: (loss_of(stepper.model) * 0, 0)).applied
    assert traced == []


def test_a_promotion_is_explained_too(traced):
    """With what it was before the module was promoted."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight.fill_(2.0**14)
        model[1].weight.fill_(2.0**-14)
    stepper, events = make("fp16", model, on_exhausted="promote")
    assert stepper.step(lambda: (model(X.abs()).float()).mean()).applied
    ((capture, *_),) = traced
    assert "module" not in str(capture.policy)
    assert [type(e) for e in events if not isinstance(e, StepReport)][:2] == [str, Promotion]


# --- that nothing else changes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [REPLAY, *PLAIN])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_run_goes_on_as_without_it(policy, accumulate, traced):
    steppers = [make(policy, accumulate=accumulate)[0]]
    twin = Net()
    steppers.append(Stepper(twin, OPTIMIZERS["adamw fused"](twin.parameters()), policy, accumulate=accumulate))
    reports = []
    for stepper in steppers:
        torch.manual_seed(5)
        got = [window(stepper), window(stepper, bad=0), window(stepper), window(stepper)]
        reports.append([(r.applied, r.loss, r.grad_norm) for r in got])
        reports[-1].append(torch.get_rng_state())
    assert str(reports[0][:4]) == str(reports[1][:4])
    assert torch.equal(reports[0][4], reports[1][4])
    assert_same(steppers[0].model.state_dict(), steppers[1].model.state_dict())
    assert_same(steppers[0].state_dict(), steppers[1].state_dict())
    assert len(traced) == 1


def test_a_replaying_run_pays_nothing_and_another_one_read_a_window_until_it_is_explained(traced):
    def reads(stepper):
        with Reads() as reads:
            stepper.step(lambda: loss_of(stepper.model))
        return reads.num_reads

    class Spoiler(nn.Module):
        factor = 1.0

        def forward(self, x):
            return x * self.factor

    def plain():
        return nn.Sequential(nn.Linear(8, 1), Spoiler())

    def spoiled(stepper):
        stepper.model[1].factor = math.nan
        stepper.step(lambda: loss_of(stepper.model))
        stepper.model[1].factor = 1.0

    for policy, with_it, without in (("bf16", 1, 0), ("fp32", 1, 0), (REPLAY, 1, 1)):
        stepper, _ = make(policy, plain())
        stepper.sinks = ()
        model = plain()
        other = Stepper(model, OPTIMIZERS["adamw fused"](model.parameters()), policy)
        assert (reads(stepper), reads(other)) == (with_it, without)
        spoiled(stepper)
        assert stepper.explanation
        assert reads(stepper) == without


@pytest.mark.parametrize("policy", [REPLAY, "bf16"])
def test_a_batch_lives_until_the_end_of_its_window(policy, traced):
    class Batch(torch.Tensor):
        pass

    stepper, _ = make(policy, accumulate=2)
    batches = []

    def step():
        batch = X.clone().as_subclass(Batch)
        batches.append(weakref.ref(batch))
        stepper.step(lambda: loss_of(stepper.model, x=batch.as_subclass(torch.Tensor)))

    for _ in range(2):
        step()
    assert [b() is None for b in batches] == [True, True]
    step()
    assert (batches[2]() is None) is (policy == REPLAY)


def test_an_interrupted_window_is_forgotten(traced):
    stepper, _ = make("bf16", accumulate=2)
    stepper.model.gate.where, stepper.model.gate.raises = "gradient", KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        stepper.step(lambda: loss_of(stepper.model))
    stepper.model.gate.raises = None
    assert stepper._explainer._kept == []


def test_a_diagnosis_that_fails_warns_once_and_training_goes_on(traced, monkeypatch):
    def trace_of(capture):
        raise ZeroDivisionError("of its own")

    monkeypatch.setattr(sys.modules["halfstep.diagnosis.trace"], "trace_of", trace_of)
    stepper, _ = make("bf16")
    with pytest.warns(UserWarning, match="step 1 could not be explained: ZeroDivisionError: of its own"):
        window(stepper, bad=0)
    assert not window(stepper, bad=0).applied
    assert window(stepper).applied
    assert stepper.explanation is None


def test_a_loop_without_a_closure_is_refused():
    stepper, _ = make("bf16")
    with pytest.raises(HalfstepError, match=r"a bad step is explained by running it again\. Use stepper.step"):
        stepper.forward()


def test_without_it_there_is_no_explanation():
    model = Net()
    stepper = Stepper(model, OPTIMIZERS["adamw"](model.parameters()), "bf16")
    window(stepper, bad=0)
    assert stepper.explanation is None


# --- the trace itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fp16", "fp16 on_overflow=skip", "fp16 scale=static scale.init=1"])
def test_the_explanation_names_the_module_and_what_mends_it(policy):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight.fill_(2.0**14)
        model[1].weight.fill_(2.0**-13)
    stepper, events = make(policy, model)
    stepper.step(lambda: model(X.abs()).float().mean())
    trace = stepper.explanation
    assert trace is events[0] or trace in events
    found = trace.to_dict()
    assert (found["step"], found["producer"]["module"], found["producer"]["kind"]) == (1, "0", "inf")
    # What ``0`` gives in fp32 is beyond what ``1`` takes in fp16.
    rules = {a["text"]: (a["policy"], a["result"]) for a in found["advice"]}
    assert rules["keep 0 in fp32"][1] == "does not"
    rule, result = rules["keep 0 and 1 in fp32"]
    assert result == "mends it"
    healed = Stepper(model, OPTIMIZERS["adamw"](model.parameters()), rule)
    assert math.isfinite(healed.step(lambda: model(X.abs()).float().mean()).loss)
