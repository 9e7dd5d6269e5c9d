"""Ranges of a captured micro-batch: what is measured, in which format, and what is found and advised."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from reference.loop import assert_same
from reference.ranges import counts, gaussian_pct
from torch import nn

from halfstep import Workload
from halfstep.diagnosis.capture import Capture
from halfstep.errors import HalfstepError
from halfstep.explain.ranges import ranges, ranges_of, scale_for
from halfstep.policy import Policy
from halfstep.source import Source

pytestmark = pytest.mark.usefixtures("kernels_stay", "_seeded")
PLAIN = "fp16 scale=none"


@pytest.fixture
def _seeded():
    torch.default_generator.manual_seed(0)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def source(model, loss, optimizer=sgd, batches=(None,), **fields):
    return Source("planted", lambda seed: Workload(model, list(batches), loss, optimizer, **fields))


def captured(model, loss, policy=PLAIN, scale=1.0):
    return Capture(model, lambda: loss(model), Policy.parse(policy), scale=scale)


def row(report, module, kind):
    (found,) = [r for r in report.modules if (r.module, r.kind) == (module, kind)]
    return found


def rows_of(report):
    return {(r.module, r.kind) for r in report.modules}


def planted(*gradients):
    """A linear layer for each gradient, whose output gets exactly that one, and their loss."""
    model = nn.ModuleList(nn.Linear(4, g.shape[-1]) for g in gradients)
    x = torch.ones(gradients[0].shape[0], 4)

    def loss(model, batch=None):
        return sum((layer(x).float() * g).sum() for layer, g in zip(model, gradients, strict=True))

    return model, loss


# --- Gaussian gradients --------------------------------------------------------------------------------------------

N = 200_000


@pytest.mark.parametrize(
    ("sigma", "zero_pct", "subnormal_pct"),
    [(1e-8, 99.7, 0.3), (3e-8, 68.0, 32.0), (1e-7, 23.5, 76.5), (1e-6, 2.4, 97.6), (1e-5, 0.24, 99.8)],
)
def test_gaussian_gradients_lose_what_the_formula_says(sigma, zero_pct, subnormal_pct):
    gradient = sigma * torch.randn(N // 100, 100, generator=torch.Generator().manual_seed(0))
    report = ranges(source(*planted(gradient)), Policy.parse(PLAIN), step=1)
    found = next(m for m in report.to_dict()["modules"] if (m["module"], m["kind"]) == ("0", "gradient"))
    for share, exact in zip((found["zero_pct"], found["subnormal_pct"]), gaussian_pct(sigma), strict=True):
        # Four standard errors of a share of N values.
        assert share == pytest.approx(exact, abs=400 * math.sqrt(exact / 100 * (1 - exact / 100) / N) + 1e-9)
    assert found["zero_pct"] == pytest.approx(zero_pct, abs=0.4)
    assert found["subnormal_pct"] == pytest.approx(subnormal_pct, abs=0.5)
    flushed, subnormal, _ = counts(gradient, "fp16")
    assert (found["zero_pct"], found["subnormal_pct"]) == (100 * flushed / N, 100 * subnormal / N)


def test_bf16_flushes_none_of_them():
    gradients = [s * torch.randn(100, 100) for s in (1e-8, 1e-7, 1e-6)]
    report = ranges(source(*planted(*gradients)), Policy("bf16"), step=1)
    for i in range(3):
        found = row(report, str(i), "gradient")
        assert (found.format, found.meets, found.zero_pct, found.loss.subnormal) == ("bf16", True, 0.0, 0)
        assert found.best_scale == 1.0
    assert not report.found


def test_a_loss_scale_moves_what_is_lost_and_is_seen_before_and_after():
    gradient = 1e-7 * torch.randn(200, 100, generator=torch.Generator().manual_seed(0))
    model, loss = planted(gradient)
    found = row(ranges_of(captured(model, loss, "fp16", scale=2.0**10)), "0", "gradient")
    assert found.unscaled.flushed == counts(gradient, "fp16")[0]
    assert found.loss.flushed == counts(gradient, "fp16", 2.0**10)[0]
    assert 0 < found.loss.flushed < found.unscaled.flushed
    assert found.loss.headroom_bits == pytest.approx(math.log2(65504 / (gradient.abs().max().item() * 1024)))
    assert found.histogram.largest == gradient.abs().max()


# --- what is found -------------------------------------------------------------------------------------------------


def test_a_flush_is_found_where_it_holds_a_part_of_the_sum():
    generator = torch.Generator().manual_seed(0)
    gradients = [s * torch.randn(300, 100, generator=generator) for s in (1e-7, 1e-6)]
    report = ranges_of(captured(*planted(*gradients)))
    # At 1e-6 fp16 flushes 2.4 % of the values, but those are 0.04 % of the sum: 1 - exp(-(2^-25 / 1e-6)^2 / 2).
    first, second = row(report, "0", "gradient"), row(report, "1", "gradient")
    assert [first.flushes, second.flushes] == [True, False]
    assert second.zero_pct == pytest.approx(2.4, abs=0.3)
    assert second.loss.lost_sum_pct == pytest.approx(0.044, rel=0.35)  # the middle of a bin is off by a third at most
    assert first.loss.lost_sum_pct == pytest.approx(4.3, rel=0.35)
    assert report.found
    assert report.headline.startswith("fp16 flushes 23.")
    assert "gradient of 0 to zero at a loss scale of 1." in report.headline


def test_the_sentence_names_the_part_and_not_what_only_hands_it_on():
    gradient = 1e-8 * torch.randn(200, 10)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 10)))
    report = ranges_of(captured(model, lambda m: (m(torch.ones(200, 4)).float() * gradient).sum()))
    assert row(report, "", "gradient").flushes
    assert " of 0.0 to zero at a loss scale of 1." in report.headline


def test_noise_that_is_flushed_is_not_found():
    """Half of the values are rounding noise, as in the bias of a key projection: none of the sum."""
    gradient = torch.cat([1e-9 * torch.randn(50, 10), 1e-2 * torch.randn(50, 10)])
    report = ranges_of(captured(*planted(gradient)))
    assert row(report, "0", "gradient").zero_pct == pytest.approx(50, abs=1)
    assert not report.found


def test_the_scale_that_is_advised_mends_it_and_was_tried():
    gradient = 1e-7 * torch.randn(200, 100, generator=torch.Generator().manual_seed(0))
    report = ranges_of(captured(*planted(gradient)))
    assert report.best_scale > 2**10
    first, *rest = report.advice
    assert (first.text, first.result) == (f"raise the loss scale to {report.best_scale:.0f}", "mends it")
    assert {advice.result for advice in rest} == {"not tried"}
    policy = Policy.parse(first.policy)
    assert policy.scale.kind == "dynamic"
    assert not ranges_of(captured(*planted(gradient), first.policy, policy.scale.init)).found


def test_a_scale_that_is_too_large_is_lowered():
    gradient = torch.randn(20, 10)
    report = ranges_of(captured(*planted(gradient), "fp16", 2.0**24))
    assert row(report, "0", "gradient").overflows
    assert report.headline.startswith("The weight gradient of 0 overflows fp16 at a loss scale of 16777216: it reaches")
    assert report.advice[0].text.startswith("lower the loss scale to ")
    assert report.advice[0].result == "mends it"


def test_best_scales_lie_beyond_the_bounds_of_the_settings_only_if_they_are_widened():
    gradient = 1e-13 * torch.randn(20, 10)
    report = ranges_of(captured(*planted(gradient), "fp16", 2.0**16))
    policy = Policy.parse(report.advice[0].policy)
    assert policy.scale.init == policy.scale.ceiling == report.best_scale > 2**24
    static = ranges_of(captured(*planted(gradient), "fp16 scale=static", 2.0**16))
    assert static.advice[0].policy == f"fp16 scale=static scale.init={report.best_scale:.0f}"


def test_proposals_are_tried_at_the_scale_that_they_would_run_at():
    model, loss = planted(torch.randn(3, 3))
    capture = captured(model, loss, "fp16", 64.0)
    scales = {"fp16 module:0=fp32": 64.0, "fp16 scale.init=1024": 1024.0, "bf16": 1.0, "fp16 scale=none": 1.0}
    assert {text: scale_for(capture, Policy.parse(text)) for text in scales} == scales


def test_what_leaves_the_run_not_finite_mends_nothing():
    """A gradient is flushed, and inside of another module an overflow hides."""
    gradient = 1e-7 * torch.randn(200, 10)
    model = nn.Sequential(nn.Linear(4, 10), nn.ModuleDict({"inside": Inside()}))

    def loss(model):
        out = model[0](torch.ones(200, 4))
        return (out.float() * gradient).sum() + model[1]["inside"](out.detach()).float().mean()

    report = ranges_of(captured(model, loss))
    assert row(report, "0", "gradient").flushes
    results = [(advice.text.split()[0], advice.result) for advice in report.advice]
    # In fp32 it hands fp32 on, in which the other one computes as well.
    assert results == [("raise", "does not"), ("keep", "mends it"), ("use", "not tried")]


class Inside(nn.Module):
    def forward(self, x):
        return (x * 60000 * 60000) / 60000 / 60000


class Loud(nn.Module):
    """A linear layer whose output is beyond fp16, and one after it."""

    def __init__(self):
        super().__init__()
        self.loud, self.after = nn.Linear(4, 4), nn.Linear(4, 1)
        with torch.no_grad():
            self.loud.weight.fill_(2e4)
            self.after.weight.fill_(1e-3)

    def forward(self, x):
        return self.after(self.loud(x)) * 1e-6


def test_an_activation_that_overflows_is_found_and_what_mends_it_is_measured():
    model = nn.Sequential(nn.Linear(4, 4), Loud())
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    report = ranges_of(captured(model, lambda m: m(torch.ones(2, 4)).float().mean(), "fp16", 2.0**6))
    loud = row(report, "1.loud", "activation")
    assert loud.overflows
    assert -4 < loud.loss.headroom_bits < -1
    assert not report.is_finite
    assert report.fp32_is_finite
    results = {advice.text: advice.result for advice in report.advice}
    # Its output is cast to fp16 by the next layer, so the module alone does not do; with that layer it does.
    assert results["keep 1.loud in fp32"] == "does not"
    assert results["keep 1 in fp32"] == "mends it"
    assert results["use bf16, which has the range of fp32"] == "not tried"


def test_an_activation_that_vanishes_is_found_as_well():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.copy_(1e-10 * torch.randn(4, 4))
    report = ranges_of(captured(model, lambda m: m(torch.randn(9, 4)).float().mean(), "fp16", 2.0**10))
    assert report.headline == "fp16 flushes 100 % of the activation of 0 to zero."
    assert report.found
    assert [a.result for a in report.advice if a.text == "use bf16, which has the range of fp32"] == ["mends it"]


def test_fp32_that_fails_as_well_is_said():
    model, loss = planted(torch.tensor([[math.inf]]))
    report = ranges_of(captured(model, loss))
    assert report.found
    assert report.headline == "Not the precision: fp32 is not finite either at step 1."
    assert report.advice[0].text.startswith("Not the precision: fp32 fails as well at step 1")
    assert report.notes == ("No weight updates: there is no optimizer.",)


def test_a_failure_between_the_borders_of_modules_is_no_success():
    model = nn.Sequential(nn.Linear(4, 4), Inside(), nn.Linear(4, 1))
    report = ranges_of(captured(model, lambda m: m(torch.ones(2, 4)).float().mean()))
    assert not any(r.overflows or r.flushes for r in report.modules)
    assert report.found
    assert "halfstep trace" in report.headline
    assert "mends it" in {advice.result for advice in report.advice if advice.policy}


# --- formats that values meet --------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """An embedding and norms, which autocast keeps in fp32, and linear layers, which it does not."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.lin = nn.Embedding(5, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.last = nn.LayerNorm(8)

    def forward(self, ids):
        x = self.table(ids)
        return self.last(x + self.lin(self.norm(x)))


def mixed(policy, scale=1.0):
    torch.default_generator.manual_seed(0)
    return ranges_of(captured(Mixed(), lambda m: m(torch.arange(5)).float().square().mean(), policy, scale))


def test_only_what_is_16_bit_or_cast_to_it_meets_the_format():
    report = mixed("fp16", 2.0**30)
    meets = {(r.module, r.kind): r.meets for r in report.modules}
    for kind in ("activation", "gradient"):
        assert meets["lin", kind]
        assert meets["norm", kind]  # fp32, and cast by the linear layer that reads it
        assert not meets["table", kind]
        assert not meets["last", kind]
        assert not meets["", kind]
    assert {name for (name, kind), met in meets.items() if kind == "weight gradient" and met} == {"lin"}
    # What autocast keeps in fp32 is laid against fp16 all the same, and never found.
    last = row(report, "last", "weight gradient")
    assert (last.format, last.loss.overflows, last.overflows) == ("fp16", True, False)


def test_the_scale_has_to_suit_only_what_meets_16_bit():
    report = mixed("fp16")
    used = [row(report, *key) for key in (("lin", "gradient"), ("norm", "gradient"), ("lin", "weight gradient"))]
    largest = max(r.histogram.largest for r in used)
    ((histogram, format),) = report.gradients
    assert format.name == "fp16"
    assert histogram.largest == largest
    assert histogram.num_nonzero == sum(r.histogram.num_nonzero for r in used)
    everything = {r.module: r.histogram.largest for r in report.modules if r.kind == "weight gradient"}
    assert max(everything.values()) > largest  # a norm's, in fp32


def test_a_module_in_fp32_loses_nothing_but_what_a_cast_reads():
    gradients = [1e-8 * torch.randn(30, 10) for _ in range(2)]
    model, loss = planted(*gradients)
    report = ranges_of(captured(model, loss, "fp16 module:0=fp32 scale=none"))
    first, second = row(report, "0", "gradient"), row(report, "1", "gradient")
    assert (first.format, first.meets, first.zero_pct, first.best_scale) == ("fp32", False, 0.0, 1.0)
    assert (second.format, second.meets) == ("fp16", True)
    assert second.zero_pct > 95
    report = mixed("fp16 module:norm=fp32 module:lin=fp32")
    assert not any(r.meets for r in report.modules if r.module in ("norm", "lin"))
    assert row(mixed("fp16 module:norm=fp32"), "norm", "gradient").format == "fp16"  # the linear layer casts it


def test_a_16_bit_rule_in_an_fp32_policy_is_seen():
    model, loss = planted(torch.randn(30, 10), torch.randn(30, 10))
    report = ranges_of(captured(model, loss, "fp32 module:1=fp16"))
    assert [row(report, str(i), "gradient").format for i in range(2)] == ["fp32", "fp16"]
    assert [format.name for _, format in report.gradients] == ["fp16"]


def test_fp32_has_nothing_to_lose():
    report = ranges_of(captured(*planted(1e-8 * torch.randn(30, 10)), "fp32"))
    assert not report.found
    assert {(r.format, r.meets, r.zero_pct) for r in report.modules} == {("fp32", False, 0.0)}


# --- which values --------------------------------------------------------------------------------------------------


class Shapes(nn.Module):
    """A layer called twice, one never, one that is frozen, one behind a detach, two that share their weight."""

    def __init__(self):
        super().__init__()
        self.twice, self.unused, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.cut, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        x = self.frozen(self.twice(self.twice(x)))
        return self.a(x) + self.b(x) + self.cut(x.detach()) * 0


def test_every_module_counts_what_it_really_did():
    torch.default_generator.manual_seed(0)
    model = Shapes()
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    report = ranges_of(captured(model, lambda m: m(torch.ones(3, 4)).float().square().sum()), optimizer)
    found = rows_of(report)
    assert row(report, "twice", "activation").histogram.num_nonzero == 2 * 12
    assert row(report, "twice", "gradient").histogram.num_nonzero == 2 * 12
    assert row(report, "twice", "weight gradient").histogram.num_nonzero == 16 + 4
    assert not [key for key in found if key[0] == "unused"]
    assert {kind for name, kind in found if name == "frozen"} == {"activation", "gradient"}
    cut = row(report, "cut", "gradient")
    assert (cut.histogram.num_zeros, cut.histogram.num_nonzero) == (12, 0)
    assert (cut.zero_pct, cut.loss.headroom_bits, cut.best_scale, cut.flushes) == (0.0, None, None, False)
    assert row(report, "cut", "update").histogram.num_nonzero == 0
    # A shared weight stands at both owners and counts once in all.
    assert row(report, "a", "weight gradient").histogram == row(report, "b", "weight gradient").histogram
    ((histogram, _),) = report.gradients
    names = [("twice", "gradient"), ("twice", "weight gradient"), ("frozen", "gradient"), ("a", "weight gradient")]
    # The sum of a and b hands one gradient to both and to the model, and one of the other shape to the cut.
    assert histogram.num_nonzero == sum(row(report, *key).histogram.num_nonzero for key in names) + 12


def test_the_gradients_are_those_of_plain_autograd():
    torch.default_generator.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(6, 4)
    report = ranges_of(captured(model, lambda m: m(x).float().square().mean(), "fp16", 2.0**8))
    hidden = model[0](x)
    out = model[2](torch.tanh(hidden))
    gradients = torch.autograd.grad(out.square().mean(), [hidden, out, *model.parameters()])
    assert row(report, "0", "gradient").histogram.largest == pytest.approx(gradients[0].abs().max().item(), rel=1e-5)
    assert row(report, "2", "gradient").histogram.largest == pytest.approx(gradients[1].abs().max().item(), rel=1e-5)
    largest = max(g.abs().max().item() for g in gradients[2:4])
    assert row(report, "0", "weight gradient").histogram.largest == pytest.approx(largest, rel=1e-5)
    assert row(report, "0", "activation").histogram.largest == pytest.approx(hidden.abs().max().item(), rel=1e-6)


def test_a_model_that_fp32_cannot_run_is_measured_in_its_policy():
    class Casts(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            return self.lin(x.half())

    gradient = 2.0**-12 * torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).half().float()
    report = ranges_of(
        captured(Casts(), lambda m: (m(torch.ones(5, 4)).float() * gradient).sum(), "fp16", scale=2.0**10)
    )
    found = row(report, "lin", "gradient")
    assert found.histogram.largest == gradient.abs().max()  # not times the scale
    assert found.loss.headroom_bits == pytest.approx(math.log2(65504 / 1024 / gradient.abs().max().item()))
    assert report.fp32_is_finite is None
    assert report.notes[-1].startswith("fp32 cannot run this model (")
    assert not report.found


# --- weight updates ------------------------------------------------------------------------------------------------


def trained(optimizer, steps=3):
    torch.default_generator.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)), torch.randn(6, 4)
    made = optimizer(model.parameters())
    for _ in range(steps):
        model(x).square().mean().backward()
        made.step()
        made.zero_grad()
    return model, made, lambda m: m(x).float().square().mean()


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [None, 1e-3])
def test_updates_are_those_of_the_next_step_and_move_nothing(optimizer, max_norm):
    model, made, loss = trained(optimizer)
    steps = []
    made.register_step_post_hook(lambda *_: steps.append(1))
    before = copy.deepcopy((model.state_dict(), made.state_dict()))
    report = ranges_of(captured(model, loss), made, max_norm)
    assert_same((dict(model.state_dict()), made.state_dict()), (dict(before[0]), before[1]))
    assert steps == []
    assert all(p.grad is None for p in model.parameters())
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss(model).backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    made.step()
    for module in ("0", "1", "2"):
        found = row(report, module, "update")
        updates = {n: p.detach() - weights[n] for n, p in model.named_parameters() if n.startswith(module)}
        largest = max(u.abs().max().item() for u in updates.values())
        # Adam divides by the root of its second moment, which magnifies the last bits of a gradient that is scaled.
        assert found.histogram.largest == pytest.approx(largest, rel=1e-3)
        lost = 0
        for name, update in updates.items():
            half = weights[name].half()
            lost += int((((half.float() + update).half() == half) & (update != 0)).sum())
        assert found.loss.flushed == pytest.approx(lost, abs=1)
        assert (found.meets, found.overflows, found.flushes, found.best_scale) == (False, False, False, None)


def test_updates_of_weights_near_one_are_lost_in_bf16():
    model, made, loss = trained(OPTIMIZERS["adamw"], steps=1)
    found = row(ranges_of(captured(model, loss, "bf16"), made), "1", "update")
    # Eight weights near 1, whose updates of 1e-3 are a quarter of half an ulp, and eight biases near 0.
    assert found.format == "bf16"
    assert found.zero_pct == pytest.approx(50)


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS evaluates the loss itself"),
        (lambda p: Broken(p), "a copy of Broken cannot step"),
    ],
)
def test_an_optimizer_that_cannot_be_tried_is_said(optimizer, why):
    model, _, loss = trained(sgd)
    report = ranges_of(captured(model, loss), optimizer(model.parameters()))
    assert "update" not in {r.kind for r in report.modules}
    assert report.notes[0].startswith(f"No weight updates: {why}")


class Broken(torch.optim.SGD):
    """Keeps something that a copy does not get."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.table = [1.0]

    def step(self, closure=None):
        self.table[0] += 1
        return super().step(closure)


# --- the tool ------------------------------------------------------------------------------------------------------


def small(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    batches = [torch.randn(6, 4) for _ in range(3)]
    return Workload(model, batches, lambda m, b: m(b).float().square().mean(), OPTIMIZERS["adamw"], max_norm=1.0)


def test_the_tool_looks_at_the_step_that_was_asked_for():
    report = ranges(Source("small", small), Policy("fp16"), step=3)
    assert (report.workload, report.policy, report.step, report.device) == ("small", "fp16", 3, "cpu")
    assert not report.found
    kinds = {kind for name, kind in rows_of(report) if name == "0"}
    assert kinds == {"activation", "gradient", "weight gradient", "update"}
    assert (
        report.headline
        == "small fits in fp16 at step 3: nothing overflows, and nothing that matters is flushed to zero."
    )
    assert ranges(Source("small", small), Policy("fp16"), step=3).to_dict() == report.to_dict()


def test_a_step_before_the_first_is_refused():
    with pytest.raises(HalfstepError, match="steps count from 1"):
        ranges(Source("small", small), Policy("fp16"), step=0)


def test_the_json_is_strict_and_has_the_keys_that_others_rely_on():
    text = json.dumps(ranges(Source("small", small), Policy("fp16"), step=2).to_dict(), allow_nan=False)
    read = json.loads(text)
    assert {"modules", "best_scale", "scale", "found", "advice"} <= set(read)
    for module in read["modules"]:
        assert {"module", "kind", "zero_pct", "subnormal_pct", "headroom_bits", "exponents", "best_scale"} <= set(
            module
        )
        assert sum(module["exponents"].values()) == module["num_nonzero"]
        assert all(int(exponent) < 20 for exponent in module["exponents"])


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["fp16 scale=none", "bf16"])
def test_a_gpu_counts_the_same(policy):
    generator = torch.Generator().manual_seed(0)
    gradient = 1e-7 * torch.randn(200, 100, generator=generator)
    model, x = nn.Linear(4, 100).cuda(), torch.ones(200, 4).cuda()
    weights = gradient.cuda()
    report = ranges_of(captured(model, lambda m: (m(x).float() * weights).sum(), policy), sgd(model.parameters()))
    found = row(report, "", "gradient")
    flushed, subnormal, _ = counts(gradient, policy.split()[0])
    assert (found.format, found.meets, found.loss.flushed, found.loss.subnormal) == (
        policy.split()[0],
        True,
        flushed,
        subnormal,
    )
    assert row(report, "", "update").histogram.num_nonzero > 0
    assert not ranges(Source("small", small), Policy.parse(policy), step=2, device="cuda").to_dict()["notes"]
