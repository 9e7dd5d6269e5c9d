"""What no scale mends, over ranks: skipped once by all, mended by all, or the end of the run on all in one step."""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch
from reference.loop import Gate
from reference.planted_ranks import engine_over, whole
from torch import distributed, nn

from halfstep.errors import HalfstepError, ScaleExhausted
from halfstep.events import Promotion
from halfstep.stepper import Stepper

X = torch.linspace(-2, 2, 96).reshape(12, 8).sin()


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
        self.gate, self.drop, self.head = Gate(), nn.Dropout(0.3), nn.Linear(16, 1)
        self.masks = []

    def forward(self, x):
        out = self.drop(self.gate(self.body(x)))
        self.masks.append(out.detach() == 0)
        return self.head(out)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.body, self.gate, self.head = nn.Linear(8, 16), Gate(), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.gate(self.body(x)))


class Hot(nn.Module):
    """``hot`` goes beyond fp16 whatever the scale while ``is_on``: its weight's gradient, or its output."""

    def __init__(self, where):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.body, self.hot, self.head = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 1)
        self.factors = {"weight": (2.0**13, 1.0), "output": (4.0, 2.0**-13)}[where]
        self.is_on = False
        with torch.no_grad():
            self.hot.weight.fill_(2.0**-13 if where == "weight" else 2.0**13)
            self.head.weight.fill_(1.0)

    def forward(self, x):
        before, after = self.factors
        return self.head(self.hot(self.body(x).sigmoid() * (before if self.is_on else 2.0**-6)) * after)


def run_gate(engine, policy, accumulate, faults, num_steps, loop="closure", net=None):
    """What each step did on this rank. faults: (step, micro-batch, rank) to what the gate does there.

    A fused optimizer and a net without BatchNorm: nobody has to read a verdict but who has a reason.
    """
    rank = distributed.get_rank()
    net = net or Plain()
    model = engine_over(net, engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    stepper = Stepper(model, optimizer, policy, accumulate=accumulate, watch=False)
    outcomes = []
    torch.default_generator.manual_seed(rank)
    for step in range(num_steps):
        try:
            for micro in range(accumulate):
                net.gate.where, net.gate.limit = "nowhere", None
                fault = faults.get((step, micro, rank))
                if isinstance(fault, float):
                    net.gate.limit = fault
                elif fault:
                    net.gate.where, net.gate.value = fault, math.nan
                x = X.roll(step + 3 * rank + micro, 0)[:6]
                if loop == "closure" or (loop == "mixed" and micro + 1 < accumulate):
                    report = stepper.step(lambda x=x: model(x).square().mean())
                else:
                    with stepper.forward():
                        loss = model(x).square().mean()
                    report = stepper.backward(loss)
            outcomes.append((report.applied, report.scale, report.num_replays))
        except ScaleExhausted as error:
            outcomes.append(str(error))
            break
    weights = [whole(p) for p in stepper.ranks.module.parameters()]
    return outcomes, weights, stepper.state_dict()["scale"], net


DYNAMIC = "fp32 scale=dynamic scale.init=8"


def outcomes_of(*args):
    outcomes, weights, scale, net = run_gate(*args)
    return outcomes, weights, scale, [buffer.clone() for buffer in net.buffers()]


def assert_alike(results):
    (_, weights, scale, _), (_, others, other_scale, _) = results
    assert scale == other_scale
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(weights, others, strict=True))


@pytest.mark.parametrize("fault", ["output", "gradient"])
@pytest.mark.parametrize(("engine", "micro"), [("ddp", 0), ("ddp", 1), ("fsdp", 0), ("fsdp", 1)])
def test_one_window_is_lost_by_all_and_the_scale_falls_once(world2, engine, micro, fault):
    results = world2.run(outcomes_of, engine, DYNAMIC, 2, {(1, micro, 1): fault}, 4)
    for outcomes, *_ in results:
        assert [(applied, scale) for applied, scale, _ in outcomes] == [(True, 8), (False, 8), (True, 4), (True, 4)]
    # A NaN loss is no matter of the scale. The other one is tried at 4, 2 and 1, by the rank whose it is or by all.
    tries = [outcomes[1][2] for outcomes, *_ in results]
    together = engine == "fsdp" or micro == 1
    assert tries == ([0, 0] if fault == "output" else [3, 3] if together else [0, 3])
    assert_alike(results)


@pytest.mark.parametrize(
    ("engine", "places"),
    # In a row: windows, where a rank found it alone; micro-batches, as in one process, where all found it together.
    [("ddp", [(1, 0), (2, 0)]), ("ddp", [(1, 1), (2, 1)]), ("ddp", [(1, 0), (2, 1)]), ("fsdp", [(1, 1), (2, 0)])],
)
def test_a_second_one_in_a_row_stops_all_ranks_in_the_same_step(world2, engine, places):
    faults = {(step, micro, 1): "gradient" for step, micro in places}
    results = world2.run(outcomes_of, engine, DYNAMIC, 2, faults, 4)
    messages = {outcomes[-1] for outcomes, *_ in results}
    assert len(messages) == 1
    assert all(len(outcomes) == 3 for outcomes, *_ in results)
    (message,) = messages
    assert "the loss scale at its floor of 1, step 3: the gradient of body" in message
    if engine == "ddp":  # rank 1 has looked who makes it, and told the others
        assert "gate makes it (nan) in the backward pass" in message
    assert_alike(results)


@pytest.mark.parametrize("micro", [0, 1])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_at_the_floor_a_nan_loss_of_one_rank_stops_all(world2, engine, micro):
    """The other rank has no fault of its own to look at, and none waits for its backward pass."""
    policy = DYNAMIC.replace("init=8", "init=1")
    results = world2.run(outcomes_of, engine, policy, 2, {(1, micro, 1): "output"}, 3)
    messages = {outcomes[-1] for outcomes, *_ in results}
    assert len(messages) == 1
    assert "the loss scale at its floor of 1, step 2" in messages.pop()
    assert_alike(results)


def test_windows_in_between_that_were_good_are_counted_by_all_ranks(world2):
    """Two ranks alone, and both together, with a good window after each: nothing has to stop."""
    faults = {(0, 1, 0): "gradient", (2, 0, 1): "gradient", (4, 0, 0): "gradient", (6, 1, 1): "gradient"}
    policy = DYNAMIC.replace("init=8", "init=1024")
    for engine in ("ddp", "fsdp"):
        results = world2.run(outcomes_of, engine, policy, 2, faults, 8)
        for outcomes, *_ in results:
            assert [applied for applied, *_ in outcomes] == [False, True] * 4
        assert_alike(results)


def test_one_rank_alone_does_not_forget_what_all_have_seen(world2):
    """A lost window of all, one that a rank loses alone, and another of all: they stop together."""
    faults = {(0, 1, 0): "gradient", (1, 0, 1): "output", (2, 1, 0): "gradient"}
    results = world2.run(outcomes_of, "ddp", DYNAMIC, 2, faults, 4)
    assert [[type(each) for each in outcomes] for outcomes, *_ in results] == [[tuple, tuple, str]] * 2
    assert_alike(results)


def test_hysteresis_counts_the_windows_of_all_ranks(world2):
    policy = f"{DYNAMIC} on_overflow=skip scale.hysteresis=2"
    faults = {(1, 0, 1): "gradient", (2, 1, 0): "gradient", (4, 0, 0): "gradient"}
    results = world2.run(outcomes_of, "ddp", policy, 2, faults, 6)
    for outcomes, *_ in results:
        assert [scale for _, scale, _ in outcomes] == [8, 8, 8, 4, 4, 4]
    assert_alike(results)


# --- what a forward pass changes besides -----------------------------------------------------------------------------


def replayed(is_planted):
    """Masks of dropout and running statistics, of a run with overflows and of one at the scale that these come to."""
    faults = {(0, 0, 1): 1.0, (1, 1, 0): 0.5} if is_planted else {}
    outcomes, weights, _, net = run_gate("ddp", "fp32 scale=dynamic scale.init=1024", 2, faults, 3, net=Gated())
    masks = [mask for i, mask in enumerate(net.masks) if i == 0 or not torch.equal(mask, net.masks[i - 1])]
    return outcomes, weights, masks, [buffer.clone() for buffer in net.buffers()], torch.get_rng_state()


def test_dropout_and_statistics_are_those_of_a_run_without_overflows(world2):
    for planted, plain in zip(world2.run(replayed, True), world2.run(replayed, False), strict=True):
        assert all(applied for applied, *_ in planted[0])
        for a, b in zip((*planted[2], *planted[3]), (*plain[2], *plain[3]), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(planted[4], plain[4])
        for a, b in zip(planted[1], plain[1], strict=True):
            assert torch.equal(a, b)  # a scale that is a power of two rounds nothing
    assert sum(num for _, _, num in planted[0]) > 0


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_loops_without_a_closure_are_judged_together(world2, engine):
    faults = {(1, 0, 1): "gradient", (2, 1, 0): "output"}
    results = world2.run(outcomes_of, engine, DYNAMIC, 2, faults, 4, "forward")
    for outcomes, *_ in results:
        assert outcomes == [(True, 8, 0), (False, 8, 0), (False, 4, 0), (True, 2, 0)]
    assert_alike(results)


def test_a_window_that_ends_without_a_closure_has_one_scale(world2):
    """Its first micro-batch was replayed by one rank, and gradients come together in one that none can replay."""
    results = world2.run(outcomes_of, "ddp", "fp32 scale=dynamic scale.init=1024", 2, {(1, 0, 1): 2.0**-3}, 3, "mixed")
    (ours, *_), (others, *_) = results
    assert ours[1][2] == 0 < others[1][2]
    assert ours[1][:2] == others[1][:2]
    assert ours[1][1] < 1024
    assert_alike(results)


# --- modules that go on in fp32, and explanations ---------------------------------------------------------------------


def promote(where, accumulate, on, policy="fp16 on_exhausted=promote scale.init=4"):
    """on: (micro-batch, rank) where ``hot`` is at fault, in the second window."""
    rank = distributed.get_rank()
    net, heard = Hot(where), []
    model = engine_over(net, "ddp")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
    stepper = Stepper(model, optimizer, policy, accumulate=accumulate, watch=False, sinks=[heard.append])
    reports = []
    for step in range(3):
        for micro in range(accumulate):
            net.is_on = step == 1 and (micro, rank) in on
            target = 10 if net.is_on else 0.1
            report = stepper.step(
                lambda micro=micro, t=target: (model(X.roll(micro + rank, 0)).float() - t).square().sum()
            )
        reports.append((report.applied, report.num_replays))
    told = [(event.step, event.module) for event in heard if isinstance(event, Promotion)]
    return reports, str(stepper.policy), told, [whole(p) for p in net.parameters()]


@pytest.mark.parametrize("where", ["weight", "output"])
@pytest.mark.parametrize(
    ("master", "accumulate", "on", "is_lost"),
    [
        ("", 1, {(0, 1)}, False),  # in the last micro-batch all ranks mend it together, and nothing is lost
        ("", 2, {(0, 1)}, True),  # a rank alone sees it, and all mend it at the window's end
        ("", 2, {(0, 0), (1, 1)}, True),
        (" master=split16", 1, {(0, 1)}, True),
    ],
)
def test_all_ranks_promote_the_same_module(world2, where, master, accumulate, on, is_lost):
    policy = f"fp16{master} on_exhausted=promote scale.init=4"
    (ours, policy_here, told, weights), *others = world2.run(promote, where, accumulate, on, policy)
    for reports, its_policy, its_told, its_weights in others:
        assert [applied for applied, _ in reports] == [applied for applied, _ in ours]
        assert (its_policy, its_told) == (policy_here, told)
        assert all(torch.equal(a, b) for a, b in zip(weights, its_weights, strict=True))
    assert "module:hot=fp32" in policy_here
    assert told == [(2, "hot")]
    assert [applied for applied, _ in ours] == [True, not is_lost, True]


def spoilt(net, model, where, x):
    net.gate.where = where  # here, since the window's end may run it again
    return model(x).square().mean()


def explained(policy, micro):
    """What was applied, this rank's explanation, and of the captures that it was made of whether they are finite."""
    seen = []
    module = types.ModuleType("trace")
    module.trace_of = lambda capture: seen.append(capture.run().is_finite) or f"trace of step {capture.step}"
    before, sys.modules["halfstep.diagnosis.trace"] = sys.modules.get("halfstep.diagnosis.trace"), module
    try:
        rank, net = distributed.get_rank(), Plain()
        model = engine_over(net, "ddp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        stepper = Stepper(model, optimizer, policy, accumulate=2, watch=False, explain=True)
        applied = []
        for step in range(4):
            for number in range(2):
                where = "output" if step in (1, 2) and (number, rank) == (micro, 1) else "nowhere"
                x = X.roll(step + rank, 0)[:6]
                try:
                    report = stepper.step(lambda where=where, x=x: spoilt(net, model, where, x))
                except ScaleExhausted as error:
                    return [*applied, str(error)], stepper.explanation, seen
            applied.append(report.applied)
        return applied, stepper.explanation, seen
    finally:
        if before is None:
            del sys.modules["halfstep.diagnosis.trace"]
        else:
            sys.modules["halfstep.diagnosis.trace"] = before


@pytest.mark.parametrize("micro", [0, 1])
@pytest.mark.parametrize("policy", ["bf16", "fp32 scale=dynamic", "fp32 scale=dynamic on_overflow=skip"])
def test_the_rank_at_fault_explains_it(world2, policy, micro):
    results = world2.run(explained, policy, micro)
    assert [applied for applied, *_ in results] == [[True, False, False, True]] * 2
    assert results[1][1] == "trace of step 2"
    assert results[1][2] == [False]


def refusal(policy, options):
    model = engine_over(Plain(), "fsdp")
    with pytest.raises(HalfstepError) as caught:
        Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), policy, watch=False, **options)
    return str(caught.value)


def test_a_rank_that_still_waits_for_something_to_explain_stops_with_the_others(world2):
    """Rank 1 has explained its step, at a scale of 2. At the floor both look at the verdict all the same."""
    policy = "fp32 scale=dynamic scale.init=2 on_overflow=skip"
    (ours, waiting, _), (others, explanation, _) = world2.run(explained, policy, 1)
    assert (waiting, explanation) == (None, "trace of step 2")
    assert ours == others
    assert ours[:2] == [True, False]
    assert "the loss scale at its floor of 1, step 3" in ours[2]


def test_where_a_look_needs_all_ranks_it_is_refused(world2):
    for policy, options in (("fp16 on_exhausted=promote", {}), ("fp16", {"explain": True})):
        for message in world2.run(refusal, policy, options):
            assert "where each forward pass needs all ranks" in message
