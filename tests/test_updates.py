"""The meter for lost updates: its ulp against every 16-bit number, its shares against exact arithmetic."""

from __future__ import annotations

import copy
import json
import math
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from reference import updates as twin
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.errors import HalfstepError
from halfstep.stepper import Stepper
from halfstep.updates import UpdateMeter, _draw, _take_sparse, spacing, ulp

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = pytest.mark.parametrize("format", DTYPES)
NUMBERS = {format: twin.magnitudes(format) for format in DTYPES}
# On a CUDA tensor each of these makes the host wait.
WAITING = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "allclose"}


def every_finite_number(format):
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[format])
    return numbers[numbers.isfinite()]


def in_units(value):
    """A float as the twin counts it."""
    numerator, denominator = float(value).as_integer_ratio()
    number, rest = divmod(numerator << twin.UNIT, denominator)
    assert rest == 0
    return number


def place_of(weight):
    return (weight.view(torch.int16) & 0x7FFF).tolist()


class Holder(nn.Module):
    """Weights as parameters of a module, whose gradients a test gives."""

    def __init__(self, *weights):
        super().__init__()
        self.weights = nn.ParameterList(weight.clone() for weight in weights)


def step(optimizer, *gradients):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def net(dtype=torch.bfloat16, near_one=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
    if near_one:
        for parameter in model.parameters():
            nn.init.normal_(parameter, 1.0, 0.02)
    return model.to(dtype)


def train(model, optimizer, num_steps=1):
    x = torch.linspace(-1, 1, 16 * 32).reshape(16, 32).sin().to(next(model.parameters()).dtype)
    for _ in range(num_steps):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(model, lr, **options):
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True, **options)


class MasterSGD(torch.optim.Optimizer):
    """SGD whose weights are kept in fp32, and copied into the 16-bit parameters."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.masters = {p: p.detach().float() for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure=None):
        for parameter, master in self.masters.items():
            master.sub_(parameter.grad.float(), alpha=self.param_groups[0]["lr"])
            parameter.copy_(master)
            parameter.grad = None

    def exact(self, parameter, index):
        return self.masters[parameter].take(index)


# --- the ulp ---------------------------------------------------------------------------------------------------------


@FORMATS
def test_ulp_of_every_number(format):
    weights = every_finite_number(format)
    assert len(NUMBERS[format]) == len(weights) // 2
    for place, size in zip(place_of(weights), ulp(weights).tolist(), strict=True):
        assert in_units(size) == twin.ulp(NUMBERS[format], place)


@FORMATS
def test_ulp_of_what_is_no_number(format):
    assert ulp(torch.tensor([math.inf, -math.inf, math.nan], dtype=DTYPES[format])).isnan().all()


@FORMATS
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_spacing_of_every_number_to_either_side(format, sign):
    weights = every_finite_number(format)
    sizes = spacing(weights, torch.full(weights.shape, sign))
    for weight, place, size in zip(weights.tolist(), place_of(weights), sizes.tolist(), strict=True):
        is_outward = weight == 0 or weight * sign > 0
        assert in_units(size) == twin.ulp(NUMBERS[format], place if is_outward else place - 1)


@FORMATS
def test_under_half_the_spacing_is_what_rounding_takes_back(format):
    numbers, dtype = NUMBERS[format], DTYPES[format]
    # All powers of two with their neighbours, zero, the largest, and every 61st number between.
    places = {0, len(numbers) - 1, *range(0, len(numbers), 61)}
    mantissa_bits = twin.BITS[format][1]
    places |= {p + off for p in range(0, len(numbers), 2**mantissa_bits) for off in (-1, 0, 1) if p + off >= 0}
    for sign in (1.0, -1.0):
        for weight in torch.tensor(sorted(places), dtype=torch.int16).view(dtype):
            half = in_units(spacing(weight, torch.tensor(sign))) // 2
            one, place = int(sign), place_of(weight)
            value = in_units(weight)
            finer = half >> 11
            assert twin.is_lost(numbers, value, one * (half - finer))
            assert not twin.is_lost(numbers, value, one * (half + finer))
            # The tie goes to the even neighbour, so half of all weights stay there too.
            assert twin.is_lost(numbers, value, one * half) == (place % 2 == 0)


def test_the_twin_rounds_as_torch_does():
    for format, dtype in DTYPES.items():
        torch.manual_seed(0)
        values = torch.randn(2000) * torch.randint(-30, 16, (2000,)).float().exp2()
        for value, rounded in zip(values.tolist(), values.to(dtype).tolist(), strict=True):
            assert twin.rounded(NUMBERS[format], in_units(value)) == (
                in_units(rounded) if math.isfinite(rounded) else None
            )


# --- shares against exact arithmetic ---------------------------------------------------------------------------------


def cases(format):
    """Weights, gradients and a rate whose product and sum are exact in fp32, so that torch rounds once."""
    torch.manual_seed(1)
    weights = torch.cat([torch.randn(900) / 2, torch.tensor([0.0, 0.5, -0.5, 1.0, -1.0, 2.0]).repeat(20)]).to(
        DTYPES[format]
    )
    weights = (weights * 2**14).round() / 2**14  # multiples of 2^-14 below 4 leave room for updates down to 2^-21
    gradients = torch.randint(-64, 65, weights.shape).to(DTYPES[format])
    gradients[torch.rand(weights.shape) < 0.1] = 0.0
    return weights, gradients, {"bf16": 2.0**-15, "fp16": 2.0**-18}[format]


@FORMATS
def test_plain_sgd_loses_what_exact_arithmetic_says(format):
    weights, gradients, lr = cases(format)
    model = Holder(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    meter = UpdateMeter(model, optimizer, every=1, num_samples=2000)
    step(optimizer, gradients)
    (module,) = meter.report().modules
    lost = [
        twin.is_lost(NUMBERS[format], in_units(weight), -in_units(lr * gradient))
        for weight, gradient in zip(weights.tolist(), gradients.tolist(), strict=True)
        if gradient
    ]
    assert 0.2 < sum(lost) / len(lost) < 0.8  # the case can tell
    assert module.num_samples == len(lost)
    assert module.unmoved_pct == module.below_half_ulp_pct == pytest.approx(100 * sum(lost) / len(lost), abs=1e-9)
    assert (module.module, module.format, module.num_weights) == ("weights", format, len(weights))


@FORMATS
def test_a_master_weight_shows_the_updates_that_it_keeps(format):
    weights, gradients, lr = cases(format)
    model = Holder(weights)
    optimizer = MasterSGD(model.parameters(), lr)
    meter = UpdateMeter(model, optimizer, every=1, num_samples=2000, exact=optimizer.exact)
    step(optimizer, gradients)
    report = meter.report()
    pairs = [(w, g) for w, g in zip(weights.tolist(), gradients.tolist(), strict=True) if g]
    sizes = []
    for weight, gradient in pairs:
        place = place_of(torch.tensor(weight, dtype=DTYPES[format]))
        is_outward = weight == 0 or weight * -gradient > 0
        gap = twin.ulp(NUMBERS[format], place if is_outward else place - 1)
        sizes.append(in_units(lr * abs(gradient)) / gap)
    assert report.unmoved_pct == 0.0
    assert report.below_half_ulp_pct == pytest.approx(100 * sum(size < 0.5 for size in sizes) / len(sizes), abs=1e-9)
    assert 20 < report.below_half_ulp_pct < 80
    # The weighted median of equal weights is the lower one of an even number.
    assert report.modules[0].median_ulps == sorted(sizes)[(len(sizes) - 1) // 2]
    assert report.advice == ""


def test_a_master_weight_can_lose_updates_too():
    model = Holder(torch.ones(50, dtype=torch.bfloat16))
    optimizer = MasterSGD(model.parameters(), 2.0**-30)  # fp32 has half an ulp of 2^-25 below 1
    meter = UpdateMeter(model, optimizer, every=1, exact=optimizer.exact)
    step(optimizer, torch.ones(50, dtype=torch.bfloat16))
    report = meter.report()
    # The master did not move, so only the gradient says that there was an update.
    assert (report.unmoved_pct, report.below_half_ulp_pct, report.modules[0].num_samples) == (100.0, 100.0, 50)
    assert "too small for its master weight" in report.advice
    assert "split16" not in report.advice


@FORMATS
@pytest.mark.parametrize("lr", [3e-5, 3e-4, 3e-3])
def test_first_step_of_adamw_is_lr_whatever_the_gradient(format, lr):
    torch.manual_seed(0)
    model = nn.Linear(100, 100, bias=False).to(DTYPES[format])
    # Moments in 16 bit round, and of the first step m / sqrt(v) is 1 to 2^-7; no half spacing is that near to lr.
    half = spacing(model.weight.detach(), torch.ones(()).expand(100, 100)) / 2
    assert not ((half / lr - 1).abs() < 2**-6).any()
    optimizer = adamw(model, lr, weight_decay=0.0)
    meter = UpdateMeter(model, optimizer, every=1, num_samples=10_000)
    gradient = torch.randn(100, 100).to(DTYPES[format])
    before = model.weight.detach().clone()
    step(optimizer, gradient)
    expected = spacing(before, -gradient.float()) / 2 > lr
    assert meter.report().unmoved_pct == pytest.approx(100 * expected.float().mean().item(), abs=1e-4)  # an fp32 mean


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


# --- what counts as an update ----------------------------------------------------------------------------------------


def test_rows_that_are_not_in_the_batch_do_not_count():
    torch.manual_seed(0)
    model = nn.Embedding(20, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    meter = UpdateMeter(model, optimizer, every=1)
    model(torch.tensor([3, 5, 3])).float().sum().backward()
    optimizer.step()
    (module,) = meter.report().modules
    assert (module.num_samples, module.unmoved_pct, module.module) == (8, 0.0, "")
    assert "the model itself" in str(meter.report())


def test_a_weight_that_only_momentum_moves_counts():
    model = Holder(torch.ones(10, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    meter = UpdateMeter(model, optimizer, every=2)
    step(optimizer, torch.ones(10, dtype=torch.bfloat16))
    gradient = torch.zeros(10, dtype=torch.bfloat16)
    gradient[:2] = -0.9  # cancels the momentum of the first two
    step(optimizer, gradient)
    (module,) = meter.report().modules
    assert (module.num_samples, module.unmoved_pct) == (10, pytest.approx(20))


def test_a_step_without_any_update_says_so():
    model = Holder(torch.ones(10, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = UpdateMeter(model, optimizer, every=1)
    for gradient in (torch.zeros(10, dtype=torch.bfloat16), None):
        step(optimizer, gradient)
        assert str(meter.report()) == f"No sampled weight had an update in step {meter.num_steps}."


def test_only_weights_that_this_optimizer_holds_are_watched():
    model = net()
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([*model[2].parameters()], lr=1.0)
    meter = UpdateMeter(model, optimizer, every=1)
    train(model, optimizer)
    (module,) = meter.report().modules
    assert (module.module, module.num_samples) == ("2", 256)


def test_a_shared_weight_counts_once():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).bfloat16()
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    meter = UpdateMeter(model, optimizer, every=1)
    step(optimizer, torch.ones(8, 8, dtype=torch.bfloat16))
    (module,) = meter.report().modules
    assert (module.module, module.num_weights) == ("0", 64)


def test_a_master_without_a_gradient_on_the_parameter_shows_its_updates():
    model = Holder(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterSGD(model.parameters(), 2.0**-12)
    (parameter,) = model.parameters()
    optimizer.step = lambda: None
    meter = UpdateMeter(model, optimizer, every=1, exact=optimizer.exact)
    meter._before_step(optimizer, (optimizer,), {})
    optimizer.masters[parameter][:3] -= 2.0**-12
    meter._after_step(optimizer, (optimizer,), {})
    (module,) = meter.report().modules
    assert (module.num_samples, module.below_half_ulp_pct, module.unmoved_pct) == (3, 100.0, 0.0)


def test_shares_weigh_as_many_weights_as_a_sample_stands_for():
    # 1000 weights that move, of which 10 are sampled, and 10 that do not.
    model = Holder(torch.zeros(1000, dtype=torch.bfloat16), torch.ones(10, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    meter = UpdateMeter(model, optimizer, every=1, num_samples=10)
    step(optimizer, torch.ones(1000, dtype=torch.bfloat16), torch.ones(10, dtype=torch.bfloat16))
    report = meter.report()
    assert report.unmoved_pct == pytest.approx(100 * 10 / 1010)
    assert report.modules[0].median_ulps > 0


def test_formats_of_one_module_stand_apart():
    model = Holder(torch.ones(8, dtype=torch.float16), torch.ones(8, dtype=torch.bfloat16), torch.ones(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)  # an ulp of fp16 above 1, an eighth of bf16's
    meter = UpdateMeter(model, optimizer, every=1)
    step(optimizer, *(torch.full_like(p, -1.0) for p in model.parameters()))
    shares = {module.format: module.unmoved_pct for module in meter.report().modules}
    assert shares == {"fp16": 0.0, "bf16": 100.0}


# --- gradients of every kind -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_sparse", [1, 2])
@pytest.mark.parametrize("places", [[[3, 1, 3, 7], [0, 2, 0, 1]], [[], []]])
def test_a_sparse_gradient_is_looked_up(num_sparse, places):
    indices = torch.tensor(places[:num_sparse], dtype=torch.int64)
    values = torch.arange(1.0, 1 + indices.shape[1] * 3 ** (3 - num_sparse)).reshape(-1, *[3] * (3 - num_sparse))
    gradient = torch.sparse_coo_tensor(indices, values, (8, 3, 3), check_invariants=True)
    index = torch.randperm(72, generator=torch.Generator().manual_seed(0))
    assert torch.equal(_take_sparse(gradient, index), gradient.to_dense().take(index))


def test_sparse_and_dense_gradients_give_one_report():
    reports = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(50, 8, sparse=sparse).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-8)
        meter = UpdateMeter(model, optimizer, every=1, num_samples=300)
        model(torch.tensor([3, 5, 3, 49, 0])).float().square().sum().backward()
        optimizer.step()
        reports.append(meter.report())
    assert reports[0] == reports[1]
    assert reports[0].modules[0].num_samples > 0


@pytest.mark.parametrize("by_keyword", [False, True])
def test_gradients_that_a_closure_makes(by_keyword):
    model = Holder(torch.ones(10, dtype=torch.bfloat16))
    (parameter,) = model.parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    meter = UpdateMeter(model, optimizer, every=1)
    parameter.grad = torch.ones(10, dtype=torch.bfloat16)  # of the step before

    def closure():
        parameter.grad = torch.tensor([1.0] * 4 + [0.0] * 6, dtype=torch.bfloat16)

    optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
    assert meter.report().modules[0].num_samples == 4


@pytest.mark.parametrize("shape", ["transposed", "channels last"])
def test_a_weight_laid_out_otherwise(shape):
    torch.manual_seed(0)
    weight = torch.randn(6, 4, 3, 3).bfloat16()
    weight = weight.transpose(0, 1) if shape == "transposed" else weight.to(memory_format=torch.channels_last)
    model = Holder(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-8)
    gradient = torch.randn(weight.shape).bfloat16()
    gradient[1] = 0.0
    meter = UpdateMeter(model, optimizer, every=1)
    step(optimizer, gradient)
    moved = (next(model.parameters()) != weight)[gradient != 0]
    assert meter.report().unmoved_pct == pytest.approx(100 * (1 - moved.float().mean().item()), abs=1e-4)
    assert not moved.all()


# --- which steps -----------------------------------------------------------------------------------------------------


def test_every_so_many_steps():
    model = net()
    optimizer = adamw(model, 1e-3)
    meter = UpdateMeter(model, optimizer, every=3)
    steps = []
    for _ in range(7):
        train(model, optimizer)
        steps.append(meter.report().step)
    assert steps == [0, 0, 3, 3, 3, 6, 6]


def test_before_the_first_sample_the_report_says_when():
    model = net()
    optimizer = adamw(model, 1e-3)
    meter = UpdateMeter(model, optimizer)
    assert str(meter.report()) == "No applied step has been sampled yet; every 100th one is."


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_a_step_that_found_inf_skips_keeps_the_sample_before(found):
    model = net(near_one=True)
    optimizer = adamw(model, 0.1)
    meter = UpdateMeter(model, optimizer, every=1)
    train(model, optimizer)
    before = meter.report()
    optimizer.param_groups[0]["lr"] = 1e-5
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(found), torch.tensor(1.0)
    train(model, optimizer)
    after = meter.report()
    if found:
        assert after == before
    else:
        assert (after.step, after.unmoved_pct) == (2, 100.0)


def test_a_skip_by_torchs_grad_scaler():
    model = net(near_one=True)
    optimizer = adamw(model, 1e-3)
    meter = UpdateMeter(model, optimizer, every=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for scale in (1.0, math.inf, 1.0):
        loss = model(torch.ones(2, 32, dtype=torch.bfloat16)).float().square().mean()
        (scaler.scale(loss) * scale).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert meter.report().step == meter.num_steps - (scale == math.inf)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_gradient_that_is_not_finite_is_no_sample(bad, sparse):
    model = Holder(torch.ones(4000, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16))

    class Careful(torch.optim.SGD):
        """Skips over a gradient that is not finite, by a look of its own."""

        def step(self, closure=None):
            pass

    optimizer = Careful(model.parameters(), lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: None)
    meter = UpdateMeter(model, optimizer, every=1, num_samples=16)
    gradient = torch.ones(4000, dtype=torch.bfloat16)
    gradient[5] = bad
    gradient = gradient.to_sparse() if sparse else gradient
    step(optimizer, gradient, torch.ones(2, dtype=torch.bfloat16))
    assert meter.report().step == 0
    assert 5 not in meter._samples[0].index  # it was noticed where nobody watches


def test_a_scaled_fp16_gradient_is_finite_although_its_norm_is_not():
    model = Holder(torch.ones(10_000, dtype=torch.float16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    meter = UpdateMeter(model, optimizer, every=1)
    step(optimizer, torch.full((10_000,), 60_000.0, dtype=torch.float16))
    assert meter.report().unmoved_pct == 100.0


def test_a_step_that_raises_leaves_the_next_one_right():
    model = Holder(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    meter = UpdateMeter(model, optimizer, every=2)

    def closure():
        raise KeyError

    step(optimizer, torch.ones(4, dtype=torch.bfloat16))
    with pytest.raises(KeyError):
        optimizer.step(closure)
    step(optimizer, torch.ones(4, dtype=torch.bfloat16))
    assert meter.report().step == 0
    step(optimizer, torch.ones(4, dtype=torch.bfloat16))
    assert (meter.report().step, meter.report().unmoved_pct) == (4, 0.0)


def test_a_model_may_change_its_formats_later():
    model = net(torch.float32)
    optimizer = adamw(model, 0.0)
    meter = UpdateMeter(model, optimizer, every=1)
    for dtypes in ((None, None), (torch.bfloat16, None), (torch.bfloat16, torch.float16), (torch.float32, None)):
        for layer, dtype in zip((model[0], model[2]), dtypes, strict=True):
            if dtype is not None:
                layer.to(dtype)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.state.clear()
        optimizer.step()
        found = {module.module: module.format for module in meter.report().modules}
        formats = {"0": model[0].weight.dtype, "2": model[2].weight.dtype}
        names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        assert found == {name: names[dtype] for name, dtype in formats.items() if dtype in names}


def test_a_parameter_group_may_come_later():
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.0)
    meter = UpdateMeter(model, optimizer, every=1)
    train(model, optimizer)
    assert [module.module for module in meter.report().modules] == ["0"]
    optimizer.add_param_group({"params": [*model[2].parameters()]})
    train(model, optimizer)
    assert [module.module for module in meter.report().modules] == ["0", "2"]


def test_remove_ends_the_samples():
    model = net()
    optimizer = adamw(model, 1e-3)
    meter = UpdateMeter(model, optimizer, every=1)
    train(model, optimizer)
    meter.remove()
    train(model, optimizer)
    assert meter.report().step == meter.num_steps == 1
    copy.deepcopy(optimizer)


# --- the sample ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 7, 100, 1024, 1025, 5000])
def test_the_sample_is_one_of_each_stretch_and_all_of_a_small_weight(num):
    index = _draw(torch.empty(num), 1024, torch.Generator().manual_seed(0))
    assert len(index) == min(num, 1024)
    assert index.diff().gt(0).all()
    assert index[0] >= 0
    assert index[-1] < num
    if num <= 1024:
        assert index.tolist() == list(range(num))


def test_the_error_of_a_share_is_the_one_that_is_stated():
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(100_000, generator=generator) < 0.3
    weight = torch.empty(100_000)
    shares = torch.stack([mask[_draw(weight, 256, generator)].double().mean() for _ in range(400)])
    stated = math.sqrt(0.3 * 0.7 / 256)
    # A standard deviation of 400 draws is known to 1 / sqrt(800) = 3.5 %, their mean to stated / 20; three of each.
    assert shares.std() == pytest.approx(stated, rel=0.11)
    assert shares.mean() == pytest.approx(mask.double().mean().item(), abs=3 * stated / 20)


def test_the_sample_is_the_same_for_every_meter():
    model = nn.Linear(100, 100).bfloat16()
    first, second = (UpdateMeter(model, adamw(model, 1e-3), num_samples=10) for _ in range(2))
    assert first.report() == second.report()  # draws them
    for one, other in zip(first._samples, second._samples, strict=True):
        assert torch.equal(one.index, other.index)


def test_a_parameter_without_elements_is_left_out():
    model = Holder(torch.empty(0, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    meter = UpdateMeter(model, optimizer, every=1)
    step(optimizer, *(torch.ones_like(p) for p in model.parameters()))
    assert meter.report().modules[0].num_weights == 4


class Reads(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().removeprefix("aten::").partition(".")[0])
        return func(*args, **(kwargs or {}))


def test_without_16_bit_weights_no_step_does_anything():
    model = Holder(torch.ones(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    meter = UpdateMeter(model, optimizer, every=1)
    next(model.parameters()).grad = torch.ones(4)
    with Reads() as reads:
        meter._before_step(optimizer, (optimizer,), {})
        meter._after_step(optimizer, (optimizer,), {})
    assert reads.names == []


def test_a_sampled_step_reads_nothing_and_an_unsampled_one_does_nothing():
    model = Holder(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    meter = UpdateMeter(model, optimizer, every=2)
    next(model.parameters()).grad = torch.ones(4, dtype=torch.bfloat16)
    for is_sampled in (False, True):
        with Reads() as reads:
            meter._before_step(optimizer, (optimizer,), {})
            meter._after_step(optimizer, (optimizer,), {})
        assert not WAITING.intersection(reads.names)
        assert bool(reads.names) == is_sampled


@pytest.mark.gpu
def test_a_sampled_step_on_a_gpu_never_waits():
    model = net().cuda()
    optimizer = adamw(model, 1e-3)
    meter = UpdateMeter(model, optimizer, every=1)
    x = torch.ones(4, 32, dtype=torch.bfloat16, device="cuda")
    model(x).float().square().mean().backward()
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert meter.report().step == 2


def test_a_sharded_weight_is_measured_on_its_own_part():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = distribute_tensor(torch.ones(8, 4, dtype=torch.bfloat16), mesh, [Shard(0)])
        model = Holder(weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
        meter = UpdateMeter(model, optimizer, every=1)
        step(optimizer, torch.ones_like(weight))
        (module,) = meter.report().modules
        assert (module.num_weights, module.num_samples, module.unmoved_pct) == (32, 32, 100.0)
    finally:
        dist.destroy_process_group()


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
