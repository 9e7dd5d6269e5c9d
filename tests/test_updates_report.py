"""What the meter for lost updates reports and advises, with and without master weights, and what it refuses."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from reference.update_nets import DTYPES, adamw, net, step, train
from torch import nn

from halfstep.errors import HalfstepError
from halfstep.stepper import Stepper
from halfstep.updates import UpdateMeter

# --- what the promise says -------------------------------------------------------------------------------------------


def test_bf16_weights_near_one_lose_all_of_adamw_and_are_told_what_to_do():
    model = net(near_one=True)
    optimizer = adamw(model, 1e-3)
    meter = UpdateMeter(model, optimizer, every=10)
    train(model, optimizer, 20)
    report = meter.report()
    assert report.step == 20
    assert report.below_half_ulp_pct > 99
    assert report.unmoved_pct == report.below_half_ulp_pct
    assert [module.module for module in report.modules] == ["0", "2"]
    assert "policy 'bf16 master=split16', 2 bytes a parameter" in report.advice
    assert "stochastic rounding ('bf16 master=stochastic', no byte)" in report.advice
    assert report.advice in str(report)
    assert json.loads(json.dumps(report.to_dict()))["modules"][0]["format"] == "bf16"


def test_a_large_step_is_not_lost():
    model = net(near_one=True)
    optimizer = adamw(model, 0.1)
    meter = UpdateMeter(model, optimizer, every=1)
    train(model, optimizer)
    report = meter.report()
    # An update of 0.1 is 25 half ulps near 1.
    assert report.unmoved_pct == 0.0
    assert report.modules[0].median_ulps > 10
    assert report.advice == ""


def test_fp16_is_eight_times_finer():
    shares = {}
    for format, dtype in DTYPES.items():
        model = net(dtype, near_one=True)
        optimizer = adamw(model, 1e-3, eps=1e-6)
        meter = UpdateMeter(model, optimizer, every=1)
        train(model, optimizer)
        shares[format] = meter.report().unmoved_pct
    # Half an ulp from 1 to 2 is 2^-8 in bf16 and 2^-11 = 4.9e-4 in fp16.
    assert shares["bf16"] == 100.0
    assert shares["fp16"] < 1


def test_fp32_weights_have_nothing_to_lose():
    model = net(torch.float32)
    optimizer = adamw(model, 1e-3)
    meter = UpdateMeter(model, optimizer, every=1)
    train(model, optimizer)
    report = meter.report()
    assert (report.step, report.modules, report.below_half_ulp_pct, report.advice) == (0, (), None, "")
    assert "No weight that the optimizer holds is stored in 16 bit" in str(report)


def test_stochastic_rounding_is_not_told_to_do_better():
    model = net(near_one=True)
    optimizer = adamw(model, 1e-3)
    meter = UpdateMeter(model, optimizer, every=1, stochastic=True)
    train(model, optimizer)
    report = meter.report()
    assert report.unmoved_pct == 100.0
    assert report.below_half_ulp_pct is None
    assert report.modules[0].median_ulps is None
    assert report.advice == ""
    assert "unmoved is not lost" in str(report)


def test_training_is_the_same_to_the_bit():
    ends = []
    for has_meter in (False, True):
        model = net()
        optimizer = adamw(model, 1e-2)
        if has_meter:
            UpdateMeter(model, optimizer, every=2)
        train(model, optimizer, 7)
        ends.append([*model.parameters(), torch.rand(1)])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


# --- beside a Stepper with 16-bit weights ----------------------------------------------------------------------------


def report_of(layout, fused=True):
    """Step 5 of AdamW at lr 1e-4 with weights near 1."""
    model = net(torch.float32, near_one=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    stepper = Stepper(model, optimizer, f"bf16 master={layout}", accumulate=2)
    exact, stochastic = stepper.masters.values_at, layout == "stochastic"
    meter = UpdateMeter(model, optimizer, every=5, num_samples=2000, exact=exact, stochastic=stochastic)
    x = torch.linspace(-1, 1, 16 * 32).reshape(16, 32).sin()
    for _ in range(5 * 2):
        stepper.step(lambda: (model(x).float() - 1).square().mean())
    return meter.report()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("layout", ["copy", "split16", "split8", "kahan"])
def test_layouts_keep_what_16_bit_alone_would_lose(layout, fused, kernels_stay):
    report = report_of(layout, fused)
    assert (report.step, report.below_half_ulp_pct) == (5, 100.0)
    # split8 and kahan have 8 bits more than the weight: 1e-4 is 3 to 7 of their steps near 1, and few are under half.
    assert report.unmoved_pct == 0.0 if layout in ("copy", "split16") else report.unmoved_pct < 5
    assert report.advice == ""
    assert [(module.module, module.num_weights) for module in report.modules] == [("0", 1024), ("2", 256)]


def test_stochastic_rounding_moves_as_many_weights_as_the_updates_have_ulps(kernels_stay):
    report = report_of("stochastic")
    (module, _) = report.modules
    share = report_of("split16").modules[0].median_ulps  # nearly every update has this size
    moved = 1 - module.unmoved_pct / 100
    # An update of r ulp moves its weight with probability r; four standard errors of 1024 draws.
    assert moved == pytest.approx(share, abs=4 * math.sqrt(share / 1024))
    assert moved > 0
    assert report.advice == ""


def test_a_skipped_window_is_no_sample(kernels_stay):
    model = net(torch.float32)
    optimizer = adamw(model, 1e-3)
    stepper = Stepper(model, optimizer, "bf16 master=split16")
    meter = UpdateMeter(model, optimizer, every=1, exact=stepper.masters.values_at)
    for factor in (1.0, math.inf):
        stepper.step(lambda factor=factor: model(torch.ones(2, 32)).float().square().mean() * factor)
        assert meter.report().step == 1


# --- what it refuses, what it prints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"every": 0}, {"every": 1.5}, {"num_samples": 0}])
def test_counts_are_whole_and_positive(options):
    model = net()
    with pytest.raises(HalfstepError, match=f"{next(iter(options))}="):
        UpdateMeter(model, adamw(model, 1e-3), **options)


def test_what_has_no_hooks_is_refused():
    class Wrapper:
        pass

    with pytest.raises(HalfstepError, match="type Wrapper: it has no hooks"):
        UpdateMeter(net(), Wrapper())


def test_a_long_report_shows_the_worst():
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(12))).bfloat16()
    for number, layer in enumerate(model):
        layer.weight.data.fill_(1.0 if number == 7 else 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    meter = UpdateMeter(model, optimizer, every=1)
    step(optimizer, *(torch.ones(4, 4, dtype=torch.bfloat16) for _ in model))
    report = meter.report()
    lines = str(report).splitlines()
    assert lines[0] == "weight updates of step 1: 8.33 % under half an ulp, 8.33 % moved no weight"
    assert lines[2].split() == ["7", "bf16", "16", "100", "%", "100", "%", "0"]
    assert lines[12] == "  and 2 more, with lower shares"
    assert report.advice.startswith("100 % of the updates of 7 in bf16 are under half an ulp and round away")


def test_advice_names_the_worst_module():
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))).bfloat16()
    for num_ones, layer in zip((4, 12, 8), model, strict=True):
        layer.weight.data.copy_((torch.arange(16) < num_ones).reshape(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    meter = UpdateMeter(model, optimizer, every=1)
    step(optimizer, *(torch.ones(4, 4, dtype=torch.bfloat16) for _ in model))
    start = "75 % of the updates of 1 in bf16, and 10 % or more of those of 2 other modules are under half an ulp"
    assert meter.report().advice.startswith(start)


@pytest.mark.parametrize(("curve", "lr"), [("weights near 1", 1e-2), ("nn.Linear(1024)", 3e-4)])
def test_the_figure_is_computed_as_it_is_measured(curve, lr, monkeypatch):
    benchmarks = Path(__file__).parent.parent / "benchmarks"
    monkeypatch.syspath_prepend(benchmarks)
    script = runpy.run_path(str(benchmarks / "figure_updates.py"))
    cdf, _ = script["CURVES"][curve]
    measured, computed = script["measured_pct"](cdf, lr), script["computed_pct"](cdf, lr)
    # Four standard errors of 16384 draws are 1.6 points at most. sqrt(v) spreads by 7 % after 100 steps, which the
    # formula leaves out: 0.5 points on the flank of either curve.
    assert measured == pytest.approx(computed, abs=2)
    assert 20 < computed < 80
