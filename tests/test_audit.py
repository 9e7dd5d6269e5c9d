"""Audit of losses and custom functions: planted faults are named with their line, right formulas pass."""

import json
import math
from inspect import getsourcelines

import pytest
import torch
import torch.nn.functional as F
from reference.audit_nets import LowAccumulate
from torch import nn

from halfstep.diagnosis.capture import Capture
from halfstep.errors import HalfstepError
from halfstep.explain.audit import audit_loss, audit_of
from halfstep.explain.auditor import Auditor
from halfstep.policy import Policy

pytestmark = pytest.mark.usefixtures("kernels_stay")

LOW = ["bf16", "fp16"]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def line_of(function, text):
    """The one line of ``function`` that holds ``text``."""
    lines, first = getsourcelines(function)
    (place,) = [first + i for i, line in enumerate(lines) if text in line]
    return place


# --- formulas that lose their digits, and their right twins ---------------------------------------------------------


def naive_variance(x):
    square = (x * x).mean(-1)
    variance = square - x.mean(-1) ** 2
    return variance.float().sum()


def right_variance(x):
    return x.float().var(-1).sum()


def one_minus_cos(x):
    return (1 - x.cos()).float().sum()


def right_cos(x):
    return (2 * (x.float() / 2).sin() ** 2).sum()


def distance_of_probabilities(x):
    other = x.detach() + 0.02 * normal(*x.shape, seed=1).to(x.dtype)
    low, near = x.softmax(-1).to(x.dtype), other.softmax(-1).to(x.dtype)
    return (low - near).float().abs().sum()


def right_distance(x):
    return (x.float().softmax(-1) - x.detach().float().softmax(-1).roll(1, 0)).abs().sum()


def reward_margin(x):
    chosen = x.float().sum(-1).to(x.dtype)
    rejected = (x.float() * 0.999).sum(-1).to(x.dtype)
    return (chosen - rejected).float().sum()


def right_margin(x):
    x = x.float()  # once: the gradients of both uses meet in fp32
    return (x.sum(-1) - (x * 0.999).sum(-1)).sum()


def phase_of_time(x):
    time = (998.4 - x.float()).to(x.dtype)
    return (time.float() * 0.7).sin().sum()


def right_phase(x):
    return ((998.4 - x.float()) * 0.7).sin().sum()


LOSSES = {
    "E[x^2] - E[x]^2": (naive_variance, "square - x.mean", right_variance, normal(16, 256) + 8),
    "1 - cos": (one_minus_cos, "1 - x.cos", right_cos, normal(64) / 20),
    "near probabilities": (distance_of_probabilities, "low - near", right_distance, normal(16, 200) * 2),
    "a small margin of long sums": (reward_margin, "chosen - rejected", right_margin, normal(4, 300).abs()),
    "a time in 16 bit": (phase_of_time, ".sin()", right_phase, normal(64)),
}


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", LOSSES)
def test_a_formula_that_cancels_is_named_with_its_line(name, policy):
    faulty, text, right, x = LOSSES[name]
    report = audit_loss(faulty, x, policy=policy)
    forward = [op for op in report.failed if op.phase == "forward"]
    assert {(op.module, op.kind, op.line) for op in forward} == {(None, "cancellation", line_of(faulty, text))}
    assert forward[0].error >= forward[0].limit
    assert forward[0].unit == "u max|x|, whole step"
    assert forward[0].file == __file__
    assert forward[0].passed is False
    assert report.found
    report = audit_loss(right, x, policy=policy)
    assert report.failed == ()
    assert report.advice == ()
    assert not report.found


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_variance_of_numbers_around_zero_needs_no_other_formula(policy, size):
    report = audit_loss(naive_variance, normal(16, 256) * size, policy=policy)
    assert report.failed == ()


def test_what_rounded_the_inputs_is_named_too():
    report = audit_loss(phase_of_time, normal(64), policy="bf16")
    assert report.failed[0].sources[0] == ("_to_copy", __file__, line_of(phase_of_time, "998.4"))
    assert report.failed[0].sources[0][2] != report.failed[0].line


# --- what is hard and right -------------------------------------------------------------------------------------------


def confident(x):
    return F.cross_entropy((x + 12 * torch.eye(*x.shape, dtype=x.dtype)).float(), torch.arange(len(x)))


def sure_of_two(x):
    """The label leads by 7, so that 1 - p is 1e-3, and both logits are large: their rounding is 3 % of the gradient."""
    eye = torch.eye(*x.shape, dtype=x.dtype)
    return F.cross_entropy((x / 8 + 80 * eye + 73 * eye.roll(1, 1) - 40).float(), torch.arange(len(x)))


def equal_values(x):
    q = x[None, None]
    return F.scaled_dot_product_attention(q, q.flip(2), (1 + q / 100).to(q.dtype)).float().square().sum()


def bias_before_a_norm(x):
    return F.group_norm(x.float().view(4, 4, 16) + x.float().mean(), 1).cos().sum()


def signed_mean(x):
    centred = (x.float() - x.float().mean()) * 1.1 + 1e-5
    return centred.to(x.dtype).float().mean()


def centred(x):
    x = (x + 8).repeat(8, 8).flatten()  # the gradients of the mean are nearly zero in sum, and their errors all alike
    y = (x - x.mean()).float()
    return (y.square() + y**3 / 1000).sum()


def offset_norm(x):
    return F.layer_norm(x.float() + 1000, x.shape[-1:]).sin().sum()


def spectrum(x):
    return torch.fft.rfft(x.float()).abs().square().mean()


def unit_vectors(x):
    return F.normalize(x.float(), dim=-1).square().sum()


def straight_through(x):
    return (x + (x.round() - x).detach()).float().sum()


def half_weights(x):
    return x.softmax(-1).cumsum(-1).log1p().sum()


@pytest.mark.parametrize("policy", [*LOW, "fp32"])
@pytest.mark.parametrize(
    "loss",
    [
        confident,
        sure_of_two,
        centred,
        equal_values,
        bias_before_a_norm,
        signed_mean,
        offset_norm,
        spectrum,
        unit_vectors,
        straight_through,
        half_weights,
    ],
)
def test_what_cancels_by_construction_or_by_chance_is_no_fault(loss, policy):
    assert audit_loss(loss, normal(16, 16), policy=policy).failed == ()


# --- overflow, and eps that vanishes ---------------------------------------------------------------------------------


def plain_logsumexp(x):
    return x.exp().sum(-1).log().float().sum()


def right_logsumexp(x):
    return x.logsumexp(-1).sum()


@pytest.mark.parametrize("policy", [*LOW, "fp32"])
@pytest.mark.parametrize(("shift", "kind"), [(100.0, "overflow"), (800.0, "overflow"), (-120.0, "underflow")])
def test_a_log_of_sums_without_the_largest_fails_in_every_format(policy, shift, kind):
    x = normal(8, 64) * 3 + shift
    report = audit_loss(plain_logsumexp, x, policy=policy)
    first = report.failed[0]
    assert (first.kind, first.op) == (kind, "exp" if kind == "overflow" else "log")
    assert first.line == line_of(plain_logsumexp, "exp()")
    assert first.error == math.inf
    assert report.advice[0].text == "subtract the largest number before exp, as torch.logsumexp does"
    assert policy == "fp32" or report.sheet().closing == ["Not the precision: fp32 fails as well."]
    assert audit_loss(right_logsumexp, x, policy=policy).failed == ()


def log_of_size(x):
    size = torch.relu(x)
    return torch.log(size + 1e-8).float().sum()


def clamped_probability(x):
    p = x.sigmoid().clamp(1e-4, 1 - 1e-4)
    return -(1 - p).log().float().sum()


def norm_by_hand(x):
    length = x.norm(dim=-1, keepdim=True).to(x.dtype)
    return (x / (length + 1e-12)).float().sum()


@pytest.mark.parametrize(
    ("loss", "text", "x", "fails"),
    [
        (log_of_size, "torch.log(", normal(64), {"fp16": "underflow", "bf16": None, "fp32": None}),
        (clamped_probability, "(1 - p).log", normal(64) * 8, {"fp16": "underflow", "bf16": "underflow", "fp32": None}),
        (norm_by_hand, "length + 1e-12", torch.zeros(2, 8), {"fp16": "underflow", "bf16": None, "fp32": None}),
    ],
)
def test_an_eps_that_vanishes_is_named_where_it_is_missed(loss, text, x, fails):
    for policy, kind in fails.items():
        report = audit_loss(loss, x, policy=policy)
        first = report.failed[0] if report.failed else None
        assert (first and first.kind) == kind, (policy, report)
        if first is not None:
            assert first.line == line_of(loss, text)
            assert "in float64" in first.note
            assert any(a.result == "mends it" for a in report.advice)


def too_large(x):
    return (x * 300).square().to(x.dtype).float().mean()


def test_a_value_beyond_the_format_is_an_overflow_with_its_size():
    report = audit_loss(too_large, normal(64), policy="fp16")
    first = report.failed[0]
    assert (first.kind, first.op, first.line) == ("overflow", "_to_copy", line_of(too_large, "square"))
    assert "does not fit into fp16, whose largest number is 65504" in first.note
    assert audit_loss(too_large, normal(64), policy="bf16").failed == ()


def masked(x):
    scores = x.masked_fill(torch.eye(*x.shape, dtype=torch.bool), -math.inf)
    return scores.softmax(-1).square().sum()


def masked_with_numbers(x):
    scores = x + torch.eye(*x.shape, dtype=x.dtype) * torch.finfo(x.dtype).min
    return scores.softmax(-1).square().sum()


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("loss", [masked, masked_with_numbers])
def test_a_mask_is_no_overflow(loss, policy):
    assert audit_loss(loss, normal(8, 8) - 30, policy=policy).failed == ()


# --- custom functions ------------------------------------------------------------------------------------------------


def right_product(x):
    return (x @ normal(x.shape[1], 4, seed=1).to(x.dtype)).float().square().mean()


def low_accumulate(x):
    return LowAccumulate.apply(x, normal(x.shape[1], 4, seed=1).abs().to(x.dtype)).float().mean()


@pytest.mark.parametrize("policy", LOW)
def test_a_right_product_passes_in_the_units_of_its_factors(policy):
    report = audit_loss(right_product, normal(8, 1024), policy=policy)
    assert report.failed == ()
    products = [op for op in report.ops if op.op == "mm"]
    assert {op.unit for op in products} == {"u |A||B|"}
    assert {op.phase for op in products} == {"forward", "backward"}
    assert all(op.error <= 1.0 for op in products)


def test_a_custom_product_that_adds_up_in_bf16_fails():
    report = audit_loss(low_accumulate, normal(2, 128).abs(), policy="bf16")
    (failed,) = report.failed
    assert (failed.op, failed.kind, failed.phase) == ("add", "accumulation", "forward")
    assert failed.file.endswith("audit_nets.py")
    assert failed.note.startswith("its rounding builds up over 1")


@pytest.mark.parametrize("policy", LOW)
def test_a_kernel_that_adds_up_in_16_bit_fails_by_its_own_unit(policy):
    """torch's own for the rows of a table, on a CPU outside of a region that mends it (cpu16.sums)."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[policy]
    gradient, rows = normal(2000, 4).abs().to(dtype), torch.zeros(2000, dtype=torch.long)
    auditor = Auditor(nn.Identity(), Policy(policy))
    with auditor:
        torch.ops.aten.embedding_dense_backward(gradient, rows, 3, -1, False)
        torch.mm(gradient.T, gradient)
    embedding, product = (calls[0] for calls in auditor.calls.values())
    assert (embedding.kind, embedding.unit) == ("inexact", "u |A||B|")
    assert embedding.error > 3 * embedding.limit
    assert (product.kind, product.unit) == (None, "u |A||B|")
    assert product.error <= 1.0


class CancellingBackward(torch.autograd.Function):
    """Of x^2 / 2 the difference quotient, by hand."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x / 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        ahead, behind = (x + 0.1) * (x + 0.1), x * x
        return gradient * (ahead - behind) * 5


def cancelling_backward(x):
    return CancellingBackward.apply(x).float().sum()


@pytest.mark.parametrize("policy", LOW)
def test_a_custom_backward_that_cancels_is_named_with_its_line(policy):
    report = audit_loss(cancelling_backward, normal(64) + 20, policy=policy)
    (failed,) = report.failed
    assert (failed.op, failed.kind, failed.phase) == ("sub", "cancellation", "backward")
    assert failed.line == line_of(CancellingBackward.backward, "ahead - behind")
    assert failed.file == __file__


@pytest.fixture
def library():
    """Operations that torch does not know: one kernel in fp32 alone, one product that adds up in fp16."""
    library = torch.library.Library("halfstep_test", "FRAGMENT")
    library.define("narrow(Tensor x) -> Tensor")

    def narrow(x):
        if x.dtype != torch.float32:
            raise RuntimeError("narrow is not implemented for this dtype")
        return x.clone()

    library.impl("narrow", narrow, "CPU")
    yield torch.ops.halfstep_test
    library._destroy()


def test_an_operation_that_exists_in_fp32_only_says_so(library):
    class Narrow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return library.narrow(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    report = audit_loss(lambda x: Narrow.apply(x.float()).sum(), normal(4), policy="bf16")
    (row,) = [op for op in report.ops if op.op == "narrow"]
    assert (row.passed, row.error, row.unit, row.note) == (None, None, "-", "exists in fp32 only")
    assert not report.found
    assert "narrow (exists in fp32 only)" in str(report)


def test_an_operation_without_float64_is_held_against_fp32(library):
    library_2 = torch.library.Library("halfstep_test", "FRAGMENT")
    library_2.define("mean_of(Tensor x, int faults) -> Tensor")

    def mean_of(x, faults):
        if x.dtype == torch.float64:
            raise RuntimeError("not implemented for Double")
        return (x.float().mean() * (1 + (faults if x.dtype != torch.float32 else 0))).to(x.dtype)

    library_2.impl("mean_of", mean_of, "CPU")
    try:
        for faults, kind in ((0, None), (1, "inexact")):
            report = audit_loss(
                lambda x, faults=faults: x.float().sum() + torch.ops.halfstep_test.mean_of(x.detach(), faults),
                normal(64) + 1,
                policy="bf16",
            )
            (row,) = [op for op in report.ops if op.op == "mean_of"]
            assert row.kind == kind
            assert row.note == "against fp32, for it has no float64"
    finally:
        library_2._destroy()


# --- report and advice -----------------------------------------------------------------------------------------------


def test_the_report_is_strict_json_with_the_promised_keys_and_reads_well():
    report = audit_loss(plain_logsumexp, normal(8, 64) * 3 + 100, policy="fp16")
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["policy"] == "fp16"
    for op in data["ops"]:
        assert {"module", "op", "phase", "error", "unit", "passed"} <= op.keys()
    assert [op["error"] for op in data["ops"] if not op["passed"]] == ["Infinity"]
    assert {"text", "policy", "result"} == data["advice"][0].keys()
    text = str(report)
    assert text.startswith("fp16: 1 of ")
    assert "the worst is exp (overflow) of the loss function at test_audit.py:" in text
    assert "Passes: " in text


def test_advice_is_tried_by_auditing_again():
    report = audit_loss(naive_variance, normal(16, 256) + 8, policy="fp16")
    first = report.advice[0]
    lines = [line_of(naive_variance, text) for text in ("square = ", "square - ")]
    places = ", ".join(f"test_audit.py:{line}" for line in lines)
    assert first.text == f"compute in fp32, with .float() on what it takes: {places}"
    assert first.result == "mends it"
    assert {a.result for a in report.advice[1:]} == {"not tried"}


class Normalise(nn.Module):
    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2 + 1e-3).sqrt()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(16, 256), Normalise(), nn.Linear(256, 4)
        with torch.no_grad():
            self.stem.weight.mul_(2)
            self.stem.bias.fill_(8.0)

    def forward(self, x):
        return self.head(self.norm(self.stem(x)).to(x.dtype))


def captured(model, policy, x, **options):
    labels = torch.arange(len(x)) % 4
    return Capture(model, lambda: F.cross_entropy(model(x).float(), labels), Policy.parse(policy), **options)


def test_a_module_that_normalises_by_hand_is_named_and_a_policy_proposed():
    torch.default_generator.manual_seed(0)
    model = Net()
    report = audit_of(captured(model, "bf16", normal(32, 16)))
    forward = [op for op in report.failed if op.phase == "forward"]
    assert {op.module for op in forward} == {"norm"}
    assert ("keep norm in fp32", "bf16 module:norm=fp32") in [(a.text, a.policy) for a in report.advice]
    assert [a.result for a in report.advice if a.text == "keep norm in fp32"] != ["not tried"]
    assert all(p.grad is None for p in model.parameters())
    model.norm = nn.LayerNorm(256)
    assert audit_of(captured(model, "bf16", normal(32, 16))).failed == ()


def test_a_scale_that_overflows_is_lowered_first():
    torch.default_generator.manual_seed(0)
    model = nn.Linear(16, 4)
    report = audit_of(captured(model, "fp16", normal(32, 16), scale=2.0**24))
    assert 1 < report.scale < 2.0**24
    assert report.failed == ()


def test_gradients_that_vanish_altogether_are_an_underflow():
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    x = normal(32, 16)
    capture = Capture(model, lambda: model(x).float().mean() * 1e-9, Policy.parse("fp16"), scale=1.0)
    report = audit_of(capture)
    assert {op.kind for op in report.failed} == {"underflow"}
    assert {op.phase for op in report.failed} == {"backward"}
    assert audit_of(Capture(model, capture.closure, Policy.parse("fp16"), scale=2.0**16)).failed == ()


def test_the_predictions_of_a_loss_are_what_requires_a_gradient():
    target, x = normal(16, 4, seed=1), normal(16, 4)
    seen = {}

    def loss(target, prediction, weight):
        seen.update(target=target.dtype, prediction=prediction.dtype, weight=weight)
        return (target - prediction.float()).square().mean() * weight

    report = audit_loss(loss, target, x.requires_grad_(), 2.0, policy="bf16")
    assert seen == {"target": torch.float32, "prediction": torch.bfloat16, "weight": 2.0}
    assert report.failed == ()


def test_a_loss_without_a_floating_tensor_is_refused():
    with pytest.raises(HalfstepError, match="audit_loss\\(loss, logits, labels\\)"):
        audit_loss(lambda x: x.sum(), torch.arange(4))
