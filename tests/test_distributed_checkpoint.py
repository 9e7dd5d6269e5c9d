"""A run that was saved goes on with the same bits, on the same ranks and under the same engine, in mid-window too."""

import pytest
import torch
from reference.loop import assert_same
from reference.resumed import build, everything, micro_batches, run

from halfstep.distributed import load, save

FP16 = "fp16 scale.init=16384 scale.interval=2"
LAYOUTS = ["fp16 master=split16 scale.init=16384 scale.interval=2", "bf16 master=stochastic"]
SLOW = ["bf16", *(f"bf16 master={layout}" for layout in ("copy", "split16", "split8", "kahan"))]
DDP = [FP16, *LAYOUTS, *(pytest.param(policy, marks=pytest.mark.slow) for policy in SLOW)]


def saved_and_resumed(engine, policy, optimizer, folder, stops):
    """Save at each of ``stops`` micro-batches of a run, and resume there; how many replays the run had."""
    pieces = micro_batches(engine, 0, 5)
    whole = build(engine, policy, optimizer)
    reports = []
    for place, piece in enumerate(pieces):
        if place in stops:
            save(f"{folder}/{place}", whole, extra={"place": place})
        reports += run(whole, [piece])
    after = everything(whole), torch.get_rng_state()
    for place in stops:
        resumed = build(engine, policy, optimizer, seed=place + 7)
        assert load(f"{folder}/{place}", resumed) == {"place": place}
        assert run(resumed, pieces[place:]) == reports[place:]
        assert_same(everything(resumed), after[0])
        assert torch.equal(torch.get_rng_state(), after[1])
    return sum("'num_replays': 0" not in report for report in reports if report)


@pytest.mark.parametrize("policy", DDP)
def test_under_ddp_a_run_goes_on_with_the_same_bits(world2, policy, tmp_path):
    replays = world2.run(saved_and_resumed, "ddp", policy, "adamw fused", str(tmp_path), [5, 8])
    assert all(replays) == policy.startswith("fp16")


@pytest.mark.parametrize("policy", [pytest.param("bf16", marks=pytest.mark.slow), FP16])
def test_under_fully_shard_a_run_goes_on_with_the_same_bits(world2, policy, tmp_path):
    replays = world2.run(saved_and_resumed, "fsdp", policy, "adamw fused", str(tmp_path), [5, 8])
    assert all(replays) == policy.startswith("fp16")


@pytest.mark.parametrize("policy", ["bf16", LAYOUTS[0]])
def test_in_one_process_a_run_goes_on_with_the_same_bits(policy, tmp_path, kernels_stay):
    replays = saved_and_resumed("one", policy, "adamw fused", str(tmp_path), [3, 16])
    assert bool(replays) == policy.startswith("fp16")


OTHERS = [("ddp", "sgd"), ("fsdp", "adamw")]
SLOW_OTHERS = [pytest.param(*each, marks=pytest.mark.slow) for each in [("ddp", "adamw"), ("fsdp", "sgd")]]


@pytest.mark.parametrize(("engine", "optimizer"), OTHERS + SLOW_OTHERS)
def test_states_of_other_optimizers(world2, engine, optimizer, tmp_path):
    """SGD has no momentum before its first step, and AdamW without a fused kernel counts its steps on the host."""
    world2.run(saved_and_resumed, engine, "bf16", optimizer, str(tmp_path), [1, 5])


def flushed(engine, folder):
    """Save in mid-window and end it there, and the same after loading, without another micro-batch between."""
    whole = build(engine, "bf16")
    run(whole, micro_batches(engine, 0, 3))
    save(folder, whole)
    resumed = build(engine, "bf16", seed=7)
    load(folder, resumed)
    assert str(resumed.flush().to_dict()) == str(whole.flush().to_dict())
    assert_same(everything(resumed), everything(whole))


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_window_that_was_saved_can_end_at_once(world2, engine, tmp_path):
    """Under DDP its gradients are those of each rank alone, and are brought together first."""
    world2.run(flushed, engine, str(tmp_path))
