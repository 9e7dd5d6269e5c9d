"""A probe: a run is judged against fp32 from its seed, by a margin that fp32's own runs give."""

import math
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from reference.tune_nets import Absorbing, source

from halfstep.compare.run import run_trial
from halfstep.compare.verdict import sd_lower_bound
from halfstep.errors import HalfstepError
from halfstep.explain import probe as probe_module
from halfstep.explain.probe import Bench, changed
from halfstep.explain.search import Stopped
from halfstep.policy import Policy

pytestmark = pytest.mark.usefixtures("kernels_stay")
FP16 = Policy("fp16")


def bench(source, steps=4, seeds=3, **options):
    return Bench(source, steps, seeds, "cpu", **options)


def with_loss(source, change):
    """The workload with ``change(loss, step, seed)`` in place of each loss; steps count from 1."""

    def build(seed):
        def alter(workload):
            steps = iter(range(1, 1000))
            return replace(workload, loss=lambda model, batch: change(workload.loss(model, batch), next(steps), seed))

        return changed(source, alter)(seed)

    return replace(source, function=build)


def test_the_margin_is_that_of_compare():
    finals = [run_trial(source(2), "fp32", seed, 4, "cpu").final_loss for seed in range(3)]
    given = bench(source(2))
    assert given.margin == sd_lower_bound(finals)
    assert given.margin_from == "the lower 95 % bound of fp32's own sd over the seeds"
    assert [trial.final_loss for trial in given.references] == finals
    assert bench(source(2), margin_pct=5).margin == pytest.approx(0.05 * fmean(finals), rel=1e-12)
    assert bench(source(2), seeds=1, margin_pct=5).margin == pytest.approx(0.05 * finals[0], rel=1e-12)


def test_chaos_widens_the_margin():
    # A loss that a last bit of a weight throws about as much as a seed does. The first one decides, since later ones
    # may round to the same.
    first = []

    def chaotic(loss, step, seed):
        first[:] = first if step > 1 else [loss.detach().double()]
        return loss + 100 * torch.frac(first[0] * 12345678.9).float()

    given = bench(with_loss(source(2), chaotic))
    assert given.margin_from == "three times the gap that changed bits make in fp32"
    assert given.margin > sd_lower_bound([trial.final_loss for trial in given.references])


def test_twins_differ_by_one_bit_in_each_parameter():
    plain, up, down = (
        source(2)(0).model,
        *(probe_module._twin(source(2), way)(0).model for way in (math.inf, -math.inf)),
    )
    for own, more, less in zip(plain.parameters(), up.parameters(), down.parameters(), strict=True):
        bits = [p.detach().reshape(-1).view(torch.int32) for p in (own, more, less)]
        for other in bits[1:]:
            assert (bits[0] != other).sum() == 1
            assert (bits[0] - other).abs().max() == 1


def test_one_seed_gives_no_margin():
    with pytest.raises(HalfstepError, match=r"which takes two\. Use --seeds 3 or more, or give --margin"):
        bench(source(2), seeds=1)


def test_a_loss_that_is_not_finite_fails_and_ends_the_run():
    ran = []
    given = bench(source(4, at=(2,)), progress=lambda what, num: ran.append((what, num)))
    ran.clear()
    probe = given(FP16, 0, "nothing")
    assert (probe.why, probe.step, probe.works) == ("the loss is nan at step 1", 1, False)
    assert ran == [], "not one window ended"
    assert given(Policy.parse("fp16 module:part2=fp32"), 0, "part2").works
    assert ran == [("probe 2: part2", num) for num in (1, 2, 3, 4)]


def test_a_final_loss_above_the_margin_fails():
    given = bench(source(4, at=(2,), fault=Absorbing), steps=20)
    probe = given(FP16, 0, "nothing")
    gap = probe.trial.final_loss - given.references[0].final_loss
    assert not probe.works
    assert gap > given.margin
    assert f"is {gap:.2g} above fp32's, more than the margin {given.margin:.2g}" in probe.why
    assert probe.step is None
    assert bench(source(4, at=(2,), fault=Absorbing), steps=20, margin_pct=1000)(FP16, 0, "nothing").works


def test_a_final_loss_below_fp32s_is_no_failure():
    given = bench(with_loss(source(2), lambda loss, step, seed: loss - 10 * torch.is_autocast_enabled("cpu")))
    probe = given(FP16, 0, "nothing")
    assert probe.trial.final_loss < given.references[0].final_loss - 9
    assert probe.works


def test_an_exhausted_scale_fails():
    # A finite loss whose gradient is beyond fp16 at any scale.
    steep = with_loss(source(2), lambda loss, step, seed: loss * 2.0**30)
    probe = bench(steep, margin_pct=1)(FP16, 0, "nothing")
    assert probe.why == "the loss scale is exhausted at step 2"
    assert probe.step == 2


def test_what_a_policy_raises_is_a_failure_of_its_own():
    def picky(loss, step, seed):
        if loss.isnan():
            raise ValueError("expected a number")
        return loss

    probe = bench(with_loss(source(2, at=(1,)), picky))(FP16, 0, "nothing")
    assert probe.why == "ValueError at step 1: expected a number"
    assert probe.step == 1


def test_what_fp32_raises_is_raised():
    def broken(loss, step, seed):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bench(with_loss(source(2), broken))


def test_a_loss_that_is_not_finite_in_fp32_either_is_no_fault_of_a_policy():
    given = bench(with_loss(source(2), lambda loss, step, seed: loss * (math.inf if step == 2 else 1)), steps=20)
    assert not math.isfinite(given.references[0].losses[1])
    assert given(FP16, 0, "nothing").works


def test_seeds_from_which_fp32_fails_say_nothing():
    given = bench(with_loss(source(2), lambda loss, step, seed: loss * (math.nan if seed == 1 else 1)))
    assert given.seeds == [0, 2]
    assert bench(with_loss(source(2), lambda loss, step, seed: loss * math.nan)).seeds == []


def test_a_run_is_not_made_twice():
    given = bench(source(2))
    assert given(FP16, 0, "nothing") is given(FP16, 0, "nothing")
    given(FP16, 1, "nothing", confirms=True)
    assert given.num_probes == 1


def test_budgets():
    given = bench(source(2), max_probes=1)
    given(FP16, 0, "nothing")
    given(FP16, 0, "nothing")
    given(Policy("bf16"), 0, "bf16", confirms=True)
    with pytest.raises(Stopped, match="after 1 probes, as many as it was given"):
        given(FP16, 1, "nothing")
    with pytest.raises(Stopped, match=r"after 1e-09 minutes, as many as it was given"):
        bench(source(2), minutes=1e-9)


def test_a_run_ends_when_the_time_is_up(monkeypatch):
    given = bench(source(2), minutes=60)
    now = iter(range(0, 10_000, 2000))
    monkeypatch.setattr(probe_module.time, "monotonic", lambda: given._deadline - 3000 + next(now))
    with pytest.raises(Stopped):
        given(FP16, 0, "nothing")
    assert given._num_windows == 2
    assert given.num_probes == 0
