"""Optimizers that evaluate the loss themselves: LBFGS, and sharpness-aware ones with their two passes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from reference.loop import Gate, assert_same
from reference.nets import CPU
from torch import nn

from halfstep.closure import NonFiniteEvaluation, needs_closure, step_by_closure
from halfstep.errors import HalfstepError, ScaleExhausted
from halfstep.region import Region
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")

X = torch.linspace(-2, 2, 192).reshape(24, 8).sin()
Y = X.mean(1, keepdim=True) + 0.5
LBFGS = {
    "plain": {"lr": 0.05, "max_iter": 4},
    "wolfe": {"lr": 0.5, "max_iter": 6, "history_size": 5, "line_search_fn": "strong_wolfe"},
}


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al. 2021, algorithm 1), in the form that most copies of it have."""

    def __init__(self, params, base, rho=0.05, **settings):
        super().__init__(params, dict(rho=rho, **settings))
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    def first_step(self):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old"] = p.data.clone()
                    p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
                    p.grad = None

    def second_step(self):
        for p, state in self.state.items():
            if "old" in state:
                p.data = state["old"]
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "needs a closure"
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


def sgd(parameters):
    return Sam(parameters, torch.optim.SGD, lr=0.05, momentum=0.9)


def adamw(parameters):
    return Sam(parameters, torch.optim.AdamW, lr=0.01)


def adamw_fused(parameters):
    return Sam(parameters, torch.optim.AdamW, lr=0.01, fused=True)


def lbfgs(**settings):
    return lambda parameters: torch.optim.LBFGS(parameters, **settings)


OPTIMIZERS = {name: lbfgs(**settings) for name, settings in LBFGS.items()} | {
    "sam sgd": sgd,
    "sam adamw": adamw,
    "sam fused": adamw_fused,
}


def net(limit=None, seed=0):
    torch.default_generator.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), Gate(limit), nn.Linear(16, 1))


def loss_of(model, step=0, factor=1.0):
    return (model(X.roll(step, 0)).float() - Y.roll(step, 0)).square().mean() * factor


def make(optimizer, policy, model=None, **kwargs):
    model = net() if model is None else model
    return Stepper(model, OPTIMIZERS[optimizer](model.parameters()), policy, hardware=CPU, **kwargs)


def state_of(stepper):
    optimizer = stepper.optimizer
    inner = getattr(optimizer, "base_optimizer", optimizer)
    state = {"outer": optimizer.state_dict()["state"], "inner": inner.state_dict()["state"]}
    return copy.deepcopy([[p.detach() for p in stepper.model.parameters()], state])


def by_hand(model, optimizer, policy, num_steps, max_norm=None, scale=1.0):
    """The loop written out: each evaluation has its scaled backward pass, is divided by the scale, and clipped.

    Clipping divides as the step does; torch multiplies with the reciprocal, which rounds once more.
    """
    region = Region(model, policy, CPU)
    losses, norms = [], []
    for step in range(num_steps):

        def closure(step=step):
            optimizer.zero_grad()
            with region:
                loss = loss_of(model, step)
            with region.backward():
                (loss * scale).backward()
            for p in model.parameters():
                p.grad /= scale
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            if max_norm is not None:
                for p in model.parameters():
                    p.grad /= ((norm + 1e-6) / max_norm).clamp(min=1.0)
            losses.append(loss.item())
            norms.append(norm.item())
            return loss

        if isinstance(optimizer, Sam):
            closure()
        optimizer.step(closure)
    return losses, norms


# --- the same bits as the loop written by hand -----------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16 scale.init=1024", "fp16 on_overflow=skip scale.init=1024"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_is_the_loop_written_by_hand(optimizer, policy, max_norm):
    """Dropout draws a new mask in each evaluation, in both; a scale of a power of two rounds nothing."""
    stepper = make(optimizer, policy, max_norm=max_norm)
    torch.default_generator.manual_seed(5)
    reports = [stepper.step(lambda s=step: loss_of(stepper.model, s)) for step in range(4)]
    model = net()
    twin = OPTIMIZERS[optimizer](model.parameters())
    torch.default_generator.manual_seed(5)
    scale = 1024.0 if "fp16" in policy else 1.0
    losses, norms = by_hand(model, twin, policy, 4, max_norm, scale)
    for p, other in zip(stepper.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, other)
    assert_same(stepper.optimizer.state_dict()["state"], twin.state_dict()["state"])
    assert all(report.applied and report.num_replays == 0 and report.nonfinite_share == 0 for report in reports)
    assert (reports[0].loss, reports[0].scale) == (losses[0], scale)
    # torch's norm of norms and ours add the squares alike; the twin divides before it, which a power of two allows.
    assert reports[0].grad_norm == norms[0]
    if optimizer != "plain":  # without a line search, LBFGS takes the noise of dropout for curvature
        assert reports[-1].loss < reports[0].loss


def test_lbfgs_under_fp32_is_the_loop_of_torchs_manual():
    """Nothing of ours in the twin: zero_grad, loss, backward."""
    stepper = make("wolfe", "fp32")
    model = net()
    twin = OPTIMIZERS["wolfe"](model.parameters())
    for each in (stepper.model, model):
        each[2].p = 0.0
    for step in range(6):

        def closure(step=step):
            twin.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        twin.step(closure)
        stepper.step(lambda s=step: loss_of(stepper.model, s))
    for p, other in zip(stepper.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, other)
    assert stepper.optimizer.state_dict()["state"][0]["func_evals"] == twin.state_dict()["state"][0]["func_evals"] > 20


def test_lbfgs_sees_a_loss_in_fp64_with_all_its_digits():
    results = []
    for ours in (True, False):
        model = net().double()
        model[2].p = 0.0
        optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
        seen = []

        def loss(model=model):
            return (model(X.double()) - Y.double()).square().mean()

        def closure(optimizer=optimizer, loss=loss, seen=seen):
            optimizer.zero_grad()
            value = loss()
            value.backward()
            seen.append(value.item())
            return value

        if ours:
            stepper = Stepper(model, optimizer, "fp32", hardware=CPU)
            for _ in range(5):
                report = stepper.step(loss)
        else:
            for _ in range(5):
                seen.clear()
                optimizer.step(closure)
            assert report.loss == seen[0]
        results.append([p.detach().clone() for p in model.parameters()])
    assert_same(*results)


def test_a_sum_and_its_count_are_the_mean():
    steppers = [make("wolfe", "fp16 scale.init=1024") for _ in range(2)]
    for stepper in steppers:
        stepper.model[2].p = 0.0
    for step in range(4):
        mean = steppers[0].step(lambda s=step: loss_of(steppers[0].model, s))
        total = steppers[1].step(lambda s=step: (loss_of(steppers[1].model, s, 16.0), torch.tensor(16)))
        assert mean.loss == total.loss
        assert mean.grad_norm == total.grad_norm
    assert_same(state_of(steppers[0]), state_of(steppers[1]))


def test_an_evaluation_that_the_optimizer_begins_with_is_not_run_twice():
    stepper, calls = make("plain", "bf16"), []
    stepper.step(lambda: calls.append(1) or loss_of(stepper.model))
    assert len(calls) == stepper.optimizer.state_dict()["state"][0]["func_evals"] == 4
    stepper, calls = make("sam sgd", "bf16"), []
    stepper.step(lambda: calls.append(1) or loss_of(stepper.model))
    assert len(calls) == 2


# --- overflow: the evaluation runs again -----------------------------------------------------------------------------


@pytest.mark.parametrize("where", range(4))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_evaluation_that_overflows_runs_again_and_nothing_shows_but_the_scale(optimizer, where):
    """The gate lets no gradient above its limit pass in one evaluation, so that it takes two halvings."""

    def run(scale, limited):
        stepper = make(optimizer, f"fp16 scale.init={scale}", max_norm=0.3)
        gate, calls, reports = stepper.model[3], [], []

        def closure(step):
            # The masks of dropout count the evaluations: a replay draws the same one.
            loss = loss_of(stepper.model, step)
            calls.append(1)
            gate.limit = limit if limited and len(calls) - 1 in range(where, where + 3) else None
            return loss

        limit = 0.0
        if limited:
            probe = run(scale, False)[3]
            limit = probe[where] / 3
        torch.default_generator.manual_seed(5)
        largest = []
        gate.register_full_backward_hook(lambda *_: largest.append(gate.largest))
        for step in range(3):
            reports.append(stepper.step(lambda s=step: closure(s)))
        return stepper, reports, len(calls), largest

    stepper, reports, num_calls, _ = run(2**14, True)
    twin, expected, expected_calls, _ = run(2**12, False)
    assert sum(report.num_replays for report in reports) == num_calls - expected_calls == 2
    assert all(report.applied for report in reports)
    assert stepper.scale.value.item() == 2.0**12
    assert_same(state_of(stepper), state_of(twin))
    for report, other in zip(reports, expected, strict=True):
        assert (report.loss, report.grad_norm) == (other.loss, other.grad_norm)


def test_a_true_overflow_of_fp16_is_told_to_the_sinks():
    heard = []
    stepper = make("sam sgd", "fp16 scale.init=65536", sinks=[heard.append])
    report = stepper.step(lambda: loss_of(stepper.model, 0, 1000.0))
    assert report.applied
    assert report.num_replays == len(heard) - 1 > 0
    assert {(event.step, event.micro_batch) for event in heard[:-1]} == {(1, 0)}
    assert heard[-1] is report
    assert math.isfinite(report.loss)
    assert math.isfinite(report.grad_norm)


# --- an evaluation that no scale mends: the step leaves no trace -----------------------------------------------------


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16 scale.init=1024", "fp16 on_overflow=skip scale.init=1024"])
@pytest.mark.parametrize("what", ["output", "gradient"])
@pytest.mark.parametrize("which", [0, 1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_with_an_evaluation_that_is_not_finite_is_undone(optimizer, which, what, policy):
    if optimizer.startswith("sam") and which == 3:
        pytest.skip("it has two evaluations")
    advanced = []
    stepper = make(optimizer, policy, scheduler=None, on_applied=advanced.append)
    gate = stepper.model[3]
    for step in range(2):
        stepper.step(lambda s=step: loss_of(stepper.model, s))
    before, scale = state_of(stepper), stepper.scale.value.item()
    seen = []

    def closure():
        if not seen or seen[-1] != "bad":  # a replay of the bad one is bad as well
            seen.append("bad" if len(seen) == which else "good")
        gate.where = what if seen[-1] == "bad" else "nowhere"
        return loss_of(stepper.model, 2)

    report = stepper.step(closure)
    gate.where = "nowhere"
    assert (report.applied, report.step) == (False, 3)
    assert report.nonfinite_share > 0
    assert ("no loss scale mends" in report.reason) == (what == "output")
    assert_same(state_of(stepper), before)
    assert len(advanced) == 2
    assert all(p.grad is None for p in stepper.model.parameters())
    assert stepper.scale.value.item() == (scale / 2 if "fp16" in policy else 1.0)
    # The next one is as if it had never been.
    twin = make(optimizer, policy)
    for step in range(2):
        twin.step(lambda s=step: loss_of(twin.model, s))
    for each in (stepper, twin):
        torch.default_generator.manual_seed(9)
        assert each.step(lambda each=each: loss_of(each.model, 3)).applied
    assert_same(state_of(stepper), state_of(twin))


@pytest.mark.parametrize("where", ["output", "gradient"])
@pytest.mark.parametrize("policy", ["bf16", "fp16 scale.init=1024"])
@pytest.mark.parametrize("raises", [KeyboardInterrupt, RuntimeError])
def test_an_exception_in_the_second_evaluation_undoes_the_step(raises, policy, where):
    """A sharpness-aware step that stops in between has its perturbation in the weights."""
    stepper, calls = make("sam sgd", policy), []
    stepper.step(lambda: loss_of(stepper.model))
    before = state_of(stepper)
    gate = stepper.model[3]

    def closure():
        calls.append(1)
        if len(calls) == 2:
            gate.where, gate.raises = where, raises
        return loss_of(stepper.model)

    with pytest.raises(raises):
        stepper.step(closure)
    gate.where, gate.raises = "nowhere", None
    assert_same(state_of(stepper), before)
    assert all(p.grad is None for p in stepper.model.parameters())
    assert stepper.step(lambda: loss_of(stepper.model)).applied


def test_running_statistics_count_each_evaluation_once_and_none_of_an_undone_step():
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Gate(), nn.Linear(8, 1))
    stepper = Stepper(model, sgd(model.parameters()), "fp16 scale.init=65536", hardware=CPU)
    report = stepper.step(lambda: loss_of(model, 0, 300.0))
    assert report.num_replays > 0
    assert model[1].num_batches_tracked.item() == 2
    before = copy.deepcopy(model[1].state_dict())
    calls = []

    def closure():
        calls.append(1)
        model[2].where = "output" if len(calls) == 2 else "nowhere"
        return loss_of(model)

    assert not stepper.step(closure).applied
    assert_same(model[1].state_dict(), before)


def test_a_scale_exhausted_in_the_second_evaluation_stops_with_the_weights_of_the_last_applied_step():
    """In a row: a step whose second evaluation is good at no scale, and one whose first is not either."""
    heard = []
    stepper = make("sam sgd", "fp16 scale.init=2", sinks=[heard.append])
    stepper.step(lambda: loss_of(stepper.model))
    before = state_of(stepper)
    gate = stepper.model[3]
    calls = []

    def closure():
        calls.append(1)
        gate.where = "gradient" if len(calls) > 1 else "nowhere"
        return loss_of(stepper.model)

    assert not stepper.step(closure).applied  # one may be a bad batch
    assert [event.step for event in heard] == [1, 2, 2]  # the replay of an evaluation belongs to its step
    with pytest.raises(
        ScaleExhausted, match=r"step 3: the gradient of 0\.weight, 0\.bias is still not finite; 3 makes"
    ):
        stepper.step(closure)
    assert_same(state_of(stepper), before)


# --- which optimizers, and what is refused ---------------------------------------------------------------------------


def test_which_optimizers_need_a_closure():
    p = [nn.Parameter(torch.ones(1))]
    assert needs_closure(torch.optim.LBFGS(p))
    assert needs_closure(sgd(p))
    for plain in (torch.optim.SGD(p), torch.optim.AdamW(p, fused=True), torch.optim.Adagrad(p)):
        assert not needs_closure(plain)


def test_an_optimizer_that_hides_its_need_is_told_to_get_one():
    class Quiet(torch.optim.SGD):
        def step(self, closure=None):
            assert closure is not None
            loss = closure()
            super().step()
            return loss

    model, calls = net(), []
    optimizer = Quiet(model.parameters(), lr=0.1)
    stepper = Stepper(model, optimizer, "bf16", passes_closure=True, hardware=CPU)
    assert stepper.step(lambda: calls.append(1) or loss_of(model)).applied
    assert len(calls) == 1  # the one that was there already


def test_an_ordinary_optimizer_may_be_passed_one_and_steps_the_same():
    results = []
    for passes in (True, None):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        stepper = Stepper(model, optimizer, "fp16 scale.init=1024", passes_closure=passes, max_norm=0.1, hardware=CPU)
        for step in range(3):
            stepper.step(lambda s=step, m=model: loss_of(m, s))
        results.append(state_of(stepper))
    assert_same(*results)


def test_what_is_refused():
    with pytest.raises(HalfstepError, match=r"accumulate=2 with LBFGS: .* Use accumulate=1"):
        make("plain", "fp32", accumulate=2)
    with pytest.raises(HalfstepError, match=r"master=split16 with LBFGS: .* Leave master out"):
        make("plain", "bf16 master=split16")
    stepper = make("plain", "fp32")
    with pytest.raises(HalfstepError, match=r"without a closure and with LBFGS: .* Use stepper.step"):
        stepper.forward()
    assert stepper.flush() is None


# --- a step by itself ------------------------------------------------------------------------------------------------


class Scripted(torch.optim.Optimizer):
    """A step that is what a test wants of it, on one parameter whose gradient is there."""

    def __init__(self, script):
        parameter = nn.Parameter(torch.ones(2))
        super().__init__([parameter], {"lr": 0.1})
        self.parameter, self.script = parameter, script
        self.inner = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
        parameter.grad = torch.full((2,), 0.5)

    @torch.no_grad()
    def step(self, closure):
        return self.script(self, closure)


def evaluations(script):
    """How often a step with this script evaluates, and what it was given."""
    optimizer, given, num = Scripted(lambda o, closure: script(o, lambda: given.append(closure()))), [], []

    def evaluate():
        assert torch.is_grad_enabled()
        num.append(1)
        optimizer.parameter.grad = torch.full((2,), 0.25)
        return torch.tensor(2.0)

    assert step_by_closure(optimizer, torch.tensor(1.0), evaluate) is None
    assert [value.item() for value in given] == [1.0] * (len(given) - len(num)) + [2.0] * len(num)
    return len(num)


def test_what_is_there_already_is_given_once():
    assert evaluations(lambda o, closure: closure()) == 0
    assert evaluations(lambda o, closure: (closure(), closure())) == 1


def test_an_evaluation_is_due_after_anything_was_changed():
    assert evaluations(lambda o, closure: (o.parameter.grad.mul_(0.5), closure())) == 1
    assert evaluations(lambda o, closure: (o.parameter.add_(1.0), closure())) == 1
    assert evaluations(lambda o, closure: (o.parameter.data.add_(1.0), closure())) == 1  # no version counts it
    assert evaluations(lambda o, closure: (setattr(o.parameter, "grad", None), closure())) == 1


def test_what_a_step_did_before_an_evaluation_that_failed_is_undone():
    """Weights, its own state and settings, and those of an optimizer inside it."""

    def script(optimizer, closure):
        optimizer.inner.step()
        optimizer.state[optimizer.parameter]["steps"].add_(1)
        optimizer.state[optimizer.parameter]["more"] = 1
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.inner.param_groups[0]["lr"] = 3.0
        closure()

    def evaluate():
        raise failure

    failure, optimizer = NonFiniteEvaluation("why"), Scripted(script)
    optimizer.inner.step()
    optimizer.state[optimizer.parameter]["steps"] = torch.zeros(())
    before = copy.deepcopy([optimizer.state_dict(), optimizer.inner.state_dict(), optimizer.parameter.detach()])
    assert step_by_closure(optimizer, torch.tensor(1.0), evaluate) is failure
    assert_same([optimizer.state_dict(), optimizer.inner.state_dict(), optimizer.parameter.detach()], before)


def test_the_state_in_between_resumes_to_the_bit():
    steppers = [make("wolfe", "fp16 scale.init=1024 scale.interval=2") for _ in range(2)]
    for stepper in steppers:
        stepper.model[2].p = 0.0
    for step in range(3):
        steppers[0].step(lambda s=step: loss_of(steppers[0].model, s))
    steppers[1].model.load_state_dict(steppers[0].model.state_dict())
    steppers[1].optimizer.load_state_dict(copy.deepcopy(steppers[0].optimizer.state_dict()))
    steppers[1].load_state_dict(steppers[0].state_dict())
    for stepper in steppers:
        report = stepper.step(lambda s=stepper: loss_of(s.model, 7))
    assert report.step == 4
    assert_same(state_of(steppers[0]), state_of(steppers[1]))
