"""Measured rates against times that are set by hand, and once against this machine's own."""

from dataclasses import replace

import pytest
import torch

from halfstep import HalfstepError
from halfstep.hardware import Hardware
from halfstep.plan import calibrate as module
from halfstep.plan.calibrate import Calibration, calibrate
from halfstep.plan.target import target_of

ROWS, NUM_BYTES = 64, 2**16


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(module.SIZES, "cpu", (ROWS, NUM_BYTES))


@pytest.fixture
def timed(small, monkeypatch):
    """This CPU with fp32 and bf16; a product takes 2 ms in fp32 and 1 ms in bf16, a copy 4 ms, the first rounds more.

    Returns the order in which they were timed.
    """
    order = []

    def seconds(run, at):
        result = run()
        name = "copy" if result.dtype == torch.uint8 else str(result.dtype).removeprefix("torch.")
        order.append(name)
        is_warm_up = order.count(name) <= module.NUM_WARM_UPS
        last = order.count(name) == module.NUM_WARM_UPS + module.NUM_REPEATS
        base = {"float32": 2e-3, "bfloat16": 1e-3, "copy": 4e-3}[name]
        return 1.0 if is_warm_up else 1.5 * base if last else base

    hardware = replace(Hardware.of("cpu", "a processor"), native=frozenset({"fp32", "bf16"}))
    monkeypatch.setattr(module, "_seconds", seconds)
    monkeypatch.setattr(module, "detect", lambda device: hardware)
    return order


def test_rates_are_medians_of_what_was_timed_after_the_warm_up(timed):
    found = calibrate("cpu")
    assert found.rates_tflops == pytest.approx({"fp32": 2 * ROWS**3 / 2e-3 / 1e12, "bf16": 2 * ROWS**3 / 1e-3 / 1e12})
    assert found.bandwidth_gb_per_s == pytest.approx(2 * NUM_BYTES / 4e-3 / 1e9)  # read and written
    assert found.spread_pct == pytest.approx({"fp32": 50.0, "bf16": 50.0, "copy": 50.0})
    assert (found.device, found.kind, found.card, found.context_bytes) == ("a processor", "cpu", None, None)
    assert found.torch == torch.__version__


def test_products_and_copies_take_turns(timed):
    calibrate("cpu")
    num_rounds = module.NUM_WARM_UPS + module.NUM_REPEATS
    assert timed == ["float32", "bfloat16", "copy"] * num_rounds


def test_this_machine_has_rates_and_they_are_its_ceilings(small):
    found = calibrate("cpu")
    assert found.rates_tflops["fp32"] > 0
    assert found.bandwidth_gb_per_s > 0
    ceilings = found.ceilings(target_of("cpu"))
    assert ceilings.is_measured
    assert (ceilings.rates_tflops, ceilings.bandwidth_gb_per_s) == (found.rates_tflops, found.bandwidth_gb_per_s)
    assert found.device in ceilings.source


H200 = Calibration("NVIDIA H200", "cuda", "H200 SXM5", "2.11.0", {"fp32": 50.0}, 4000.0, {"fp32": 1.0}, 5 * 10**8)


def test_a_calibration_is_for_the_card_that_was_measured():
    for target in (target_of("H200 SXM5"), target_of(), target_of(memory_gib=100)):
        assert H200.ceilings(target).rates_tflops == {"fp32": 50.0}
    for target in (target_of("T4"), target_of("cpu")):
        with pytest.raises(HalfstepError, match="NVIDIA H200"):
            H200.ceilings(target)


def test_a_kind_of_device_that_nothing_here_measures_is_refused(monkeypatch):
    monkeypatch.setattr(module, "detect", lambda device: Hardware.of("mps", "Apple GPU"))
    with pytest.raises(HalfstepError, match="does not measure mps"):
        calibrate("mps")


@pytest.mark.gpu
def test_a_card_is_measured_below_its_published_rates_and_the_switch_is_as_before():
    before = torch.backends.cuda.matmul.allow_tf32
    found = calibrate("cuda")
    assert torch.backends.cuda.matmul.allow_tf32 == before
    assert found.context_bytes > 0
    assert found.rates_tflops["fp16"] > found.rates_tflops["fp32"]
    assert found.bandwidth_gb_per_s > 0
