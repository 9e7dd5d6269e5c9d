"""A trial: what is judged, and when it has diverged."""

from __future__ import annotations

import math

import pytest

from halfstep.compare.trial import Trial, by_policy


def trial(losses: list[float], **fields: object) -> Trial:
    n = len(losses)
    values = {"policy": "fp16", "effective": "fp16", "seed": 0, "steps": n}
    values |= {"scales": (1.0,) * n, "applied": (True,) * n, "replays": (0,) * n}
    return Trial(losses=tuple(losses), **(values | fields))  # type: ignore[arg-type]


def test_final_loss_is_the_mean_of_the_last_tenth() -> None:
    assert trial([9.0] * 18 + [1.0, 2.0]).final_loss == 1.5
    assert trial([9.0, 8.0, 7.0]).final_loss == 7.0, "at least one"


def test_an_evaluated_loss_goes_before_the_training_losses() -> None:
    assert trial([9.0] * 20, evaluated=3.0).final_loss == 3.0


def test_a_nan_before_the_tail_is_kept_but_is_no_divergence() -> None:
    one = trial([1.0, math.nan] + [1.0] * 18)
    assert math.isnan(one.losses[1])
    assert one.diverged is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_final_loss_that_is_not_finite_has_diverged(bad: float) -> None:
    one = trial([2.0] * 5 + [bad] * 15)
    assert not math.isfinite(one.final_loss)
    assert one.diverged == f"the final loss is {bad}, the first non-finite loss came at step 6 of 20"


def test_an_evaluated_nan_has_diverged_though_every_training_loss_is_finite() -> None:
    assert trial([1.0], evaluated=math.nan).diverged == "the final loss is nan"


def test_a_trial_that_stopped_has_no_final_loss() -> None:
    one = trial([2.0] * 7, steps=20, evaluated=1.0, stopped="the loss scale is at its floor")
    assert math.isnan(one.final_loss)
    assert one.diverged == "stopped after 7 of 20 steps: the loss scale is at its floor"
    assert math.isnan(trial([], steps=20, stopped="no memory").final_loss)


def test_counts() -> None:
    one = trial([1.0] * 4, applied=(True, False, True, True), replays=(2, 0, 0, 1))
    assert (one.steps_applied, one.steps_skipped, one.num_replays) == (3, 1, 3)


def test_records_of_unequal_length_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="for each window"):
        trial([1.0, 2.0], scales=(1.0,))


def test_by_policy_keeps_the_order_and_sorts_the_seeds() -> None:
    arms = by_policy([trial([1.0], policy=p, seed=s) for s, p in [(1, "fp32"), (1, "bf16"), (0, "fp32"), (0, "bf16")]])
    assert {name: [t.seed for t in arm] for name, arm in arms.items()} == {"fp32": [0, 1], "bf16": [0, 1]}
    assert list(arms) == ["fp32", "bf16"]


def test_a_policy_asked_for_twice_is_compared_with_itself() -> None:
    arms = by_policy([trial([1.0], policy="fp32", seed=s) for s in (0, 1, 0, 1)])
    assert {name: len(arm) for name, arm in arms.items()} == {"fp32": 2, "fp32 (2)": 2}
