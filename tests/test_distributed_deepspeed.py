"""A DeepSpeedStepper over two ranks against a plain Stepper in one process over the same samples."""

import itertools
import math
from importlib.util import find_spec

import pytest
import torch
from reference.deepspeed_engines import (
    batches,
    make_net,
    make_optimizer,
    make_stepper,
    numbers_of,
    sum_of_loss,
    warm_up,
    weights_of,
)
from reference.nets import CPU

from halfstep import Stepper

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed, which is for Linux alone")


@pytest.fixture(scope="module", autouse=True)
def _warm(world2):
    world2.run(warm_up, timeout=300)
    yield
    world2.close()  # DeepSpeed leaves settings of torch behind, by which other tests' bits would differ


NUM_STEPS = 12


def run(stepper, model, owner=None, num_steps=NUM_STEPS):
    """The numbers of each report of ``num_steps`` windows."""
    num_micro = num_steps * stepper.accumulate // (2 if owner is None else 1)
    reports = [stepper.step(lambda: sum_of_loss(model, *batch)) for batch in batches(num_micro, owner)]  # noqa: B023
    return [numbers_of(report) for report in reports if report]


def train(policy, stage, accumulate):
    stepper = make_stepper(policy, stage, accumulate=accumulate, max_norm=1.0)
    numbers = run(stepper, stepper.engine, torch.distributed.get_rank())
    return numbers, weights_of(stepper.engine), stepper.scale.state_dict(), stepper.engine.skipped_steps


FP16 = "fp16 on_overflow=skip scale.interval=3"
POLICIES = [
    ("bf16", 1, 2),
    ("bf16 module:head=fp32 op:tanh=fp32", 3, 2),
    ("bf16 master=copy", 1, 2),
    ("bf16 master=copy", 3, 1),
    (FP16, 2, 2),
    (f"{FP16} master=copy scale.hysteresis=2", 1, 1),
    (f"{FP16} master=copy", 2, 2),
    (f"{FP16} master=copy", 3, 2),
]
ALL = [
    (policy, stage, accumulate)
    for policy in (
        "fp32",
        "bf16",
        "bf16 master=copy",
        FP16,
        f"{FP16} master=copy",
        "bf16 scale=dynamic on_overflow=skip",
    )
    for stage in (1, 2, 3)
    for accumulate in (1, 3)
]


@pytest.mark.parametrize(
    ("policy", "stage", "accumulate"), [*POLICIES, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL)]
)
def test_it_trains_like_one_process(world2, policy, stage, accumulate):
    """Ragged batches, weighted by their samples; a spike on one rank overflows fp16 on both.

    Gradients are summed in another order, in fp32: 2^-24 for each of a few sums, of weights around 0.1 and norms
    around 1. Ranks agree to the bit.
    """
    results = world2.run(train, policy, stage, accumulate)
    model = make_net()
    alone = Stepper(
        model, make_optimizer(model), policy, accumulate=2 * accumulate, max_norm=1.0, watch=False, hardware=CPU
    )
    expected = run(alone, model)
    assert len(expected) == NUM_STEPS
    (numbers, weights, scale, num_skipped), (other, other_weights, _, _) = results
    assert repr(numbers) == repr(other)
    assert scale == alone.scale.state_dict()
    assert num_skipped == sum(not applied for _, _, _, applied, _ in expected)
    assert "fp16" not in policy or 0 < num_skipped < NUM_STEPS
    for got, wanted in zip(numbers, expected, strict=True):
        assert got[2:4] == wanted[2:4]
        assert got[0] == pytest.approx(wanted[0], rel=1e-6)
        assert got[1] == (pytest.approx(wanted[1], rel=1e-6) if wanted[3] else math.inf)  # DeepSpeed's word for NaN too
    for name, weight in alone.weights():
        assert torch.equal(weights[name], other_weights[name])
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=2e-7)


def not_a_number(loss, count):
    return loss * math.nan, count


def infinite_gradient(loss, count):
    """The loss is finite, and its derivative is not."""
    return loss + (0 * loss).sqrt(), count


def nothing(loss, count):
    return 0 * loss, 0


SPOILT = [
    (not_a_number, 1, "the loss of rank 1 is not finite: a fault of the forward pass or the data, which no loss"),
    (infinite_gradient, 1, "the gradient norm is inf"),
    (nothing, None, "the count is 0: there is nothing to take the mean of"),
]
WINDOWS = [None, SPOILT[0], None, SPOILT[1], None, SPOILT[2], None]


def spoil(policy, stage):
    """A clean window before each of the spoilt ones and after them; the weights after each."""
    stepper = make_stepper(policy, stage, optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True))
    rank, applied, weights, reports = torch.distributed.get_rank(), [], [], []
    stepper.on_applied = applied.append
    x, y, _ = next(batches(1, rank))
    for how in WINDOWS:
        spoils = how[0] if how and how[1] in (rank, None) else lambda *loss: loss
        reports.append(stepper.step(lambda: spoils(*sum_of_loss(stepper.engine, x, y))))  # noqa: B023
        weights.append(torch.cat([weight.reshape(-1) for weight in weights_of(stepper.engine).values()]))
    moved = [not torch.equal(before, after) for before, after in itertools.pairwise(weights)]
    return [numbers_of(report) for report in reports], [r.step for r in applied], moved, stepper.engine.skipped_steps


@pytest.mark.parametrize(
    ("policy", "stage"),
    [("bf16", 2), ("bf16 master=copy", 1), ("bf16 master=copy", 3), ("fp16 master=copy on_overflow=skip", 2)],
)
def test_what_is_not_finite_is_skipped_everywhere_and_said(world2, policy, stage):
    """One rank at fault, or none that has samples: no weight moves on any rank, and a clean window moves them again."""
    results = world2.run(spoil, policy, stage)
    assert repr(results[0]) == repr(results[1])
    numbers, applied, moved, num_skipped = results[0]
    assert applied == [1, 3, 5, 7]
    assert moved == [False, True, False, True, False, True]
    assert num_skipped == 3
    scales = [2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**14, 2.0**14, 2.0**14]
    assert [scale for _, _, scale, _, _ in numbers] == (scales if "fp16" in policy else [1.0] * 7)
    for (loss, norm, _, is_applied, reason), spoilt in zip(numbers, WINDOWS, strict=True):
        assert is_applied == (spoilt is None)
        assert math.isfinite(norm) == is_applied
        assert math.isfinite(loss) == (spoilt is None or spoilt[0] is infinite_gradient)
        assert reason is None if spoilt is None else reason.startswith(spoilt[2])
