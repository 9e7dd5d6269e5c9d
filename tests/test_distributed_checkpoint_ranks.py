"""A run that was saved goes on under another engine and on another number of ranks: exact states, the same sums."""

import pytest
import torch
from reference.loop import assert_same
from reference.resumed import build, micro_batches, of_all_ranks, run

from halfstep import HalfstepError, StepReport
from halfstep.distributed import load, save

# One of two ranks, and one of four, comes to a lower scale than the others before the run is saved.
POLICIES = ["bf16", "fp16 scale.init=16384"]
RUNS = ["one 1", "ddp 2", "fsdp 2", "ddp 4", "fsdp 4"]
# Each engine on another number of ranks, and each into each; all pairs are slow.
FEW, INTO = ["one 1", "ddp 2", "fsdp 4"], ["one 1", "fsdp 2", "ddp 4"]
SLOW = ["copy", "split8", "kahan", "stochastic"]
LAYOUTS = ["split16", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
STOP = 5
"""Numbers before the run is saved: two windows, and half of the next one."""


def end_of_window(stepper, engine):
    """Loss and norm of the window that was open, after the rest of its samples."""
    reports = []
    stepper.sinks = (reports.append,)
    pieces = micro_batches(engine, STOP, STOP + 1)
    stepper.accumulate = stepper.state_dict()["window"]["num_micro_batches"] + len(pieces)
    run(stepper, pieces)
    (report,) = (report for report in reports if isinstance(report, StepReport))
    assert report.applied
    return report.loss, report.grad_norm


def save_run(engine, policy, folder):
    stepper = build(engine, policy, draws=False)
    run(stepper, micro_batches(engine, 0, STOP))
    save(folder, stepper)
    before = of_all_ranks(stepper)
    scales = stepper.ranks.gather(stepper.scale.value.item())
    return before, end_of_window(stepper, engine), scales


def load_runs(engine, policy, folders):
    results = []
    for folder in folders:
        stepper = build(engine, policy, seed=5, draws=False)
        load(folder, stepper)
        results.append((of_all_ranks(stepper), end_of_window(stepper, engine)))
    return results


@pytest.fixture(scope="module")
def on(world2, world4):
    """Runs a function on the ranks of a run: its engine and their number."""

    def run_on(name, function, *args):
        engine, num = name.split()
        if num == "1":
            return function(engine, *args)
        return {"2": world2, "4": world4}[num].run(function, engine, *args)[0]

    return run_on


@pytest.fixture(scope="module")
def saved(on, tmp_path_factory):
    """Runs by policy and name, as they are asked for: where each was saved, what it was, and how its window ended."""
    runs = {}

    def of(policy, name):
        if (policy, name) not in runs:
            folder = str(tmp_path_factory.mktemp("runs"))
            runs[policy, name] = (folder, *on(name, save_run, policy, folder))
        return runs[policy, name]

    return of


@pytest.mark.parametrize("policy", POLICIES)
def test_the_ranks_of_a_run_have_parted_before_it_is_saved(saved, policy):
    """Or what is shown below would be little."""
    assert (len(set(saved(policy, "ddp 2")[3])) > 1) == policy.startswith("fp16")


@pytest.mark.parametrize("target", INTO)
def test_a_run_goes_on_elsewhere(saved, on, target):
    goes_on(saved, on, POLICIES[1], FEW, target)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("target", RUNS)
def test_every_run_goes_on_elsewhere(saved, on, target, policy):
    goes_on(saved, on, policy, RUNS, target)


def goes_on(saved, on, policy, sources, target):
    names = [name for name in sources if name != target]
    loaded = on(target, load_runs, policy, [saved(policy, name)[0] for name in names])
    for name, (after, end) in zip(names, loaded, strict=True):
        _, before, its_end, scales = saved(policy, name)
        before = dict(before)
        for key in ("weights", "optimizer", "lr", "scheduler", "counters", "num_micro_batches"):
            assert_same(after.pop(key), before.pop(key), f"{name}/{key}")
        assert after["scale"]["value"] == min(scales)
        # Sums of fp32 numbers in another order: 2^-23 for each of up to 8 additions, of the largest.
        close = {"rtol": 2.0**-20, "atol": 0.0}
        torch.testing.assert_close(torch.tensor(after["totals"]), torch.tensor(before["totals"]), **close)
        for parameter, total in before["sums"].items():
            gap = (after["sums"][parameter] - total).abs().max()
            assert gap <= 2.0**-20 * total.abs().max(), (name, parameter)
        # The rest of the window runs under the other engine: each gradient is rounded to 16 bit in other places.
        assert end == pytest.approx(its_end, rel=2.0**-8)


# --- master weights --------------------------------------------------------------------------------------------------


def save_layout(engine, layout, folder):
    stepper = build(engine, f"bf16 master={layout}", draws=False)
    run(stepper, micro_batches(engine, 0, STOP))
    save(folder, stepper)
    return of_all_ranks(stepper), stepper.ranks.module.state_dict(), stepper.state_dict()["masters"]


def there_and_back(engine, layout, folder):
    """Load a run of a layout as fp32, and save it for :func:`load_layout`."""
    stepper = build(engine, "bf16", seed=5, draws=False)
    load(folder, stepper)
    save(f"{folder}/back", stepper)
    return of_all_ranks(stepper)


def load_layout(engine, layout, folder):
    stepper = build(engine, f"bf16 master={layout}", seed=6, draws=False)
    load(f"{folder}/back", stepper)
    return of_all_ranks(stepper), stepper.ranks.module.state_dict(), stepper.state_dict()["masters"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_master_weights_become_fp32_shards_and_come_back(on, layout, tmp_path):
    folder = str(tmp_path / "run")
    before, model, masters = on("ddp 2", save_layout, layout, folder)
    between = on("fsdp 2", there_and_back, layout, folder)
    after, its_model, its_masters = on("ddp 2", load_layout, layout, folder)
    assert len(masters["rests"]) == 2
    assert all(weight.dtype == torch.float32 for weight in between["weights"].values())
    for key in ("weights", "optimizer", "counters", "num_micro_batches"):
        assert_same(between[key], before[key], key)
        assert_same(after[key], before[key], key)
    assert_same(dict(its_model), dict(model))
    assert_same(its_masters["rests"], masters["rests"])


# --- what shards cannot take -----------------------------------------------------------------------------------------


def refused_by_shards(folder):
    messages = []
    for policy in ("fp16", "fp16 module:head=fp32"):
        stepper = build("fsdp", policy, seed=5, draws=False)
        try:
            load(folder, stepper)
        except HalfstepError as error:
            messages.append(str(error))
        else:
            messages.append(of_all_ranks(stepper)["weights"])
    weight = stepper.ranks.module.head.weight
    for extra, state in (({"average": [weight.detach()]}, None), (None, torch.ones(3))):
        stepper.optimizer.state[weight].pop("rows", None)
        if state is not None:
            stepper.optimizer.state[weight]["rows"] = state
        with pytest.raises(HalfstepError) as error:
            save(f"{folder}/more", stepper, extra=extra)
        messages.append(str(error.value))
    return messages


def test_a_promoted_module_has_to_be_known_when_shards_are_made(world2, tmp_path, kernels_stay):
    stepper = build("one", "fp16 master=split16", draws=False)
    run(stepper, micro_batches("one", 0, STOP))
    stepper.region.promote("head")
    stepper.masters.settle(stepper.policy)
    stepper._promoted.append("head")
    save(tmp_path, stepper)
    resumed = build("one", "fp16 master=split16", seed=4, draws=False)
    load(tmp_path, resumed)
    assert resumed.policy == stepper.policy
    assert_same(of_all_ranks(resumed), of_all_ranks(stepper))
    told = world2.run(refused_by_shards, str(tmp_path))
    refused, weights, of_extra, of_state = told[0]
    assert refused.startswith("a run in which module head was promoted to fp32: fully_shard has fixed")
    assert "module:head=fp32 in the policy" in refused
    assert_same(weights, of_all_ranks(stepper)["weights"])
    assert of_extra.startswith("extra with a shard of a tensor of shape (5, 13): rank 0 writes extra")
    assert of_state.startswith("optimizer state head.weight/rows of shape (3,): its parameter of shape (5, 13) is cut")
    assert [each for each in told[1] if isinstance(each, str)] == [refused, of_extra, of_state]
