"""Faults of the kinds that people report: each is named by module, operation, pass and line, and FP32 is told apart."""

from __future__ import annotations

import math

import pytest
import torch
from reference import trace_nets
from reference.trace_nets import (
    CubicNorm,
    Head,
    LateScale,
    LogitScale,
    RootMeanSquare,
    SquaredReLU,
    UnitVectors,
    blank_row,
    line_of,
    plain,
    source,
    unused_rows,
)
from torch import nn

from halfstep.explain.trace import trace
from halfstep.policy import Policy
from halfstep.record import BATCH, LOSS
from halfstep.source import load

pytestmark = pytest.mark.usefixtures("kernels_stay")

FAULTS = {
    # name: (source, module, operation, pass, kind, step)
    "activation": (source(SquaredReLU), "", "mul", "forward", "inf", 1),
    "scores": (source(LateScale), "", "mm", "forward", "inf", 1),
    "zero times sum": (source(plain, trace_nets.zero_times_sum), LOSS, "dot", "forward", "inf", 1),
    "logit scale": (source(LogitScale), "", "mul", "forward", "inf", 1),
    "rmsnorm": (source(lambda: Head(RootMeanSquare(), 400)), "part", "mul", "forward", "inf", 1),
    "matching cost": (source(plain, trace_nets.matching_cost), LOSS, "mm", "forward", "inf", 1),
    "eps in log": (source(plain, trace_nets.log_of_size), LOSS, "log", "forward", "inf", 1),
    "normalize": (source(lambda: Head(UnitVectors(), bias=False), None, blank_row), "part", "div", "forward", "nan", 2),
    "clamped probability": (source(plain, trace_nets.focal), LOSS, "log", "forward", "inf", 1),
    "cubic norm": (source(lambda: Head(CubicNorm(), 1e-3, bias=False)), "part", "pow", "backward", "inf", 1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_fp16_is_named_and_fp32_has_none(name):
    net, module, op, phase, kind, step = FAULTS[name]
    report = trace(net, Policy("fp16"), 4)
    producer = report.producer
    assert report.found
    assert (producer.module, producer.op, producer.phase, producer.kind) == (module, op, phase, kind)
    assert (producer.file, producer.line) == (trace_nets.__file__, line_of(name))
    assert report.step == step
    assert report.fp32_step is None
    assert not trace(net, Policy("fp32"), 4).found
    assert any(advice.result == "mends it" for advice in report.advice)
    is_silent = math.isfinite(report.loss + report.grad_norm)
    assert is_silent == (name in ("rmsnorm", "matching cost"))
    assert is_silent == ("Loss and gradient are finite all the same" in str(report))


def test_a_second_derivative_that_overflows_inside_the_loss_is_one_of_the_backward_pass():
    report = trace(source(plain, trace_nets.inner_scale), Policy("fp16"), 2)
    producer = report.producer
    assert (producer.phase, producer.kind) == ("backward", "inf")
    assert producer.module in ("", "2", LOSS)
    assert producer.file == trace_nets.__file__
    assert report.fp32_step is None
    assert math.isnan(report.loss) or math.isinf(report.loss)


def test_a_batch_that_holds_nan_is_not_the_precision():
    def batches():
        good, bad = torch.randn(4, 16), torch.randn(4, 16)
        bad[1, 2] = math.nan
        return [good, good, bad]

    report = trace(source(plain, batches=batches), Policy("fp16"), 5)
    producer = report.producer
    assert (report.step, producer.module, producer.kind, producer.op) == (3, BATCH, "nan", "_to_copy")
    assert report.fp32_step == 3
    assert str(report).startswith("step 3: the batch holds NaN; the first to meet it is linear (_to_copy)")
    assert report.advice[0].text.startswith("Not the precision: fp32 fails as well at step 3")
    assert sum(advice.text.startswith("Not the precision") for advice in report.advice) == 1


@pytest.mark.parametrize("policy", ["bf16", "fp32"])
def test_a_run_that_diverges_is_not_the_precision(policy):
    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=1e4)

    def loss(model, x):
        return model(x).float().pow(4).mean()

    report = trace(source(lambda: nn.Linear(16, 16), loss, optimizer=optimizer), Policy(policy), 20)
    assert report.found
    assert report.producer.phase in ("forward", "backward")
    assert 2 <= report.step < 20
    if policy == "bf16":
        assert report.advice[0].text.startswith("Not the precision: fp32 fails as well at step")


def ids():
    return [torch.tensor([1, 2, 3])]


def embedded(model, batch):
    return model(batch).float().square().mean()


@pytest.mark.parametrize("policy", ["fp16", "bf16", "fp32"])
def test_an_update_that_spoils_a_weight_is_named(policy):
    def optimizer(parameters):
        return torch.optim.Adam(parameters, lr=1e-3, eps=0.0)

    report = trace(source(unused_rows, embedded, ids, optimizer), Policy(policy), 3)
    producer = report.producer
    assert (report.step, producer.module, producer.phase, producer.kind) == (1, "0", "update", "nan")
    assert (producer.op, producer.holds) == ("Adam", "0.weight")
    assert "the update of Adam makes 0.weight NaN" in str(report)
    by_text = {advice.text: advice.result for advice in report.advice}
    assert by_text["raise the eps of the optimizer to 1e-07"] == "mends it"
    assert by_text["lower the learning rate, to 0.0001 instead of 0.001"] == "does not"
    assert report.fp32_step == (None if policy == "fp32" else 1)


def test_a_learning_rate_that_spoils_a_weight_is_named_and_a_lower_one_is_tried():
    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=3e38)

    def loss(model, batch):
        return 10 * model(batch).float().mean()

    report = trace(source(lambda: nn.Linear(16, 4), loss, optimizer=optimizer), Policy("bf16"), 2)
    assert (report.step, report.producer.phase, report.producer.kind) == (1, "update", "inf")
    assert [advice.result for advice in report.advice if "learning rate, to" in advice.text] == ["mends it"]


def test_fragile_fails_in_its_pool():
    report = trace(load("fragile"), Policy("fp16"), 5)
    producer = report.producer
    assert (report.step, producer.module, producer.kind, producer.phase) == (1, "pool", "inf", "forward")
    assert producer.file.endswith("fragile.py")
    assert producer.function == "matmul"
    assert report.headroom.fp32_bits < -1
    assert not trace(load("fragile"), Policy("bf16"), 5).found
    assert not trace(load("fragile"), Policy.parse("fp16 module:pool=fp32"), 5).found


@pytest.mark.parametrize("policy", ["fp16", "bf16"])
@pytest.mark.parametrize(("name", "steps"), [("charlm", 10), ("digits", 30), ("mlp", 30)])
def test_a_workload_that_16_bit_can_train_has_none(name, steps, policy):
    report = trace(load(name), Policy(policy), steps)
    assert not report.found, str(report)
    assert report.step == steps
