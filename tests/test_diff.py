"""Two runs side by side: healthy models pair up and stay together, planted faults are named where they are made."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference.diff_nets import HEALTHY, capture, checkpointed, classes, encoder, experts, llama
from torch import nn

from halfstep.diagnosis.capture import Capture
from halfstep.errors import HalfstepError
from halfstep.explain.diff import diff, diff_of
from halfstep.explain.divergence import JUMP, compare
from halfstep.explain.error import unit_of
from halfstep.explain.stream import Stream
from halfstep.formats import FORMATS
from halfstep.policy import Policy
from halfstep.record import Walk
from halfstep.source import load

pytestmark = pytest.mark.usefixtures("kernels_stay")

FP32, BF16, FP16 = Policy("fp32"), Policy("bf16"), Policy("fp16")


def stream(captured, policy, scale=1.0):
    visitor = Stream()
    captured.run(Policy.parse(policy), scale, under=[Walk(captured.model, visitor)])
    return visitor.ran


def side_by_side(a, b, format, factor=1.0):
    return compare(a, b, unit_of(FORMATS[format]), factor)


def parting(comparison):
    return [(c.ran.op, c.ran.site.module, c.ran.site.line, c.error) for c in comparison.compared if c.parts]


# --- healthy models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_pairs_up_and_stays_together_in_every_format(name):
    captured = capture(HEALTHY[name])
    scale = 2.0**10
    runs = {policy: stream(captured, policy, scale) for policy in ("fp32", "bf16", "fp16")}
    for a, b in (("fp32", "bf16"), ("fp16", "fp32"), ("fp16", "bf16"), ("fp32", "fp16")):
        comparison = side_by_side(runs[a], runs[b], "fp16" if "bf16" not in (a, b) else "bf16")
        assert comparison.paired_pct >= 99, (a, b, [ran.op for side in comparison.unpaired for ran in side])
        assert parting(comparison) == [], (a, b)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("charlm", {"width": 32, "depth": 1, "context": 16, "batch_size": 4}),
        ("digits", {}),
        ("mlp", {}),
        ("fragile", {}),
    ],
)
def test_built_in_workloads_pair_up_after_some_steps(name, options):
    report = diff(load(name, **options), ["fp32", "bf16"], step=3, seed=1)
    assert report.paired_pct >= 99
    assert report.first is None
    assert report.step == 3
    assert report.losses[0] == pytest.approx(report.losses[1], rel=0.02)


@pytest.mark.parametrize(
    ("net", "rule"), [(llama, "blocks.0"), (llama, "*.q"), (encoder, "layer"), (checkpointed, "blocks.1")]
)
def test_a_module_that_a_rule_keeps_in_fp32_pairs_with_the_one_in_16_bit(net, rule):
    report = diff_of(capture(net), FP16, Policy.parse(f"fp16 module:{rule}=fp32"))
    assert report.paired_pct >= 99
    assert report.first is None
    differing = {row.module for row in report.rows if row.formats[0] != row.formats[1]}
    assert differing
    assert any(row.error for row in report.rows)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "fp16 module:layer=fp32"])
def test_a_policy_against_itself_pairs_everything_without_any_error(policy):
    report = diff_of(capture(lambda: encoder(dropout=0.1)), Policy.parse(policy), Policy.parse(policy))
    assert report.paired_pct == 100
    assert {row.error for row in report.rows} == {0.0}
    assert report.unpaired == ()
    assert not report.found


def test_the_kink_of_a_relu_is_a_decision_and_no_error():
    report = diff_of(capture(HEALTHY["deep"]), FP32, FP16)
    kinks = [row for row in report.rows if row.op == "threshold_backward"]
    assert {row.kind for row in kinks} == {"decision"}
    assert any(row.error > row.limit for row in kinks)  # it would part, were it arithmetic
    assert report.first is None


def test_a_picked_expert_is_a_decision_and_what_it_gives_no_error():
    report = diff_of(capture(experts), FP32, BF16)
    [gather] = [row for row in report.rows if row.op == "gather"]
    assert gather.kind == "decision"
    assert gather.error > gather.limit
    assert report.first is None


def steep(factor):
    """A classifier that is sure of itself: logits of a few times ``factor``."""

    def net():
        model, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8)), torch.randn(64, 32)
        y = model(x).argmax(-1)
        y[0] = (y[0] + 1) % 8
        return model, lambda: F.cross_entropy((model(x) * factor).float(), y)

    return net


def test_an_exponential_carries_the_absolute_error_of_its_input():
    report = diff_of(capture(steep(200.0)), FP32, FP16)
    [backward] = [row for row in report.rows if row.op == "_log_softmax_backward_data"]
    assert backward.error > JUMP * backward.expected
    assert report.first is None
    first = diff_of(capture(steep(2000.0)), FP32, BF16).first  # more than a quarter of the result
    assert first.op == "_log_softmax_backward_data"


def test_fused_attention_carries_the_error_of_its_scores():
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(2, 4, 24, 16) * 2 for _ in range(3)])

    def closure():
        query = model[0] @ torch.eye(16) + 24 - 24  # has lost a few digits in fp16
        return F.scaled_dot_product_attention(query, model[1], model[2]).float().square().mean()

    report = diff_of(Capture(model, closure, FP32), FP32, FP16)
    [forward] = [row for row in report.rows if row.phase == "forward" and "attention" in row.op]
    scores = model[0].norm(dim=-1).max() * model[1].norm(dim=-1).max() / 4
    assert 1.5 < forward.expected < JUMP
    assert forward.limit == pytest.approx(2 * forward.expected * scores.item(), rel=0.01)
    assert report.first is None


def phase(x):
    t = x * 1000
    return t.sin()  # phase


# --- planted faults ------------------------------------------------------------------------------------------------


def variance(x):
    y = x * 0.01 + 10
    v = (y * y).mean(-1, keepdim=True) - y.mean(-1, keepdim=True) ** 2  # variance
    return x * (v + 1.0).rsqrt()


def shift(x):
    far = x + 500
    return far - 500  # shift


def product(x):
    return (x * 300) * (x * 300) * 1e-5  # product


def epsilon(x):
    x = x * (x.abs() > 0.2)
    return x / (x.abs() + 1e-8)  # epsilon


def running_sum(x):
    total = torch.full_like(x[:, 0], 8.0)
    for _ in range(300):
        total = total + 0.003  # running_sum
    return x + total[:, None] / 100


def cast_sum(x):
    total = torch.full_like(x[:, 0], 8.0)
    for _ in range(300):
        total = (total.float() + 0.003).to(x.dtype)  # cast_sum
    return x + total[:, None] / 100


def tiny(x):
    return (x * 1e-5) * (x * 1e-5) * 1e8  # tiny


def line_of(mark):
    return next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith(f"# {mark}"))


class Part(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def planted(function):
    def net():
        return classes(nn.Sequential(nn.Linear(32, 32), Part(function), nn.Linear(32, 8)), torch.randn(16, 32))

    return capture(net)


@pytest.mark.parametrize(
    ("function", "policy", "op"),
    [
        (variance, "bf16", "sub"),
        (variance, "fp16", "sub"),
        (shift, "bf16", "sub"),
        (shift, "fp16", "sub"),
        (running_sum, "bf16", "add"),
        (running_sum, "fp16", "add"),
        (cast_sum, "bf16", "add"),
        (phase, "bf16", "sin"),
        (product, "fp16", "mul"),
        (epsilon, "fp16", "div"),
        (tiny, "fp16", "mul"),
    ],
)
def test_a_planted_fault_is_named_first_in_either_order(function, policy, op):
    captured = planted(function)
    full, low = stream(captured, "fp32", 256.0), stream(captured, policy, 256.0)
    for a, b in ((full, low), (low, full)):
        found = parting(side_by_side(a, b, policy))
        assert found, "nothing parts"
        assert found[0][:3] == (op, "1", line_of(function.__name__))
        if function in (product, epsilon):
            assert found[0][3] == math.inf


@pytest.mark.parametrize("function", [product, epsilon, tiny])
def test_what_only_the_range_of_fp16_breaks_stays_together_in_bf16(function):
    captured = planted(function)
    assert parting(side_by_side(stream(captured, "fp32"), stream(captured, "bf16"), "bf16")) == []


def test_what_follows_a_fault_is_not_blamed_for_it():
    found = parting(side_by_side(*(stream(planted(shift), policy) for policy in ("fp32", "bf16")), "bf16"))
    assert {line for *_, line, _ in found} == {line_of("shift")}


class Halved(torch.autograd.Function):
    """A gradient that is wrong by a half in 16 bit alone."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (2 if gradient.dtype == torch.float32 else 1)  # halved


def test_a_fault_in_the_backward_of_a_custom_function_is_named():
    found = parting(side_by_side(*(stream(planted(Halved.apply), policy) for policy in ("fp32", "bf16")), "bf16"))
    assert found[0][:3] == ("mul", "1", line_of("halved"))


def test_the_loss_function_is_outside_of_the_model():
    def net():
        model, x = nn.Linear(16, 4), torch.randn(8, 16)
        return model, lambda: (model(x) * 400).square().sum() * 1e-6

    captured = capture(net)
    report = diff_of(captured, FP32, Policy.parse("fp16 op:pow=fp16 op:sum=fp16"))
    assert report.first is not None
    assert report.first.module is None
    assert report.first.error == math.inf
    assert "outside of the model" in str(report)


# --- range and scale -----------------------------------------------------------------------------------------------


def faint():
    """Gradients around 1e-9, which fp16 cannot hold unscaled."""
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), torch.randn(8, 16)
    return model, lambda: model(x).float().square().mean() * 1e-7


def test_gradients_that_a_cast_flushes_are_named_at_the_cast_and_scaling_the_loss_mends_it():
    report = diff_of(capture(faint), FP32, Policy.parse("fp16 scale=none"))
    assert (report.first.kind, report.first.phase, report.first.op) == ("cast", "backward", "_to_copy")
    assert "is off by 100% of the largest value" in report.what(report.first)
    assert report.scales == (1.0, 1.0)
    assert report.advice[0].text == "scale the loss"
    assert report.advice[0].result == "mends it"
    assert diff_of(capture(faint), FP32, FP16).first is None


def test_a_fresh_scale_comes_down_before_anything_is_compared():
    def net():
        model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), torch.randn(8, 16)
        return model, lambda: model(x).float().square().sum() * 1e3

    captured = capture(net)
    report = diff_of(captured, FP32, FP16)
    assert report.first is None
    scale = report.scales[1]
    assert report.scales == (scale, scale)
    assert captured.run(FP16, scale).is_finite
    assert not captured.run(FP16, 2 * scale).is_finite


def test_the_scale_is_the_captured_one_where_the_capture_has_the_same():
    captured = capture(encoder, "fp16", scale=2.0**6)
    assert diff_of(captured, FP32, FP16).scales == (2.0**6, 2.0**6)
    report = diff_of(captured, FP16, Policy.parse("fp16 scale=static scale.init=8"))
    assert report.scales == (2.0**6, 8.0)
    assert report.first is None  # gradients compare without the scale
    assert max(row.error for row in report.rows) < JUMP


def test_two_fp16_policies_each_keep_their_own_scale():
    report = diff_of(capture(faint), FP16, Policy.parse("fp16 scale=none"))
    assert report.scales == (2.0**16, 1.0)
    assert report.first.kind == "cast"
    assert report.first.formats[0] is None


def test_gradients_that_the_scale_does_not_multiply_compare_as_they_are():
    captured = capture(HEALTHY["custom function"])
    a, b = stream(captured, "fp32", 1.0), stream(captured, "bf16", 2.0**7)
    assert parting(side_by_side(a, b, "bf16", factor=2.0**7)) == []
    assert parting(side_by_side(a, b, "bf16")) != []


def test_a_lower_format_in_the_model_itself_is_not_held_to_a_finer_unit():
    def net():
        model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), torch.randn(64, 16)
        return model, lambda: model[1](model[0](x).bfloat16().relu().float()).float().square().mean()

    report = diff_of(capture(net), FP32, FP16)
    assert report.first is None
    [relu] = [row for row in report.rows if row.op == "relu"]
    assert relu.formats == ("bf16 -> bf16", "bf16 -> bf16")
    assert relu.expected >= unit_of(FORMATS["bf16"]) / unit_of(FORMATS["fp16"])


def test_a_cast_to_8_bits_in_the_model_itself_costs_what_8_bits_cost():
    def net():
        model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), torch.randn(64, 16)
        return model, lambda: model[1](model[0](x).to(torch.float8_e4m3fn).float()).float().square().mean()

    assert diff_of(capture(net), FP32, FP16).first is None


# --- random numbers ------------------------------------------------------------------------------------------------


def noisy(function):
    def net():
        model = nn.Sequential(nn.Linear(32, 32), Part(function), nn.Linear(32, 8))
        return classes(model, torch.randn(16, 32))

    return net


def test_dropout_draws_the_same_in_each_format():
    report = diff_of(capture(noisy(lambda x: F.dropout(x, 0.5))), FP32, BF16)
    assert report.first is None
    draws = [row for row in report.rows if row.kind == "random"]
    assert draws
    assert all(row.error < 2 for row in draws)
    assert "draw other numbers" not in str(report)


def test_noise_that_depends_on_the_format_is_said_and_not_blamed():
    def draw(x):
        return x * torch.bernoulli(x.detach().sigmoid().repeat(1, 64))[:, :32]

    report = diff_of(capture(noisy(draw)), FP32, BF16)
    assert report.first is None
    assert "1 random operation draws other numbers in another format, the first at 1, bernoulli, forward" in str(report)


# --- the report ----------------------------------------------------------------------------------------------------


def test_the_report_names_the_fault_and_a_rule_that_mends_it():
    report = diff(load("fragile"), ["fp32", "fp16"], step=2)
    first = report.to_dict()["first"]
    assert (first["module"], first["op"], first["error"], first["phase"]) == ("pool", "bmm", "Infinity", "forward")
    assert first["file"].endswith("workloads/fragile.py")
    text = Path(first["file"]).read_text().splitlines()[first["line"] - 1]
    assert "x.mT @ x" in text
    assert report.found
    assert report.advice[0].policy == "fp16 module:pool=fp32"
    assert report.advice[0].result == "mends it"
    assert str(report).startswith("fp32 and fp16 part at pool, bmm, forward, fragile.py line ")
    assert "fp16 gives inf or NaN" in str(report)


def test_json_is_strict_and_has_the_keys_of_the_contract():
    report = diff_of(capture(encoder), FP32, BF16)
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert {"paired_pct", "first", "policies", "unit", "operations", "unpaired", "advice", "scales"} <= data.keys()
    assert data["first"] is None
    assert data["paired_pct"] == 100.0
    row = next(row for row in data["operations"] if row["op"] == "addmm")
    assert row["formats"] == ["fp32 -> fp32", "bf16 -> bf16"]
    assert {"module", "op", "file", "line", "error"} <= row.keys()
    assert row["file"].endswith("diff_nets.py")


def test_the_trace_prints_what_differs_and_says_how_much_more_there_is():
    deep = diff_of(capture(HEALTHY["deep"]), FP32, BF16)
    text = str(deep)
    assert "fp32 -> fp32" in text
    assert " more; all are in the JSON" in text
    same = str(diff_of(capture(encoder), FP32, FP32))
    assert "None." in same


@pytest.mark.parametrize(("policies", "what"), [(["fp32"], "1 policy"), (["fp32", "bf16", "fp16"], "3 policies")])
def test_other_than_two_policies_are_refused(policies, what):
    with pytest.raises(HalfstepError, match=f"^{what}: diff lays two runs side by side. Name two"):
        diff(load("mlp"), policies)


def test_a_captured_step_is_left_as_it_was():
    captured = capture(HEALTHY["convolutions"])
    before = {name: tensor.clone() for name, tensor in captured.model.state_dict().items()}
    diff_of(captured, FP32, BF16)
    assert all(torch.equal(tensor, before[name]) for name, tensor in captured.model.state_dict().items())
    assert all(parameter.grad is None for parameter in captured.model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["encoder", "convolutions", "llama", "LSTM", "attention -inf"])
def test_healthy_models_stay_together_on_a_gpu(name):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model, closure = HEALTHY[name]()
        report = diff_of(Capture(model, closure, FP32), FP32, FP16)
    assert report.paired_pct >= 99
    assert report.first is None
