"""tune, end to end on nets with planted faults: what it keeps in fp32, what it says, writes and leaves alone."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference.tune_nets import Absorbing, Container, Mixed, Steep, Vanishing, source, squared_error

from halfstep.compare import compare
from halfstep.diagnosis.advice import DOES_NOT, MENDS
from halfstep.errors import HalfstepError
from halfstep.explain import cost
from halfstep.explain import tune as tune_module
from halfstep.explain.tune import tune
from halfstep.explain.tune_report import default_policy_file
from halfstep.hardware import detect
from halfstep.policy import Policy
from halfstep.source import Source, load
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay", "_quick", "_in_a_folder_of_its_own")
FP16 = Policy("fp16")


@pytest.fixture
def _quick(monkeypatch):
    monkeypatch.setattr(cost, "NUM_ROUNDS", 1)
    monkeypatch.setattr(cost, "NUM_WINDOWS", 2)


@pytest.fixture
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def bare(monkeypatch):
    """Neither audit nor ranges can be had of the model, and the cost is not measured, which saves their time."""

    def fails(capture):
        raise RuntimeError("not of this model")

    monkeypatch.setattr(tune_module, "audit_of", fails)
    monkeypatch.setattr(tune_module, "ranges_of", fails)
    monkeypatch.setattr(tune_module, "time_ratios", lambda *_: [1.25, 0.75])
    monkeypatch.setattr(tune_module, "memory_ratios", lambda *_: [1.5, 0.5])


@pytest.fixture
def no_order(bare, monkeypatch):
    """The suspects stay in order of execution."""
    monkeypatch.setattr(tune_module, "in_order", lambda suspects, *evidence: list(suspects))


# --- what it finds -------------------------------------------------------------------------------------------------


def test_one_of_fifty_is_found_at_once_by_what_it_did(bare, tmp_path):
    report = tune(source(50, at=(31,)), FP16)
    assert report.fp32 == ("part31",)
    assert report.probes == 3, "nothing, all, the right one"
    assert report.minimal
    assert report.verdict in ("equivalent", "not worse")
    assert report.why == "seed 0: the loss is nan at step 1"
    assert report.tuned == "fp16 module:part31=fp32"
    assert Policy.load(tmp_path / "chain.toml") == Policy.parse(report.tuned)


@pytest.mark.parametrize("place", [0, 49])
def test_one_of_fifty_takes_at_most_15_probes_without_any_evidence(no_order, place):
    report = tune(source(50, at=(place,)), FP16)
    assert report.fp32 == (f"part{place}",)
    assert report.minimal
    assert report.probes <= 15


def test_two_that_only_help_together_are_found(bare):
    report = tune(source(20, at=(2, 19)), FP16)
    assert report.fp32 == ("part2", "part19")
    assert report.minimal
    assert report.probes == 5
    alone = {one.fp32: one.why for one in report.tried}
    assert alone["part2",]
    assert alone["part19",]
    assert alone["part2", "part19"] is None


def test_two_are_found_without_any_evidence(no_order):
    report = tune(source(12, at=(2, 9)), FP16)
    assert report.fp32 == ("part2", "part9")
    assert report.probes <= 2 + 2 * (2 * 4) + 1


@pytest.mark.parametrize("fault", [Absorbing, Vanishing])
def test_a_worse_loss_without_any_nan_is_found(fault):
    policy, factor = (FP16, 1.0) if fault is Absorbing else (Policy.parse("fp16 scale=none"), 2.0**-10)
    report = tune(source(6, at=(3,), fault=fault, factor=factor), policy, steps=20)
    assert report.fp32 == ("part3",)
    assert "above fp32's, more than the margin" in report.why
    assert report.verdict in ("equivalent", "not worse")
    assert report.probes <= 4
    assert Policy.load(Path(report.policy_file)).scale == policy.scale


def test_bf16_is_tried_as_well_and_does_not_help_where_digits_are_lost(bare):
    lost, overflowed = tune(source(4, at=(2,), fault=Absorbing), FP16, steps=20), tune(source(4, at=(2,)), FP16)
    assert [a.result for a in lost.advice] == [MENDS, DOES_NOT]
    assert [a.result for a in overflowed.advice] == [MENDS, MENDS]


def test_a_container_goes_to_fp32_without_its_parts(bare):
    report = tune(source(4, at=(2,), fault=Container), FP16)
    assert report.fp32 == ("part2",)
    assert report.tuned == "fp16 module:part2=fp32 module:part2.0=fp16 module:part2.1=fp16"


def test_an_operation_takes_the_place_of_its_module_where_it_costs_less(bare):
    report = tune(source(4, at=(2,), fault=Mixed), FP16)
    assert report.fp32 == ("op:addcmul",)
    assert report.tuned == "fp16 op:addcmul=fp32"
    assert report.probes == 4
    assert 0 < report.cost.work_pct < 2
    assert "# costs 1.25 times the time and 1.50 times the memory of a step" in Path(report.policy_file).read_text()


def test_an_operation_makes_other_modules_idle(bare):
    # Both overflow in their addcmul, which one rule covers.
    report = tune(source(6, at=(1, 4), fault=Mixed), FP16)
    assert report.fp32 == ("op:addcmul",)
    assert report.minimal


def test_a_fault_of_the_loss_function_is_mended_by_an_operation(bare):
    def loss(model, batch):
        outputs = model(batch[0])
        return (
            squared_error(outputs, batch[1]) + 0 * (torch.addcmul(outputs, 300 * outputs, 300 * outputs)).float().sum()
        )

    report = tune(source(3, loss=loss), FP16)
    assert report.fp32 == ("op:addcmul",)
    assert report.verdict in ("equivalent", "not worse")


def test_a_fault_that_only_another_seed_shows_joins_the_search(bare):
    def build(seed):
        return source(6, at=(1,) if seed == 0 else (4,))(seed)

    report = tune(Source("fickle", build), FP16, steps=4)
    assert report.fp32 == ("part1", "part4")
    assert report.minimal
    assert report.verdict in ("equivalent", "not worse")
    assert any(one.confirms and one.fp32 == ("part1",) and one.seed == 1 and one.why for one in report.tried)


def test_rules_that_the_policy_has_are_kept(bare):
    report = tune(source(6, at=(3,)), Policy.parse("fp16 module:part0=fp32 scale.init=256 on_exhausted=promote"))
    assert report.tuned == "fp16 module:part0=fp32 module:part3=fp32 on_exhausted=promote scale.init=256"


def test_a_stepper_that_would_promote_by_itself_does_not_hide_the_fault(bare):
    policy = "fp16 {} on_exhausted=promote scale.init=32768 scale.floor=32768"
    report = tune(source(3, at=(1,), fault=Steep), Policy.parse(policy.format("")))
    assert "the loss scale is exhausted at step 1" in report.why
    assert report.tuned == policy.format("module:part1=fp32")


def test_fragile_needs_its_pool(tmp_path):
    report = tune(load("fragile"), FP16, steps=20)
    assert report.fp32 == ("pool",)
    assert report.probes <= 4
    assert report.verdict in ("equivalent", "not worse")
    costs = report.cost
    assert all(ratio > 0 for ratio in (costs.time, costs.memory, costs.time_vs_fp32, costs.memory_vs_fp32))
    file = str(tmp_path / "fragile.toml")
    compared, _ = compare(load("fragile"), ["fp32", file], steps=5, seeds=1)
    assert compared.policies[1].num_diverged == 0
    workload = load("fragile")(0)
    stepper = Stepper(workload.model, workload.optimizer(workload.model.parameters()), file)
    batch = next(iter(workload.batches))
    assert stepper.step(lambda: workload.loss(stepper.model, batch)).applied


@pytest.mark.parametrize("policy", ["bf16", "fp16 master=split16"])
def test_other_policies(bare, policy):
    report = tune(source(3, at=(1,), fault=Absorbing), Policy.parse(policy), steps=20)
    assert report.fp32 == ("part1",)
    assert report.tuned == f"{policy.split()[0]} module:part1=fp32{policy.removeprefix(policy.split()[0])}"


def test_a_loss_that_refuses_what_is_not_finite():
    def loss(model, batch):
        value = squared_error(model(batch[0]), batch[1])
        if not value.isfinite():
            raise ValueError("expected a number")
        return value

    report = tune(source(4, at=(2,), loss=loss), FP16)
    assert report.why == "seed 0: ValueError at step 1: expected a number"
    assert report.fp32 == ("part2",)
    assert report.cost.time is None, "the policy as it stood cannot be timed"
    assert report.cost.time_vs_fp32 > 0


# --- what it says where there is nothing to find -------------------------------------------------------------------


def test_nothing_to_tune(tmp_path):
    report = tune(source(3), FP16)
    assert (report.fp32, report.minimal, report.policy_file, report.tuned) == ((), True, None, None)
    assert not report.found
    assert report.verdict in ("equivalent", "not worse")
    assert report.headline == "chain: fp16 works as it stands, nothing has to be kept in fp32."
    assert list(tmp_path.iterdir()) == []


def test_fp32_that_fails_as_well_is_not_the_precision(tmp_path):
    report = tune(source(3, loss=lambda model, batch: model(batch[0]).float().sum() * math.nan), FP16)
    assert report.verdict == "fp32 fails"
    assert report.headline.startswith("chain: not the precision. fp32 fails as well: the final loss is nan")
    assert report.found
    assert report.probes == 0
    assert list(tmp_path.iterdir()) == []


def in_16_bit(outputs):
    """A cast that the user's code makes wherever autocast is on, which no rule reaches."""
    return outputs.half() if torch.is_autocast_enabled("cpu") else outputs


def test_an_overflow_that_no_rule_reaches_is_named_by_its_line(bare, tmp_path):
    def loss(model, batch):
        outputs = model(batch[0]).float()
        return squared_error(outputs, batch[1]) + 0 * in_16_bit(outputs * 1e5).float().sum()

    report = tune(source(3, loss=loss), FP16)
    assert report.verdict == "no set helps"
    assert (report.fp32, report.policy_file, report.minimal) == ((), None, False)
    line = in_16_bit.__code__.co_firstlineno + 2
    assert f"It is made by half at test_tune.py:{line} in the loss function, which no rule reaches" in report.reason
    assert "write .float() there" in report.reason
    assert "and no module and no operation mends it" in report.headline
    assert [a.result for a in report.advice] == [DOES_NOT]
    assert list(tmp_path.iterdir()) == []


def test_a_fault_that_no_rule_reaches_and_another_seed_shows(bare):
    def build(seed):
        def loss(model, batch):
            outputs = model(batch[0]).float()
            return squared_error(outputs, batch[1]) + 0 * in_16_bit(outputs * 1e5 * (seed == 1)).float().sum()

        return source(3, at=(1,), loss=loss)(seed)

    report = tune(Source("fickle", build), FP16, steps=4)
    assert report.verdict == "no set helps"
    assert "seed 1: the loss is nan at step 1. It is made by half at test_tune.py:" in report.reason


def test_digits_that_are_lost_where_no_rule_reaches_are_named_by_their_line(bare):
    def loss(model, batch):
        outputs = model(batch[0]).float()
        kept = outputs.detach() - in_16_bit(outputs.detach() * 2.0**-30).float() * 2.0**30
        return squared_error(outputs, batch[1]) + 300 * kept.abs().mean()

    report = tune(source(3, loss=loss), FP16, steps=20)
    assert report.verdict == "no set helps"
    line = in_16_bit.__code__.co_firstlineno + 2
    assert f"What still computes in 16 bit, and no rule reaches: half at test_tune.py:{line}" in report.reason


def test_digits_that_the_loss_function_loses_are_mended_by_an_operation(bare):
    def loss(model, batch):
        return squared_error((in_16_bit(model(batch[0])) + 4096) - 4096, batch[1])

    assert tune(source(3, loss=loss), FP16, steps=20).fp32 == ("op:add",)


# --- budgets -------------------------------------------------------------------------------------------------------


def test_a_budget_of_probes_keeps_the_best_so_far(no_order):
    report = tune(source(12, at=(9,)), FP16, max_probes=8)
    assert report.probes == 8
    assert not report.minimal
    assert report.verdict == "not confirmed"
    assert report.fp32 == ("0", *(f"part{i}" for i in range(10))), "nothing, all, 1, 2, 4, 8, 10 and 11 of 13"
    assert report.stopped == "after 8 probes, as many as it was given"
    assert Policy.load(Path(report.policy_file)) == Policy.parse(report.tuned)
    assert "whether all of it is needed is open" in report.headline


def test_a_budget_before_anything_works_writes_nothing(bare, tmp_path):
    report = tune(source(12, at=(9,)), FP16, max_probes=1)
    assert (report.fp32, report.verdict, report.policy_file) == ((), "not confirmed", None)
    assert "no set has been seen to work in 1 probe." in report.headline
    assert report.found
    assert list(tmp_path.iterdir()) == []


def test_a_set_that_failed_to_be_confirmed_is_not_kept(bare, tmp_path):
    def build(seed):
        return source(6, at=(1,) if seed == 0 else (4,))(seed)

    report = tune(Source("fickle", build), FP16, steps=4, max_probes=3)
    assert report.tried[-1].fp32 == ("part1",)
    assert report.tried[-1].why
    assert (report.fp32, report.verdict) == ((), "not confirmed")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("at", "num_in_fp32"), [("probe 8", 13), ("probe 9", 11), ("part9 in fp32, seed 1", 1)])
def test_ctrl_c_keeps_the_best_so_far(no_order, at, num_in_fp32):
    def progress(what, num_windows):
        if at in what:
            raise KeyboardInterrupt

    report = tune(source(12, at=(9,)), FP16, progress=progress)
    assert report.stopped == "by Ctrl-C"
    assert report.verdict == "not confirmed"
    assert len(report.fp32) == num_in_fp32
    assert "part9" in report.fp32
    assert report.minimal == (num_in_fp32 == 1)
    assert report.policy_file is not None


@pytest.mark.parametrize(
    ("at", "headline"),
    [
        ("probe 1", "chain: stopped before fp16 had been tried as it stands."),
        ("nothing in fp32, seed 1", "chain: fp16 works as it stands, nothing has to be kept in fp32."),
    ],
)
def test_ctrl_c_where_nothing_has_failed_yet(bare, at, headline, tmp_path):
    def progress(what, num_windows):
        if at in what:
            raise KeyboardInterrupt

    report = tune(source(3), FP16, progress=progress)
    assert (report.headline, report.verdict, report.found) == (headline, "not confirmed", False)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_the_cost_is_measured_leaves_the_cost_out(bare, monkeypatch):
    def progress(what, num_windows):
        if what == "what it costs":
            raise KeyboardInterrupt

    report = tune(source(4, at=(2,)), FP16, progress=progress)
    assert report.fp32 == ("part2",)
    assert report.verdict in ("equivalent", "not worse")
    assert report.cost.time is None
    assert "not confirmed" not in str(report)


def test_ctrl_c_while_fp32_trains_is_the_callers():
    def progress(what, num_windows):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(source(3), FP16, progress=progress)


def test_minutes_that_fp32_uses_up():
    with pytest.raises(HalfstepError, match="minutes=1e-09: fp32 itself was not done after"):
        tune(source(3), FP16, minutes=1e-9)


def test_progress_names_every_run(bare):
    said = []
    tune(source(4, at=(2,)), FP16, progress=lambda what, num_windows: said.append((what, num_windows)))
    names = list(dict.fromkeys(what for what, _ in said))
    assert names == [
        "fp32",
        "fp32 with changed bits",
        "probe 2: 5 of 5 in fp32, seed 0",  # the first one ended in its first window
        "probe 3: part2 in fp32, seed 0",
        "part2 in fp32, seed 1",
        "part2 in fp32, seed 2",
        "what it costs",
        "bf16",
    ]
    assert [num for what, num in said if what == names[2]] == [1, 2, 3, 4]


# --- the report and the file ---------------------------------------------------------------------------------------


def test_json_has_the_keys_of_the_contract(bare, tmp_path):
    report = tune(source(4, at=(2,)), FP16, policy_file=tmp_path / "mine.toml")
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert found["fp32"] == ["part2"]
    assert found["probes"] == 3
    assert found["minimal"] is True
    assert found["policy_file"] == str(tmp_path / "mine.toml")
    assert found["verdict"] in ("equivalent", "not worse")
    share = found["cost"].pop("work_pct")
    assert found["cost"] == {"time": 1.25, "memory": 1.5, "time_vs_fp32": 0.75, "memory_vs_fp32": 0.5}
    assert 0 < share < 50
    assert found["tried"][0] == {
        "fp32": [], "seed": 0, "why": "the loss is nan at step 1", "confirms": False,
    }  # fmt: skip
    text = str(report)
    assert text.startswith("chain: fp16 works with part2 in fp32, found in 3 probes; nothing of it can be left out.")
    assert f"Wrote {tmp_path / 'mine.toml'}" in text
    assert ("its speed is not" in text) == ("fp16" in detect("cpu").emulated)


def test_the_file_says_what_why_and_when(bare):
    report = tune(source(4, at=(2,)), FP16)
    text = Path(report.policy_file).read_text()
    comment, policy = text.split("\n\n", 1)
    assert all(line.startswith("# ") for line in comment.splitlines())
    assert "Written by halfstep tune on 20" in comment
    assert "chain, fp16, 4 steps, 3 seeds" in comment
    assert "# as it stood: seed 0: the loss is nan at step 1" in comment
    assert "# in fp32: part2, each of them needed" in comment
    assert f"# against fp32: {report.verdict}" in comment
    assert policy == Policy.parse(report.tuned).to_toml()


def test_a_file_of_its_own_is_written_over_and_no_other(bare, tmp_path):
    tune(source(4, at=(2,)), FP16)
    assert tune(source(4, at=(1,)), FP16).fp32 == ("part1",)
    assert "part1" in (tmp_path / "chain.toml").read_text()
    (tmp_path / "chain.toml").write_text('compute = "fp16"\n')
    with pytest.raises(HalfstepError, match="it exists and is not one that tune wrote"):
        tune(source(4, at=(2,)), FP16)
    assert (tmp_path / "chain.toml").read_text() == 'compute = "fp16"\n'


@pytest.mark.parametrize(
    ("spec", "name"),
    [("charlm", "charlm.toml"), ("a/b/train.py:workload", "train.toml"), ("train.py:small", "train-small.toml")],
)
def test_default_file(spec, name):
    assert str(default_policy_file(Source(spec, lambda seed: None))) == name


def test_a_file_without_a_function_is_named_after_itself():
    assert str(default_policy_file(Source("a/train.py", lambda seed: None))) == "train.toml"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": Policy("fp32")}, "it is fp32 here, which computes nothing in 16 bit"),
        ({"steps": 0}, "steps=0: nothing can be tried with that"),
        ({"seeds": 0}, "seeds=0"),
        ({"max_probes": 0}, "max_probes=0"),
        ({"minutes": -1}, "minutes=-1"),
        ({"margin_pct": 0}, "margin 0 %"),
        ({"policy_file": "nowhere/x.toml"}, "there is no folder nowhere"),
        ({"policy_file": "x.json"}, "a policy file ends in .toml"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_trains(options, message):
    def build(seed):
        raise AssertionError("trained")

    with pytest.raises(HalfstepError, match=message):
        tune(**({"source": Source("x", build), "policy": FP16} | options))


def test_costs_are_ratios_of_runs_that_take_turns(monkeypatch):
    turns = []
    speeds = {
        "fp16 module:a=fp32 on_overflow=skip scale=none": [8.0, 4.0],
        "fp16 on_overflow=skip scale=none": [16.0, 8.0],
    }

    def run(source, policy, seed, steps, device):
        turns.append(policy)
        return replace(TRIAL, samples_per_s=speeds[policy][turns.count(policy) - 1])

    monkeypatch.setattr(cost, "NUM_ROUNDS", 2)
    monkeypatch.setattr(cost, "run_trial", run)
    tuned = Policy.parse("fp16 module:a=fp32")
    assert cost.time_ratios(source(1), tuned, [FP16], "cpu") == [2.0]
    assert turns == [*speeds, *speeds]
    monkeypatch.setattr(cost, "live_mib", lambda source, policy, device: 3.0 if "module" in policy else 2.0)
    assert cost.memory_ratios(source(1), tuned, [FP16], "cpu") == [1.5]


TRIAL = tune_module.Trial("fp16", "fp16", 0, 1, (1.0,), (1.0,), (True,), (0,))
