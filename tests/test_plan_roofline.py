"""The bound of a step against its formula written out, a search by hand, and speeds that others have measured."""

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from reference import flops

from halfstep import HalfstepError
from halfstep.hardware import CARDS
from halfstep.plan.roofline import (
    LAUNCH_US,
    MAX_GROUPS,
    Bound,
    Ceilings,
    Kernel,
    OffSize,
    Operations,
    bound_of,
    ceilings_of,
)
from halfstep.plan.subject import Subject
from halfstep.plan.target import target_of

CEILINGS = Ceilings({"fp32": 10.0, "bf16": 100.0}, 1000.0, "a data sheet")


def kernel(module, flops=0.0, nbytes=0.0, format=None, num=1, growth=(0.0, 0.0, 0.0), phase="forward", op="aten.op"):
    return Kernel(op, module, phase, format, num, flops, nbytes, 0.0, growth)


PRODUCT = kernel("blocks.0.up", 4e9, 1e6, "fp32", num=3, growth=(5e8, 1e5, 0.0))
NORM = kernel("blocks.1.norm", 0.0, 8e6, growth=(0.0, 5e5, 5e5))
LOSS = kernel(None, 0.0, 2e6, growth=(0.0, 2.5e5, 0.0))
UPDATE = kernel(None, 0.0, 3e7, phase="step")
STEP = Operations((PRODUCT, NORM, LOSS, UPDATE), batch_size=8, num_samples=16, policy="fp32")


def seconds_at(n, ceilings=CEILINGS, operations=STEP):
    """The formula, one kernel after the other."""
    total = 0.0
    for k in operations.kernels:
        more = n - operations.batch_size
        flops = k.flops + more * k.growth[0]
        nbytes = k.bytes_read + k.bytes_written + more * (k.growth[1] + k.growth[2])
        rate = ceilings.rates_tflops.get(k.format)
        total += k.num * max(flops / (rate * 1e12) if rate else 0, nbytes / (ceilings.bandwidth_gb_per_s * 1e9))
    return total


def test_each_kernel_takes_the_longer_of_its_products_and_its_bytes():
    bound = bound_of(STEP, CEILINGS)
    assert bound.seconds == pytest.approx(3 * 4e-4 + 8e-6 + 2e-6 + 3e-5, rel=1e-12)
    assert bound.seconds == pytest.approx(seconds_at(8), rel=1e-12)
    assert bound.samples_per_s == pytest.approx(16 / bound.seconds, rel=1e-12)
    assert bound.compute_s == pytest.approx(1.2e-3, rel=1e-12)
    assert bound.memory_s == pytest.approx(3 * 1e-6 + 4e-5, rel=1e-12)
    assert bound.compute_share == pytest.approx(1.2e-3 / 1.24e-3, rel=1e-12)
    assert bound.num_kernels == 6
    assert max(bound.compute_s, bound.memory_s) <= bound.seconds <= bound.compute_s + bound.memory_s


def test_another_batch_is_affine_in_each_kernel():
    for n in (1, 8, 13, 1000):
        bound = bound_of(STEP, CEILINGS, n)
        assert (bound.batch_size, bound.num_samples) == (n, 2 * n)
        assert bound.seconds == pytest.approx(seconds_at(n), rel=1e-12)


@pytest.mark.parametrize("bandwidth", [1000.0, 30.0, 1e6])
def test_the_batch_levels_off_where_a_search_by_hand_finds_it(bandwidth):
    ceilings = Ceilings(CEILINGS.rates_tflops, bandwidth, "")
    bound = bound_of(STEP, ceilings)
    limit = 2 * 1e9 / seconds_at(1e9, ceilings)
    assert bound.limit_samples_per_s == pytest.approx(limit, rel=1e-6)  # at 1e9 samples what is fixed weighs 1e-7
    by_hand = next(n for n in range(1, 10_000) if 2 * n / seconds_at(n, ceilings) >= 0.95 * bound.limit_samples_per_s)
    assert bound.level_batch_size == by_hand
    for n in range(1, 200):  # samples/s only rises with the batch, and never above the limit
        assert bound_of(STEP, ceilings, n).samples_per_s <= bound_of(STEP, ceilings, n + 1).samples_per_s * (1 + 1e-12)
        assert bound_of(STEP, ceilings, n).samples_per_s <= bound.limit_samples_per_s


def test_without_growth_other_batches_are_not_known():
    fixed = replace(STEP, kernels=[replace(k, growth=None) for k in STEP.kernels])
    bound = bound_of(fixed, CEILINGS)
    assert bound.seconds == bound_of(STEP, CEILINGS).seconds
    assert (bound.limit_samples_per_s, bound.level_batch_size) == (None, None)
    with pytest.raises(AssertionError):
        bound_of(fixed, CEILINGS, 9)
    nothing_grows = replace(STEP, kernels=[UPDATE])
    assert bound_of(nothing_grows, CEILINGS).level_batch_size is None


def test_modules_are_grouped_over_their_numbers_and_by_what_bounds_them():
    bound = bound_of(STEP, CEILINGS)
    by_name = {share.name: share for share in bound.modules}
    assert list(by_name) == ["blocks.*.up", "(step)", "blocks.*.norm", "(outside)"]  # by time
    assert sum(share.share for share in bound.modules) == pytest.approx(1.0)
    assert by_name["blocks.*.up"].compute_share == 1.0
    assert by_name["(step)"].compute_share == 0.0
    twins = replace(STEP, kernels=[PRODUCT, replace(PRODUCT, module="blocks.7.up"), replace(NORM, module="")])
    assert [share.name for share in bound_of(twins, CEILINGS).modules] == ["blocks.*.up", "(the model)"]
    many = [replace(NORM, module=f"part.layer{n}.norm") for n in range(MAX_GROUPS + 1)]
    assert [s.name for s in bound_of(replace(STEP, kernels=many), CEILINGS).modules] == ["part"]


def test_what_is_not_in_the_figure_is_said():
    tiny = replace(STEP, kernels=[kernel("a", nbytes=1e3, num=10)], uncounted=("mine.op",), notes=("So it is.",))
    first, launches, cache, uncounted = bound_of(tiny, CEILINGS).notes
    assert first == "So it is."
    assert "10 launches" in launches
    assert f"{10 * LAUNCH_US / 1e3:g} ms" in launches
    assert "likely bound by its launches" in launches
    assert "100% of it" in cache
    assert "products alone take 0 ms" in cache
    assert "mine.op" in uncounted
    large = replace(STEP, kernels=[kernel("a", nbytes=1e9), PRODUCT])
    assert len(bound_of(large, CEILINGS).notes) == 1
    assert "likely" not in bound_of(large, CEILINGS).notes[0]


def test_a_format_without_a_rate_takes_the_time_of_its_bytes_so_that_the_figure_stays_a_bound():
    bound = bound_of(replace(STEP, kernels=[replace(PRODUCT, format="fp16")]), CEILINGS)
    assert bound.seconds == pytest.approx(3e-6)
    assert "a data sheet has no rate for fp16" in bound.notes[-1]


def test_sizes_off_the_multiples_come_with_their_share():
    off = (OffSize("blocks.0.up", "Linear", "out_features", 97, 8),)
    bound = bound_of(replace(STEP, off_sizes=off), CEILINGS)
    assert bound.off_share == pytest.approx(1.2e-3 / 1.24e-3)
    assert "blocks.0.up (out_features 97)" in bound.notes[-1]
    assert bound_of(STEP, CEILINGS).off_share == 0.0


def test_the_gain_is_that_of_the_two_bounds():
    fast = replace(PRODUCT, format="bf16", bytes_read=5e5)
    amp = bound_of(replace(STEP, kernels=[fast]), CEILINGS)
    assert amp.gain_over(bound_of(replace(STEP, kernels=[PRODUCT]), CEILINGS)) == pytest.approx(10.0)


def test_it_reads_as_text_and_as_json():
    bound = bound_of(STEP, CEILINGS)
    text = str(bound)
    assert "upper bound, no promise" in text
    assert "levels off at a batch of" in text
    assert "blocks.*.up" in text
    assert "scaled by measured rates" in str(bound_of(STEP, replace(CEILINGS, is_measured=True)))
    value = json.loads(json.dumps(bound.to_dict()))
    assert set(value) == set(Bound.__dataclass_fields__)
    assert value["modules"][0]["name"] == "blocks.*.up"
    assert value["samples_per_s"] == bound.samples_per_s


def test_every_card_has_ceilings_and_an_unnamed_one_none():
    for card in CARDS:
        ceilings = ceilings_of(target_of(card.name))
        assert ceilings.bandwidth_gb_per_s > 0
        assert ceilings.rates_tflops["fp32"] > 0
        assert ceilings.source
    for target in (target_of(), target_of(memory_gib=8), target_of("cpu")):
        with pytest.raises(HalfstepError, match="--calibrate"):
            ceilings_of(target)


def test_a_count_travels_to_a_process_without_torch():
    code = (
        "import pickle, sys; from halfstep.plan.roofline import Ceilings, bound_of;"
        "step = pickle.loads(sys.stdin.buffer.read());"
        "print(bound_of(step, Ceilings({'fp32': 10.0}, 1000.0, '')).seconds, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(STEP), capture_output=True, check=True)
    seconds, has_torch = done.stdout.decode().split()
    assert float(seconds) == bound_of(STEP, CEILINGS).seconds
    assert has_torch == "False"


PUBLISHED = {
    ("A100 SXM4 40GB", "fp16"): 2470,
    ("V100 SXM2 16GB", "fp32"): 367,
    ("V100 SXM2 16GB", "fp16"): 1200,
    ("A100 SXM4 40GB", "tf32"): 938,
}
"""Images/s of ResNet-50 v1.5 in training at a batch of 256: NVIDIA DeepLearningExamples, PyTorch."""


@pytest.fixture(scope="module")
def resnet50():
    from halfstep.plan.operations import count_operations

    subject = Subject(f"{Path(flops.__file__)}:resnet50")
    counted = {policy: count_operations(subject, policy, target_of()) for policy in ("fp32", "fp16")}
    as_tf32 = [replace(k, format="tf32") if k.format else k for k in counted["fp32"].kernels]
    return counted | {"tf32": replace(counted["fp32"], kernels=as_tf32)}


@pytest.mark.slow
@pytest.mark.parametrize(("card", "policy"), PUBLISHED)
def test_no_published_speed_of_resnet_50_is_above_its_bound(resnet50, card, policy):
    bound = bound_of(resnet50[policy], ceilings_of(target_of(card)), 256)
    # Nor is the bound so high that it says nothing: no run is below half of it.
    assert PUBLISHED[card, policy] < bound.samples_per_s < 2 * PUBLISHED[card, policy]


def test_resnet_50_takes_the_operations_that_are_known(resnet50):
    assert {resnet50[policy].flops for policy in resnet50} == {resnet50["fp32"].flops}
    forward = sum(k.num * k.flops for k in resnet50["fp32"].kernels if k.phase == "forward") / 8
    assert forward == pytest.approx(
        8.2e9, rel=0.01
    )  # 4.1e9 multiplications an image (He et al. 2016, of version 1: 3.8e9)
    assert resnet50["fp32"].flops / 8 == pytest.approx(3 * forward, rel=0.02)  # less the images' own gradient
