"""What a trace says besides the producer: which step, which micro-batch, calibration, headroom, growth, JSON."""

from __future__ import annotations

import json
import math

import pytest
import torch
from reference import trace_nets
from reference.loop import Gate
from reference.trace_nets import WIDTH, CubicNorm, Head, line_of, plain, source
from torch import nn

from halfstep.diagnosis.calibration import Calibration
from halfstep.diagnosis.capture import Capture
from halfstep.diagnosis.examination import examine
from halfstep.diagnosis.headroom import Growth, growth_of
from halfstep.diagnosis.trace import trace_of
from halfstep.errors import HalfstepError
from halfstep.explain.history import History
from halfstep.explain.trace import trace
from halfstep.policy import LossScale, Policy
from halfstep.record import OperationRecorder, Walk
from halfstep.source import load

pytestmark = pytest.mark.usefixtures("kernels_stay")


class Hot(nn.Module):
    """In the batches listed its gradient or its output overflows, or becomes NaN."""

    def __init__(self, where="gradient", limit=None):
        super().__init__()
        self.stem, self.gate, self.head = nn.Linear(WIDTH, WIDTH), Gate(limit), nn.Linear(WIDTH, 1)
        self.where = where

    def forward(self, batch):
        number, x = batch
        self.gate.where = self.where if number else "nowhere"
        return self.head(self.gate(self.stem(x)))


def numbered(*bad, num=12):
    """Batches (whether it is bad, x)."""
    return lambda: [(i + 1 in bad, torch.randn(4, WIDTH)) for i in range(num)]


def hot(*bad, where="gradient", limit=None, **fields):
    return source(lambda: Hot(where, limit), batches=numbered(*bad), **fields)


# --- which step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fp16", "fp16 on_overflow=skip", "fp16 scale=static scale.init=4", "bf16", "fp32"])
@pytest.mark.parametrize("where", ["output", "gradient"])
def test_the_first_step_that_no_scale_mends_is_found(where, policy):
    report = trace(hot(4, 6, where=where), Policy.parse(policy), 8)
    phase = "forward" if where == "output" else "backward"
    assert report.step == 4
    assert (report.producer.module, report.producer.phase, report.producer.kind) == ("gate", phase, "nan")
    assert report.policy == policy
    # A gradient that is NaN takes a scale that replays down to its floor before it is known that none mends it.
    expected = {"bf16": 1.0, "fp32": 1.0, "fp16 scale=static scale.init=4": 4.0}
    lowest = expected.get(policy, 1.0 if (policy, where) == ("fp16", "gradient") else 2.0**14)
    assert lowest <= report.scale <= expected.get(policy, 2.0**16)
    assert report.micro_batch is None


def test_nothing_found_says_so():
    report = trace(source(plain), Policy("fp16"), 3)
    assert not report.found
    assert str(report).startswith("nothing found in 3 steps")
    assert report.to_dict() | {"notes": []} == {
        "step": 3, "policy": "fp16", "found": False, "micro_batch": None, "scale": 1.0, "loss": None,
        "grad_norm": None, "producer": None, "origin": None, "headroom": None, "growth": None, "before": [],
        "carriers": [], "num_carriers": 0, "fp32_step": None, "advice": [], "notes": [], "reason": None,
        "rank": None, "ranks": [],
    }  # fmt: skip


@pytest.mark.parametrize("policy", ["fp16", "bf16"])
@pytest.mark.parametrize("where", ["output", "gradient"])
def test_the_micro_batch_of_a_window_is_named(where, policy):
    report = trace(hot(5, where=where, accumulate=3), Policy(policy), 4)
    assert (report.step, report.micro_batch) == (2, 1)
    assert report.producer.module == "gate"
    assert "micro-batch 2 of its window" in str(report)


def test_a_policy_that_promotes_stops_at_the_fault_all_the_same():
    net = source(lambda: Head(CubicNorm(), 1e-3, bias=False))  # in fp32 it would go on
    report = trace(net, Policy.parse("fp16 on_exhausted=promote"), 2)
    assert (report.step, report.producer.module) == (1, "part")
    assert report.policy == "fp16 on_exhausted=promote"


def test_a_gradient_whose_values_are_finite_and_whose_norm_is_not_has_no_producer():
    def loss(model, x):
        return (model(x).float() * 1e30).mean() * 1e8

    report = trace(source(lambda: nn.Linear(WIDTH, WIDTH), loss, [torch.ones(4, WIDTH) * 10]), Policy("fp32"), 2)
    assert report.found
    assert report.producer is None
    assert str(report).startswith("step 1: the gradient norm is inf; no operation of the pass made")
    assert report.to_dict()["grad_norm"] == "Infinity"


def test_a_batch_without_a_sample_says_so():
    report = trace(source(plain, lambda model, x: (model(x).float().sum() * 0, 0)), Policy("bf16"), 2)
    assert report.producer is None
    assert str(report).startswith("step 1: the count is 0: there is nothing to take the mean of; no operation")


@pytest.mark.parametrize("num_steps", [0, -1])
def test_a_number_of_steps_below_one_is_refused(num_steps):
    with pytest.raises(HalfstepError, match=f"steps={num_steps}: there is nothing to look at"):
        trace(source(plain), Policy("fp16"), num_steps)


def test_the_run_is_the_one_that_it_would_have_been():
    """Looking changes nothing: the losses are those of a plain run, dropout and batch statistics included."""
    from halfstep.explain.rehearsal import Rehearsal

    def make():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 1))

    net = source(make, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1))
    told = []
    trace(net, Policy("fp16"), 5, progress=told.append)
    rehearsal = Rehearsal(net, Policy("fp16"))
    assert told == [f"step {r.step}, loss {r.loss:.4g}" for r in (rehearsal.run_window() for _ in range(5))]


class Counts(nn.Module):
    """A buffer of its own that the forward pass moves: the fault comes at its third call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x):
        self.num_calls += 1
        return (self.linear(x).square() + 2.5 - self.num_calls).log()


def test_a_buffer_is_what_it_was_when_the_micro_batch_began():
    net = source(Counts, lambda model, x: model(x).float().mean(), [torch.zeros(4, WIDTH)])
    report = trace(net, Policy("fp32"), 5)
    assert (report.step, report.producer.op, report.producer.kind) == (3, "log", "nan")


# --- calibration ---------------------------------------------------------------------------------------------------


def test_the_calibration_of_a_fresh_scale_is_no_failure():
    net = hot(limit=2.0**4)
    for policy in ("fp16", "fp16 on_overflow=skip"):
        report = trace(net, Policy.parse(policy), 10)
        assert not report.found
        (note,) = report.notes
        assert "the loss scale finding its place, from 65536 to" in note


def test_overflows_of_the_micro_batch_at_fault_are_no_calibration():
    report = trace(hot(3), Policy.parse("fp16 scale.init=256"), 4)
    assert report.scale == 1.0  # 8 overflows down to the floor
    assert report.fp32_step == 3
    assert not any("finding its place" in note for note in report.notes)


def test_calibration_before_the_fault_is_told_and_that_of_the_fault_is_not():
    report = trace(hot(3, limit=2.0**4), Policy("fp16"), 4)
    (note,) = (note for note in report.notes if "finding its place" in note)
    scale = float(note.split(" to ")[1].split(";")[0])
    assert report.step == 3
    assert 1.0 < scale < 2.0**16
    assert note.startswith(f"{16 - round(math.log2(scale))} overflows were")


def test_what_is_harmless_is_examined_once(monkeypatch):
    seen = []
    monkeypatch.setattr("halfstep.explain.lookout.examine", lambda capture: seen.append(capture) or examine(capture))
    net = source(trace_nets.MASKED["masked_fill"], batches=trace_nets.sequences)
    assert not trace(net, Policy.parse("fp16 scale.init=16"), 5).found
    assert len(seen) == 1


class Cooling(nn.Module):
    """Its gradient overflows above the limit that a batch has."""

    def __init__(self):
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, 1), Gate()

    def forward(self, batch):
        self.gate.limit, x = batch
        return self.gate(self.linear(x))


@pytest.mark.parametrize("policy", ["fp16", "fp16 on_overflow=skip"])
def test_an_overflow_after_the_scale_has_settled_is_one(policy):
    def batches():
        limits = [None] * 6 + [16.0]
        return [(limit, torch.ones(4, WIDTH)) for limit in limits]

    def loss(model, batch):
        return model(batch).float().mean()

    text = f"{policy} scale.init=256 scale.interval=4 scale.ceiling=256"
    report = trace(source(Cooling, loss, batches), Policy.parse(text), 20)
    assert report.found
    assert report.step == 7
    assert (report.producer.module, report.producer.phase) == ("gate", "backward")
    # 256 / 4 is above 16, and so is 128 / 4.
    assert any(a.text.startswith("lower the loss scale to 64") and a.result == "mends it" for a in report.advice)


def test_calibration_ends_with_the_first_interval_and_begins_again_for_one_step_after_a_growth():
    calibration = Calibration(LossScale("dynamic", interval=3))
    assert calibration.takes()  # fresh
    calibration.applied()
    calibration.applied()
    assert calibration.takes()  # two clean steps are not three
    for _ in range(3):
        calibration.applied()
    assert calibration.takes()  # it has just grown
    assert not calibration.takes()  # twice in that step is one too many
    for _ in range(4):
        calibration.applied()
    assert not calibration.takes()
    assert calibration.num_overflows == 3


@pytest.mark.parametrize("kind", ["none", "static"])
def test_a_scale_that_does_not_move_has_no_calibration(kind):
    assert not Calibration(LossScale(kind)).takes()


# --- headroom and growth -------------------------------------------------------------------------------------------


class Grows(nn.Module):
    """What it multiplies grows by half at each call, from 100."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        self.register_buffer("factor", torch.tensor(100.0))
        with torch.no_grad():
            self.linear.weight.fill_(1.0)

    def forward(self, x):
        h = self.linear(x)
        h = h * self.factor.clone()
        self.factor *= 1.5
        return h


def test_headroom_and_growth_are_told_in_numbers():
    net = source(Grows, lambda model, x: model(x).float().log().mean(), [torch.ones(4, 1)])
    report = trace(net, Policy.parse("fp16 scale.init=1"), 30)
    # 100 x 1.5^16 = 65684 is beyond 65504 + 16, the last that rounds to it; 100 x 1.5^15 = 43789.
    assert report.step == 17
    assert (report.producer.op, report.producer.kind) == ("mul", "inf")
    assert (report.headroom.format, report.headroom.limit) == ("fp16", 65504.0)
    assert report.headroom.fp32_largest == pytest.approx(100 * 1.5**16, rel=1e-6)
    assert report.headroom.fp32_bits == pytest.approx(math.log2(65504 / (100 * 1.5**16)), abs=1e-6)
    assert report.headroom.bits <= 0  # the factor, which is in fp32, is an input
    assert (report.growth.since, report.growth.last) == (1, 16)
    assert (report.growth.low, report.growth.high) == (100.0, pytest.approx(100 * 1.5**15, rel=2**-11))
    assert "has grown since step 1: 100, 4.378e+04 at step 16" in str(report)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        ([3.0], None),
        ([3.0, 3.0, 3.0], None),
        ([5.0, 4.0, 3.0], None),  # it did not grow
        ([1.0, 2.0, 3.0], Growth(1, 1.0, 3, 3.0)),
        ([9.0, 5.0, 2.0, 4.0, 8.0], Growth(3, 2.0, 5, 8.0)),
        ([9.0, 5.0, 2.0, 4.0, 3.0, 8.0], Growth(3, 2.0, 6, 8.0)),  # a dip on the way
        ([1.0, *[10.0] * 7, 9.0, 20.0], Growth(9, 9.0, 10, 20.0)),  # low once, long before
    ],
)
def test_growth_begins_at_the_last_local_minimum(values, expected):
    assert growth_of(list(enumerate(values, 1))) == expected


def test_the_history_has_the_extremes_of_every_operation():
    torch.manual_seed(0)
    model, x = plain(), torch.randn(4, WIDTH)
    history, recorder = History(), OperationRecorder(model)
    with Walk(model, history):
        history.watched(lambda: model(x).square().mean())().backward()
        torch.full((3,), math.nan) * 2  # after the closure, as an optimizer's
    assert history.read(7) == {}
    model.zero_grad()
    with recorder:
        model(x).square().mean().backward()
    largest: dict[object, float] = {}
    for operation in recorder.read().operations:
        if operation.op != "ones_like":  # where the gradient starts
            place = (operation.site._replace(line=None), operation.op)
            largest[place] = max(largest.get(place, 0.0), *(v.largest for v in operation.outputs))
    seen: dict[object, float] = {}
    for site, op in list(history._series):
        place = (site._replace(line=None), op)
        seen[place] = max(seen.get(place, 0.0), dict(history.of(site, op))[7])
    assert seen == largest


def test_a_history_forgets_a_run_that_is_done_again_and_sees_nothing_while_paused():
    history, linear = History(), nn.Linear(2, 1)
    x = [torch.full((1, 2), value) for value in (math.nan, 1.0)]
    for batch in x:
        linear.zero_grad()
        with Walk(linear, history):
            history.watched(lambda batch=batch: linear(batch).sum())().backward()
    with history.paused(), Walk(linear, history):
        history.watched(lambda: linear(x[0]).sum())
        linear(x[0]).sum().backward()
    assert history.read(1) == {}


# --- the report ----------------------------------------------------------------------------------------------------


def test_the_keys_of_the_json_are_those_written_down():
    report = trace(source(trace_nets.LateScale), Policy("fp16"), 2)
    told = report.to_dict()
    assert {"step", "policy", "producer", "carriers", "before", "advice"} <= told.keys()
    assert {"module", "op", "phase", "kind", "file", "line"} <= told["producer"].keys()
    assert all({"text", "policy", "result"} == advice.keys() for advice in told["advice"])
    assert all({"module", "op", "phase", "kind", "file", "line"} <= carrier.keys() for carrier in told["carriers"])
    assert all({"module", "op", "phase", "inputs", "outputs"} <= before.keys() for before in told["before"])
    assert told["producer"]["line"] == line_of("scores")
    assert told["loss"] == "NaN"
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_twenty_operations_before_it_and_the_first_carriers_are_listed():
    def make(num):
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(num)]
        return nn.Sequential(*layers, Gate(), *[nn.Linear(WIDTH, WIDTH) for _ in range(12)])

    def traced(num):
        torch.manual_seed(0)
        model, x = make(num), torch.randn(4, WIDTH)
        model[num].where = "output"
        return trace_of(Capture(model, lambda: model(x).square().mean(), Policy("fp32")))

    assert len(traced(30).before) == 20
    report = traced(12)
    assert [o.site.module for o in report.before[-3:]] == ["10", "11", "12"]
    assert len(report.before) == 13  # 12 layers, and the copy that the gate spoils
    assert len(report.carriers) == 10
    assert [o.site.module for o in report.carriers[:3]] == ["13", "14", "15"]
    assert report.num_carriers > 20
    assert f"and {report.num_carriers - 10} more" in str(report)


def test_carriers_are_told_from_the_producer_and_from_what_stays_finite():
    report = trace(hot(2, where="gradient"), Policy("bf16"), 3)
    assert {operation.site.module for operation in report.carriers} <= {"stem", "gate"}
    assert "head" not in {operation.site.module for operation in report.carriers}


def test_a_weight_that_is_not_finite_is_named_by_its_parameter():
    torch.manual_seed(0)
    model, x = plain(), torch.randn(4, WIDTH)
    with torch.no_grad():
        model[2].weight[0, 0] = math.inf
    report = trace_of(Capture(model, lambda: model(x).square().mean(), Policy("bf16")))
    producer = report.producer
    assert (producer.module, producer.holds, producer.kind, producer.op) == ("2", "2.weight", "inf", "_to_copy")
    assert "2.weight holds inf before the step" in str(report)


@pytest.mark.gpu
def test_a_trace_on_a_gpu_names_the_same():
    report = trace(load("fragile"), Policy("fp16"), 3, device="cuda")
    assert (report.step, report.producer.module, report.producer.kind) == (1, "pool", "inf")
    report = trace(source(trace_nets.SquaredReLU), Policy("fp16"), 3, device="cuda")
    assert report.producer.line == line_of("activation")
    assert not trace(load("mlp"), Policy("fp16"), 10, device="cuda").found
