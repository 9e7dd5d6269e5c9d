"""The region: what opening it does and leaves behind, devices, threads."""

from __future__ import annotations

import contextlib
import itertools
import threading

import pytest
import torch
import torch.nn.functional as F
from reference.nets import AMX, BF16, CPU, FP16, FULL, LOW, Net, autocast_state
from torch import nn

from halfstep import cpu16, oplist
from halfstep import region as region_module
from halfstep.errors import HalfstepError
from halfstep.policy import Policy
from halfstep.region import Region, device_of

pytestmark = pytest.mark.usefixtures("kernels_stay")


# ---- what opening leaves behind


class Broken(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.where = where

    def forward(self, x):
        if self.where == "forward":
            raise KeyboardInterrupt
        return Fails.apply(x) if self.where == "backward" else x


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyboardInterrupt


OUTER = {
    "plain": contextlib.nullcontext,
    "autocast fp16": lambda: torch.autocast("cpu", FP16),
    "autocast without cache": lambda: torch.autocast("cpu", BF16, cache_enabled=False),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "region": lambda: Region(nn.Linear(1, 1), "fp16 op:exp=fp16", CPU),
    "fp32 region": lambda: Region(nn.Linear(1, 1), "fp32", CPU),
    "backward of a region": lambda: Region(nn.Linear(1, 1), "bf16", CPU).backward(),
}
INNER = {"region": lambda region: region, "backward": Region.backward, "inference": Region.inference}


@pytest.mark.parametrize("policy", ["bf16 op:exp=bf16", "fp16 module:0=fp32", "fp32"])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("outer", OUTER)
def test_every_state_is_what_it_was(outer, inner, policy):
    model = nn.Sequential(nn.Linear(4, 4), Broken("forward"))
    region = Region(model, policy, CPU)
    outermost = autocast_state()
    with OUTER[outer]():
        before = autocast_state()
        with INNER[inner](region):
            model[0](torch.randn(2, 4))
        assert autocast_state() == before
        with pytest.raises(KeyboardInterrupt), INNER[inner](region):
            model(torch.randn(2, 4))
        assert autocast_state() == before
        with pytest.raises(ZeroDivisionError), INNER[inner](region), INNER[inner](region):
            1 / 0  # noqa: B018
        assert autocast_state() == before
    assert autocast_state() == outermost


def test_an_exception_inside_a_ruled_module_restores_everything():
    model = nn.Sequential(nn.Linear(4, 4), Broken("forward"))
    region = Region(model, "bf16 module:1=fp32", CPU)
    with region:
        inside = autocast_state()
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(2, 4))
        assert autocast_state() == inside


def test_an_exception_in_the_backward_pass_restores_everything():
    model = nn.Sequential(nn.Linear(4, 4), Broken("backward"))
    region, before = Region(model, "bf16 op:exp=bf16", CPU), autocast_state()
    with region:
        loss = model(torch.randn(2, 4)).sum()
    with pytest.raises(KeyboardInterrupt), region.backward():
        loss.backward()
    assert autocast_state() == before


@pytest.mark.parametrize("order", list(itertools.permutations(["bf16", "fp16", "fp32"])), ids=str)
def test_nested_regions_compute_in_the_innermost_format(order):
    formats = {"bf16": BF16, "fp16": FP16, "fp32": FULL}
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    regions = [Region(model, policy, AMX) for policy in order]

    def descend(depth):
        if depth == 3:
            return
        with regions[depth]:
            assert model(x).dtype == formats[order[depth]]
            descend(depth + 1)
            # Back out, the weights that the inner region cast to its format are not taken for ours.
            assert model(x).dtype == formats[order[depth]]

    descend(0)


def test_one_region_inside_itself():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    region = Region(model, "bf16", CPU)
    with region:
        with region, region:
            assert model(x).dtype == BF16
        assert model(x).dtype == BF16
    assert model(x).dtype == FULL


def test_a_region_inside_plain_autocast_and_around_it():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    region = Region(model, "fp16", AMX)
    with torch.autocast("cpu", BF16):
        assert model(x).dtype == BF16
        with region:
            assert model(x).dtype == FP16
            with torch.autocast("cpu", enabled=False):
                assert model(x).dtype == FULL
        assert model(x).dtype == BF16


@pytest.mark.parametrize("policy", ["fp32", "fp32 op:linear=fp32"])
def test_an_fp32_region_inside_plain_autocast_computes_fp32(policy):
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    region, expected = Region(model, policy, CPU), model(x)
    with torch.autocast("cpu", BF16):
        with region:
            assert torch.equal(model(x), expected)
        with region.inference():
            assert torch.equal(model(x), expected)
        assert model(x).dtype == BF16


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_training_without_a_gpu_is_what_it_is_with_native_instructions(policy):
    # The same formats at every operation; the values differ by the order of fp32 sums.
    results = []
    for hardware in (CPU, AMX):
        torch.manual_seed(0)
        model = Net()
        region = Region(model, policy, hardware)
        with region:
            loss = model(torch.randn(8, 4)).float().pow(2).mean()
        with region.backward():
            loss.backward()
        results.append([loss.detach(), *[p.grad for p in model.parameters()]])
    for a, b in zip(*results, strict=True):
        # Six layers, each with one rounding on the way there and one back.
        assert (a - b).abs().max() <= 12 * torch.finfo(LOW[policy]).eps * max(a.abs().max(), 1e-2)


def test_cpu16_runs_where_it_is_needed_and_nowhere_else(monkeypatch):
    calls = []
    own = cpu16._widen
    monkeypatch.setattr(cpu16, "_widen", lambda value: calls.append(1) or own(value))
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    for policy, hardware, runs in (("bf16", CPU, True), ("bf16", AMX, False), ("fp32", CPU, False)):
        calls.clear()
        region = Region(model, policy, hardware)
        with region:
            loss = model(x).sum()
        assert bool(calls) == runs
        calls.clear()
        with region.backward():
            loss.backward()
        assert bool(calls) == runs
        assert ("cpu16" in region.info.reason) == runs


def test_what_a_region_tells_of_itself():
    region = Region(nn.Linear(4, 4), "auto", CPU)
    assert (region.info.requested, region.info.effective) == ("auto", "fp32")
    assert region.info.device == "plain CPU"
    assert region.info.versions == {"torch": torch.__version__}
    region = Region(nn.Linear(4, 4), Policy.parse("bf16 op:exp=fp32"), CPU)
    assert region.info.requested == region.info.effective == "bf16 op:exp=fp32"
    assert region.device == torch.device("cpu")
    with pytest.raises(HalfstepError, match="cannot compute tf32"):
        Region(nn.Linear(4, 4), "tf32", CPU)


# ---- devices


def test_a_model_on_two_devices_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(HalfstepError, match=r"a model on cpu, meta: one region serves one device\. Move the model"):
        Region(model, "bf16", CPU)
    model = nn.BatchNorm1d(2)
    model.running_mean = model.running_mean.to("meta")
    with pytest.raises(HalfstepError, match="cpu, meta"):
        device_of(model)


def test_the_device_of_a_model():
    assert device_of(nn.Linear(2, 2, device="meta")) == torch.device("meta")
    assert device_of(nn.Sequential()) == torch.device("cpu")
    assert device_of(nn.BatchNorm1d(2, affine=False)) == torch.device("cpu")
    with pytest.raises(HalfstepError, match="device 'meta'"):
        Region(nn.Linear(2, 2, device="meta"), "bf16")


# ---- threads


def test_regions_of_two_threads_that_overlap_leave_nothing_switched_on():
    """A enters, B enters, A leaves, B leaves: in between B's rules hold, and afterwards none."""
    first, second = Region(nn.Linear(2, 2), "bf16", CPU), Region(nn.Linear(2, 2), "fp16", CPU)
    entered, left = threading.Event(), threading.Event()

    def hold_first():
        with first:
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=hold_first)
    thread.start()
    entered.wait(10)
    with second:
        left.set()
        thread.join()
        assert region_module._opened == [second]
        assert cpu16.active
        assert F.softmax(second.model(torch.randn(2, 2)), -1).dtype == torch.float32
    assert region_module._opened == []
    assert not cpu16.active
    assert oplist.active is None
