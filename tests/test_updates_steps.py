"""Which steps the meter for lost updates samples, which it passes over, and that none waits for the device."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from reference.reads import WAITING
from reference.update_nets import Holder, adamw, net, step, train
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.updates import UpdateMeter

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


# --- what a step costs -----------------------------------------------------------------------------------------------


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
