"""Replay: the micro-batch that overflowed runs again at a lower scale, and nothing shows but the lower scale."""

from __future__ import annotations

import copy
import itertools
import math
import weakref

import pytest
import torch
from reference.loop import Gate
from torch import nn

from halfstep.errors import ScaleExhausted
from halfstep.events import Overflow, StepReport
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")

X = torch.linspace(-2, 2, 256).reshape(32, 8).sin()
Y = X.mean(1, keepdim=True) + 0.5
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


class Net(nn.Module):
    """``gate`` lets no gradient above its limit through to ``body``; that of ``head`` passes always."""

    def __init__(self, limit=None):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.gate, self.drop, self.head = Gate(limit), nn.Dropout(0.3), nn.Linear(16, 1)
        self.masks = []
        self.drop.register_forward_hook(lambda module, args, out: self.masks.append(out.detach() == 0))

    def forward(self, x):
        return self.head(self.drop(self.gate(self.body(x))))


def loss_of(model, step, factor=1.0):
    x, y = X.roll(5 * step, 0)[:16], Y.roll(5 * step, 0)[:16]
    return (model(x).float() - y).square().mean() * factor


def make(scale, limit=None, accumulate=4, optimizer="adamw", policy="fp16", model=None, **kwargs):
    model = Net(limit) if model is None else model
    policy = f"{policy} scale.init={scale:g}"
    kwargs = {"accumulate": accumulate, "keep_casts": True, **kwargs}
    return Stepper(model, OPTIMIZERS[optimizer](model.parameters()), policy, **kwargs)


def run(stepper, factors, seed=3):
    """One micro-batch for each factor of the loss; returns the reports."""
    torch.default_generator.manual_seed(seed)
    model = stepper.model
    reports = [stepper.step(lambda s=s, f=f: loss_of(model, s, f)) for s, f in enumerate(factors)]
    return [report for report in reports if report is not None]


def state_of(stepper):
    return copy.deepcopy([*stepper.model.state_dict().values()])


def assert_same_bits(left, right):
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


# --- as if it had been the lower scale from the start --------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("where", [0, 1, 3])
def test_a_window_with_an_overflow_ends_as_one_at_the_lower_scale(where, max_norm, optimizer):
    """A true fp16 overflow: one loss is 2^6 times larger, and its gradient leaves fp16 at the first scale.

    Scaling by a power of two rounds nothing, so that every bit is the same.
    """
    factors = [1.0] * 8
    factors[where] = 64.0
    stepper = make(2.0**16, optimizer=optimizer, max_norm=max_norm)
    reports = run(stepper, factors)
    assert reports[0].num_replays > 0
    assert reports[0].scale < 2.0**16
    assert all(report.applied for report in reports)
    assert reports[0].nonfinite_share == 0.0
    twin = make(reports[0].scale, optimizer=optimizer, max_norm=max_norm)
    expected = run(twin, factors)
    assert expected[0].num_replays == 0
    assert_same_bits(state_of(stepper), state_of(twin))
    names = ("loss", "grad_norm", "scale", "applied")
    for report, other in zip(reports, expected, strict=True):
        assert [getattr(report, name) for name in names] == [getattr(other, name) for name in names]


@pytest.mark.parametrize("keep_casts", [True, False])
@pytest.mark.parametrize("limit", [2.0**-3, 2.0**-6])
def test_an_overflow_of_some_parameters_alone(limit, keep_casts):
    """``body`` overflows above a limit, ``head`` never does and keeps its gradients of the higher scale.

    At a limit much lower the twin's gradients would be subnormal in fp16, where kept ones have more bits.
    """
    stepper = make(2.0**13, limit * 2.0**13, keep_casts=keep_casts)
    reports = run(stepper, [1.0, 4.0, 1.0, 8.0] * 2)
    assert sum(report.num_replays for report in reports) > 0
    twin = make(stepper.scale.value.item(), keep_casts=keep_casts)
    run(twin, [1.0, 4.0, 1.0, 8.0] * 2)
    assert_same_bits(state_of(stepper), state_of(twin))


@pytest.mark.parametrize("factors", list(itertools.product([1.0, 32.0], repeat=4)))
def test_any_set_of_micro_batches_may_overflow(factors):
    stepper = make(2.0**17)
    (report,) = run(stepper, factors)
    twin = make(report.scale)
    run(twin, factors)
    assert_same_bits(state_of(stepper), state_of(twin))
    assert (report.num_replays == 0) == (report.scale == 2.0**17)


def test_sums_and_counts_are_replayed_alike():
    results = []
    for scale in (2.0**18, 2.0**10):
        stepper = make(scale, accumulate=3)
        model = stepper.model
        torch.default_generator.manual_seed(3)
        for step, count in enumerate((12, 7, 3)):
            report = stepper.step(lambda s=step, c=count, m=model: (loss_of(m, s, c), torch.tensor(c)))
        results.append((report, state_of(stepper)))
    assert results[0][0].num_replays > 0
    assert results[1][0].num_replays == 0
    assert_same_bits(results[0][1], results[1][1])
    assert results[0][0].loss == results[1][0].loss


@pytest.mark.parametrize(("backoff", "expected"), [(0.5, 2.0**8), (0.25, 2.0**8), (2.0**-7, 2.0**4)])
def test_the_scale_goes_down_by_backoff_until_it_fits(backoff, expected):
    model = nn.Sequential(nn.Linear(8, 1), Gate(limit=300.0))
    policy = f"fp32 scale=dynamic scale.init={2**18} scale.backoff={backoff}"
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    report = stepper.step(lambda: model(X).sum())  # its gradient is the scale itself
    assert report.scale == expected
    assert report.num_replays == math.log(expected / 2**18, backoff)
    assert report.grad_norm == pytest.approx(math.hypot(*X.sum(0).tolist(), 32.0))


# --- what is kept and what is not ------------------------------------------------------------------------------------


def test_finite_gradients_are_kept_and_only_the_others_are_taken_from_the_replay():
    """The second run of an impure closure gives three times the loss; ``head`` must not see it."""

    def sgd(model, scale):
        policy = f"fp16 scale.init={scale:g} scale.backoff=0.0078125"
        return Stepper(model, torch.optim.SGD(model.parameters(), lr=1.0), policy)

    models = [Net(1.0), Net(), Net()]
    for model in models:
        model.drop.p = 0.0
    calls = []
    report = sgd(models[0], 1024).step(lambda: calls.append(1) or loss_of(models[0], 0, 3.0 ** (len(calls) - 1)))
    assert (len(calls), report.num_replays, report.scale) == (2, 1, 8.0)
    sgd(models[1], 1024).step(lambda: loss_of(models[1], 0))
    sgd(models[2], 8).step(lambda: loss_of(models[2], 0, 3.0))
    assert_same_bits(models[0].head.parameters(), models[1].head.parameters())
    assert_same_bits(models[0].body.parameters(), models[2].body.parameters())
    assert not torch.equal(models[0].head.weight, models[2].head.weight)


def test_the_closure_runs_once_a_micro_batch_and_once_a_replay():
    stepper, calls = make(2.0**18), []
    model = stepper.model
    reports = []
    for step in range(8):
        reports.append(stepper.step(lambda s=step: calls.append(s) or loss_of(model, s, 16.0 if s == 2 else 1.0)))
    replays = sum(report.num_replays for report in reports if report)
    assert replays > 0
    assert len(calls) == 8 + replays
    assert calls == sorted(calls)  # each again at once, none of the finished ones


def test_no_hook_is_left_on_a_parameter_and_those_of_the_user_run():
    stepper, seen = make(2.0**13, limit=1.0), []
    model = stepper.model
    model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    (report,) = run(stepper, [1.0] * 4)
    assert report.num_replays > 0
    assert seen == [True] * (4 + report.num_replays)
    assert sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()) == 1


# --- random state and statistics -------------------------------------------------------------------------------------


def test_dropout_draws_the_same_masks_again_and_the_stream_goes_on_as_if_nothing_had_been():
    stepper, twin = make(2.0**18), make(2.0**6)
    factors = [1.0, 16.0, 1.0, 1.0]
    (report,) = run(stepper, factors)
    stream = torch.get_rng_state()
    run(twin, factors)
    assert torch.equal(stream, torch.get_rng_state())
    masks, expected = stepper.model.masks, twin.model.masks
    assert len(expected) == 4
    assert len(masks) == 4 + report.num_replays
    # Equal neighbours are replays of one micro-batch; without them it is the twin's sequence.
    distinct = [mask for i, mask in enumerate(masks) if i == 0 or not torch.equal(mask, masks[i - 1])]
    assert_same_bits(distinct, expected)


def test_draws_of_the_closure_itself_are_the_same_again():
    stepper, drawn = make(2.0**18, accumulate=1), []
    model = stepper.model

    def closure():
        drawn.append(torch.randn(16, 8))
        return (model(X[:16] + 0.1 * drawn[-1]).float() - Y[:16]).square().mean() * 16

    report = stepper.step(closure)
    assert len(drawn) == 1 + report.num_replays > 1
    assert all(torch.equal(drawn[0], each) for each in drawn)


def test_running_statistics_count_each_batch_once():
    stepper = make(2.0**18)
    run(stepper, [16.0] * 4)
    assert stepper.model.body[1].num_batches_tracked == 4


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["bottom", "top"])
def test_there_is_at_most_one_more_gradient(where):
    """Live bytes of gradients at every moment of a window in which one micro-batch runs again several times."""
    layers = [nn.Linear(32, 32, bias=False) for _ in range(8)]
    layers.insert(1 if where == "bottom" else 8, Gate())
    model = nn.Sequential(*layers)
    stepper = make(2.0**10, accumulate=3, model=model)
    live, peak = [], 0

    def count(p=None):
        nonlocal live, peak
        if p is not None:
            live.append(weakref.ref(p.grad))
        live = [ref for ref in live if ref() is not None]
        peak = max(peak, sum(ref().nbytes for ref in live))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(count)
    total = sum(p.nbytes for p in model.parameters())
    peaks = []
    for step in range(3):
        gate = next(layer for layer in layers if isinstance(layer, Gate))
        gate.limit = gate.largest / 7 if step == 2 else None
        peak = 0
        report = stepper.step(lambda: count() or model(X[:, :8].repeat(1, 4)).float().square().mean())
        peaks.append(peak / total)
    assert report.num_replays >= 2
    assert peaks[0] <= 1.0
    # One of the finished micro-batches, one of this one, and the one tensor that is dropped as soon as it is made.
    assert max(peaks) <= 2.0 + 1 / 8


# --- what is told ----------------------------------------------------------------------------------------------------


def test_sinks_hear_of_each_overflow_before_the_report():
    heard = []
    stepper = make(2.0**13, accumulate=2, sinks=[heard.append])
    model = stepper.model
    stepper.step(lambda: loss_of(model, 0))
    stepper.step(lambda: loss_of(model, 1))
    model.gate.limit = model.gate.largest / 3
    stepper.step(lambda: loss_of(model, 1))
    model.gate.limit = model.gate.largest / 1.5
    stepper.step(lambda: loss_of(model, 1))
    kinds = [type(event) for event in heard]
    assert kinds[0] is StepReport
    assert kinds[-1] is StepReport
    overflows = [event for event in heard if isinstance(event, Overflow)]
    assert heard[-1].num_replays == len(overflows) > 0
    assert {event.step for event in overflows} == {2}
    assert overflows[0].scale == 2.0**12
    assert overflows[0].parameters == ("body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias")
    assert [event.micro_batch for event in overflows] == sorted(event.micro_batch for event in overflows)
    assert {event.micro_batch for event in overflows} == {0, 1}


def test_a_run_without_overflows_tells_of_none():
    heard = []
    run(make(2.0**8, sinks=[heard.append]), [1.0] * 8)
    assert [type(event) for event in heard] == [StepReport] * 2


def test_a_window_that_was_saved_by_a_replay_counts_as_clean():
    stepper = make(2.0**13, limit=1.0, accumulate=1, policy="fp16 scale.interval=4")
    scales = [report.scale for report in run(stepper, [1.0, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3])]
    assert scales == [scales[0]] * 4 + [scales[0] * 2] * 2


# --- what no scale mends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loss_that_is_not_finite_is_not_replayed_and_its_window_is_skipped(optimizer):
    stepper, calls = make(2.0**8, optimizer=optimizer), []
    model = stepper.model
    run(stepper, [1.0] * 4)
    before = state_of(stepper)
    for step in range(4):
        model.gate.where = "output" if step == 1 else "nowhere"
        report = stepper.step(lambda s=step: calls.append(s) or loss_of(model, s))
    assert calls == [0, 1, 2, 3]
    assert (report.applied, report.num_replays) == (False, 0)
    assert "no loss scale mends" in report.reason
    assert report.nonfinite_share > 0
    assert_same_bits(state_of(stepper), before)
    assert stepper.scale.value.item() == 2.0**7
    assert all(r.applied for r in run(stepper, [1.0] * 4))


def test_one_batch_whose_gradient_is_bad_at_every_scale_costs_one_window():
    """As the derivative of a square root at 0: no scale mends it, and the scale is not to pay for it."""
    stepper = make(2.0**5, accumulate=2)
    model = stepper.model
    before = state_of(stepper)
    for step in range(2):
        model.gate.where, model.gate.value = "gradient" if step == 1 else "nowhere", math.nan
        report = stepper.step(lambda s=step: loss_of(model, s))
    assert (report.applied, report.num_replays) == (False, 5)
    assert 0 < report.nonfinite_share < 1
    assert_same_bits(state_of(stepper), before)
    assert stepper.scale.value.item() == 2.0**4  # lowered once, as for any overflow
    model.gate.where = "nowhere"
    assert [r.applied for r in run(stepper, [1.0] * 4)] == [True, True]
    # With clean batches in between the next one is alone again, and a state that was saved between them knows.
    for bad in (True, False):
        model.gate.where = "gradient" if bad else "nowhere"
        report = stepper.step(lambda: loss_of(model, 0))
        assert stepper.state_dict()["had_hopeless"] is bad
    assert (report.applied, report.scale) == (False, 2.0**4)


def test_a_second_batch_in_a_row_whose_gradient_stays_bad_stops_with_the_sums_dropped():
    stepper = make(2.0**5)
    model = stepper.model
    before = state_of(stepper)
    stepper.step(lambda: loss_of(model, 0))
    model.gate.where, model.gate.value = "gradient", math.nan
    stepper.step(lambda: loss_of(model, 1))
    random = torch.get_rng_state()
    with pytest.raises(ScaleExhausted, match=r"gate makes it \(nan\) in the backward pass"):
        stepper.step(lambda: loss_of(model, 1))
    assert_same_bits(state_of(stepper), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    model.gate.where = "nowhere"
    assert [r.applied for r in run(stepper, [1.0] * 4)] == [True]


def test_finite_gradients_with_a_norm_beyond_fp32_run_again_all_of_them():
    """No element and no norm of one parameter is inf, only the sum of their squares."""
    model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.0), "fp32 scale=dynamic scale.init=4")
    report = stepper.step(lambda: sum(layer(torch.ones(1, 1)).sum() for layer in model) * 1.5e19 / 4)
    assert (report.applied, report.num_replays, report.scale) == (True, 1, 2.0)


# --- exceptions within a replay --------------------------------------------------------------------------------------


@pytest.mark.parametrize("raises", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["output", "gradient"])
def test_an_exception_in_the_replay_leaves_the_finished_sums_at_the_lowered_scale(where, raises):
    """``head`` had a good gradient of the interrupted micro-batch already; it must not stay in the sums."""
    stepper, twin = make(2.0**10, accumulate=2), make(2.0**9, accumulate=2)
    model = stepper.model
    model.drop.p = twin.model.drop.p = 0.0
    for each in (stepper, twin):
        each.step(lambda each=each: loss_of(each.model, 0))
    before = state_of(stepper)
    model.gate.limit = 1e-3
    calls = []

    def closure():
        calls.append(1)
        if len(calls) == 2:
            model.gate.where, model.gate.raises = where, raises
        return loss_of(model, 9)

    with pytest.raises(raises):
        stepper.step(closure)
    model.gate.where, model.gate.limit = "nowhere", None
    assert len(calls) == 2
    assert_same_bits(state_of(stepper), before)
    for p, other in zip(model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(p.grad, other.grad)
    for each in (stepper, twin):
        report = each.step(lambda each=each: loss_of(each.model, 1))
    assert report.applied
    assert_same_bits(state_of(stepper), state_of(twin))
    assert sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()) == 0


# --- skip, for comparison --------------------------------------------------------------------------------------------


def test_skip_loses_the_window_as_torch_does():
    stepper = make(2.0**18, policy="fp16 on_overflow=skip")
    before = state_of(stepper)
    (report,) = run(stepper, [1.0, 16.0, 1.0, 1.0])
    assert (report.applied, report.num_replays) == (False, 0)
    assert_same_bits(state_of(stepper), before)
    assert stepper.scale.value.item() == 2.0**17
