"""What a stepper's log holds, against what the stepper itself says."""

import copy
import gc
import json
import math
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import halfstep
from halfstep import watcher
from halfstep.events import Alert
from halfstep.explain.ranges import ranges_of
from halfstep.report import Report
from halfstep.watch.entry import Step

pytestmark = pytest.mark.usefixtures("kernels_stay")

X = torch.linspace(-2, 2, 64).reshape(8, 8).sin()


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch):
    """Steps are read when ten have come, however slow the machine is."""
    monkeypatch.setattr(watcher, "_LONGEST_S", math.inf)


def net():
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def make(policy, log, model=None, **kwargs):
    model = model or net()
    return halfstep.Stepper(
        model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), policy, log=log, **kwargs
    )


def train(stepper, num_steps, factor=lambda i: 1.0, count=None):
    reports = []
    for i in range(num_steps):

        def closure(i=i):
            loss = (stepper.model(X).float() - 1).square() * factor(i)
            return loss.mean() if count is None else (loss.sum(), count(i))

        reports.append(stepper.step(closure))
    return [report for report in reports if report]


def entries(folder, *kinds):
    lines = (folder / "rank-00000.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if not kinds or entry["kind"] in kinds]


def steps(folder):
    return [Step.from_entry(entry) for entry in entries(folder, "step")]


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16 scale.init=256", "fp16 on_overflow=skip scale.init=256"])
def test_steps_are_those_of_the_reports(policy, tmp_path):
    stepper = make(policy, tmp_path, accumulate=2, max_norm=0.1)
    reports = train(stepper, 46)
    stepper.close()
    assert len(reports) == 23
    for step, report in zip(steps(tmp_path), reports, strict=True):
        told = report.to_dict()
        assert {name: getattr(step, name) for name in told} == told
        assert step.count == 2.0
        assert step.parameters == ()
    first, last = entries(tmp_path)[0], entries(tmp_path)[-1]
    assert first["policy"] == str(stepper.policy)
    assert first["info"]["effective"] == stepper.info.effective
    assert first["num_elements"] == 8 * 16 + 16 + 16 + 1
    assert (last["kind"], last["state"]) == ("end", "finished")


def test_a_count_on_the_device_arrives_with_its_step(tmp_path):
    stepper = make("bf16", tmp_path, accumulate=2)
    train(stepper, 6, count=lambda i: torch.tensor(8 * (i + 1)))
    stepper.close()
    assert [step.count for step in steps(tmp_path)] == [24.0, 56.0, 88.0]


@pytest.mark.parametrize("policy", ["bf16", "fp32", "fp16 on_overflow=skip scale.init=256"])
def test_a_bad_step_names_its_parameters_although_nobody_counted(policy, tmp_path):
    model = net()
    stepper = make(policy, tmp_path, model)
    handle = model[2].weight.register_hook(lambda gradient: gradient * math.inf)
    (report,) = train(stepper, 1)
    handle.remove()
    train(stepper, 1)
    stepper.close()
    bad, good = steps(tmp_path)
    assert not report.applied
    assert report.nonfinite_share is None
    assert (bad.applied, bad.nonfinite_share, bad.reason) == (False, None, report.reason)
    assert math.isnan(bad.grad_norm) or math.isinf(bad.grad_norm)
    assert bad.parameters == ("2.weight",)
    assert bad.nonfinite_at_most == 16 / 161
    assert good.applied
    assert good.parameters == ()


def test_a_replay_is_told_with_the_share_that_was_not_finite(tmp_path):
    stepper = make("fp16 scale.init=1024", tmp_path)
    train(stepper, 3, factor=lambda i: 1e4 if i == 1 else 1.0)
    stepper.close()
    overflows, bad = entries(tmp_path, "overflow"), steps(tmp_path)[1]
    assert bad.applied
    assert bad.num_replays == len(overflows) > 0
    assert all(entry["step"] == 2 and 0 < entry["nonfinite_share"] <= 1 for entry in overflows)
    assert bad.nonfinite_share == overflows[-1]["nonfinite_share"]
    assert bad.scale == overflows[-1]["scale"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_layers_are_the_true_norms_of_every_hundredth_step(accumulate, tmp_path):
    model = net()
    stepper = make("fp16 scale.init=256", tmp_path, model, accumulate=accumulate)
    norms = {}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: norms.update({p: p.grad.norm().item() / 256}))
    for _ in range(100 * accumulate):  # the micro-batches of a window are the same, and so is their mean
        stepper.step(lambda: (model(X).float() - 1).square().mean())
    truth = [norms[parameter] for parameter in model.parameters()]
    stepper.close()
    (layers,) = entries(tmp_path, "layers")
    assert layers["step"] == 100
    assert layers["parameters"] == [name for name, _ in model.named_parameters()]
    assert layers["norms"] == pytest.approx(truth, rel=1e-5)  # only the rounding of norms in fp32 differs
    assert math.hypot(*layers["norms"]) == pytest.approx(steps(tmp_path)[99].grad_norm, rel=1e-6)


def test_a_run_that_resumes_marks_the_seam(tmp_path):
    stepper = make("fp16 scale.init=256", tmp_path)
    train(stepper, 4)
    state, weights = stepper.state_dict(), copy.deepcopy(stepper.model.state_dict())
    train(stepper, 3)
    stepper.close()
    model = net()
    model.load_state_dict(weights)
    stepper = make("fp16 scale.init=256", tmp_path, model)
    stepper.load_state_dict(state)
    train(stepper, 2)
    stepper.close()
    told = [(e["kind"], e.get("step")) for e in entries(tmp_path)]
    assert told[-5:] == [("run", None), ("seam", 4), ("step", 5), ("step", 6), ("end", None)]
    assert [step.step for step in steps(tmp_path)] == [1, 2, 3, 4, 5, 6, 7, 5, 6]


def test_an_exhausted_scale_is_an_alert_for_everybody(tmp_path, caplog):
    told = []
    stepper = make("fp16 scale.init=1 on_overflow=skip", tmp_path, sinks=[told.append])
    stepper.model[2].weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(halfstep.ScaleExhausted) as caught:
        train(stepper, 70)
    stepper.close()
    alert = entries(tmp_path, "alert")[-1]
    assert alert["rule"] == "scale-exhausted"
    assert alert["message"] in str(caught.value)
    assert alert["action"] == caught.value.fix
    assert told[-1].rule == "scale-exhausted"
    assert "scale-exhausted" in caplog.text
    assert entries(tmp_path, "step")[-1]["step"] == stepper.num_steps


def test_a_stepper_that_is_dropped_leaves_a_whole_log(tmp_path):
    stepper = make("fp32", tmp_path)
    train(stepper, 13)
    gone = weakref.ref(stepper)
    del stepper
    gc.collect()
    assert gone() is None
    assert [step.step for step in steps(tmp_path)] == list(range(1, 14))
    assert entries(tmp_path)[-1]["state"] == "finished"


def test_a_copy_is_another_run_and_writes_nothing(tmp_path):
    stepper = make("fp32", tmp_path)
    other = copy.deepcopy(stepper)
    train(other, 12)
    stepper.close()
    assert entries(tmp_path, "step") == []


def test_a_script_that_fails_says_so_in_its_log(tmp_path):
    script = (
        "import torch, halfstep\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"stepper = halfstep.Stepper(model, optimizer, 'fp32', log={str(tmp_path)!r})\n"
        "for _ in range(3): stepper.step(lambda: model(torch.ones(1, 2)).sum())\n"
        "raise RuntimeError('the loader is empty')\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "the loader is empty" in done.stderr
    assert [step.step for step in steps(tmp_path)] == [1, 2, 3]
    end = entries(tmp_path)[-1]
    assert (end["kind"], end["state"], end["reason"]) == ("end", "failed", "RuntimeError: the loader is empty")


def test_reports_of_a_loop_are_kept(tmp_path):
    stepper = make("bf16 master=copy", tmp_path)
    meter = stepper.update_meter(every=1)
    train(stepper, 2)
    updates = meter.report()
    stepper.record(updates)
    ranges = ranges_of(stepper.capture(lambda: (stepper.model(X).float() - 1).square().mean()))
    stepper.record(ranges)
    stepper.close()
    (kept,) = entries(tmp_path, "updates")
    assert {name: kept[name] for name in updates.to_dict()} == json.loads(json.dumps(updates.to_dict()))
    (kept,) = entries(tmp_path, "ranges")
    assert kept["modules"] == json.loads(json.dumps(ranges.to_dict()["modules"]))
    with pytest.raises(halfstep.HalfstepError, match=r"record\(Report\): no rule and no page reads it"):
        stepper.record(Report())


def test_nothing_of_a_run_changes_by_being_watched(tmp_path):
    weights = []
    for settings in ({"watch": False, "log": None}, {"log": None}, {"log": tmp_path}):
        stepper = make("fp16 scale.init=1024 scale.interval=7", **settings)
        train(stepper, 60)
        weights.append([weight.clone() for weight in stepper.model.parameters()])
        stepper.close()
    for other in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], other, strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"watch": False}, r"with watch=False: the log is what is watched\. Leave one of them out"),
        ({"watch": "nowhere.toml"}, r"settings nowhere.toml: it cannot be read"),
        ({"watch": halfstep.Watch(rules={"loss-spik": False})}, "rule 'loss-spik': no such rule of the guard"),
        ({"watch": halfstep.Watch(golden=("nowhere",))}, "nowhere"),
        ({"watch": halfstep.Watch(exporters=("excel:a",))}, "excel"),
    ],
)
def test_settings_that_cannot_work_are_one_line_before_training(settings, message, tmp_path):
    with pytest.raises(halfstep.HalfstepError, match=message):
        make("fp32", tmp_path / "run", **settings)


@pytest.mark.parametrize("layout", ["copy", "split16", "split8", "kahan", "stochastic"])
def test_layouts_that_take_the_gradients_away_are_watched_alike(layout, tmp_path, caplog):
    model = net()
    stepper = make(f"bf16 master={layout}", tmp_path, model)
    handle = model[2].weight.register_hook(lambda gradient: gradient * math.inf)
    train(stepper, 1)
    handle.remove()
    train(stepper, 99)
    stepper.close()
    bad, *_, last = steps(tmp_path)
    assert bad.parameters == ("2.weight",)
    assert bad.nonfinite_share == 16 / 161 or bad.nonfinite_at_most == 16 / 161
    (layers,) = entries(tmp_path, "layers")
    assert layers["parameters"] == [name for name, _ in model.named_parameters()]
    # Each norm is rounded to fp32 before they are put together again.
    assert math.hypot(*layers["norms"]) == pytest.approx(last.grad_norm, rel=1e-6)
    assert "fault of its own" not in caplog.text


def test_one_layer_that_is_not_finite_hides_no_other(tmp_path):
    model = net()
    stepper = make("bf16", tmp_path, model)
    train(stepper, 99)
    truth = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: truth.update({name: p.grad.norm().item()}))
    model[0].bias.register_hook(lambda gradient: gradient * math.inf)
    train(stepper, 1)
    stepper.close()
    (layers,) = entries(tmp_path, "layers")
    norms = dict(zip(layers["parameters"], map(float, layers["norms"]), strict=True))
    assert not math.isfinite(norms.pop("0.bias"))
    truth.pop("0.bias")
    assert norms == pytest.approx(truth, rel=1e-6)


def test_a_parameter_without_a_gradient_is_none_of_those_that_could_be_finite(tmp_path):
    model = nn.ModuleDict({"used": nn.Linear(8, 1), "unused": nn.Linear(80, 80)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    stepper = halfstep.Stepper(model, optimizer, "bf16", log=tmp_path)
    stepper.step(lambda: model["used"](X).float().mean() * math.inf)
    stepper.close()
    (bad,) = steps(tmp_path)
    assert bad.nonfinite_at_most == 1.0


def test_a_second_replay_counts_the_elements_that_were_kept_as_finite(tmp_path):
    """The head alone overflows, twice: its one weight in two is half of its share of all."""
    model = net()
    stepper = make("fp16 scale.init=1024", tmp_path, model)
    times = iter([math.inf, math.inf])
    model[2].weight.register_hook(lambda gradient: gradient * next(times, 1.0))
    (report,) = train(stepper, 1)
    stepper.close()
    assert report.num_replays == 2
    overflows = entries(tmp_path, "overflow")
    assert [entry["nonfinite_share"] for entry in overflows] == [16 / 161, 16 / 161]
    assert [(entry["overflowed_at"], entry["scale"]) for entry in overflows] == [(1024, 512), (512, 256)]


def test_a_stepper_that_is_closed_lowers_nothing_more(caplog):
    model = net()
    stepper = make("fp16 on_overflow=skip scale.init=65536", None, model)
    train(stepper, 41)
    model[2].weight.register_hook(lambda gradient: gradient * (math.inf if stepper.num_steps == 41 else 1.0))
    train(stepper, 4)
    stepper.close()
    (report, *_), last = train(stepper, 1), train(stepper, 50)[-1]
    assert report.scale == last.scale == 8192  # found at 16384, then by its own back-off


def test_an_exception_of_a_sink_loses_nothing_of_the_log(tmp_path):
    def stop(event):
        if isinstance(event, Alert):
            raise RuntimeError("enough")

    model = net()
    stepper = make("bf16", tmp_path, model, sinks=[stop])
    model[0].weight.register_hook(lambda gradient: gradient * (math.inf if stepper.num_steps == 12 else 1.0))
    train(stepper, 19)
    with pytest.raises(RuntimeError, match="enough"):
        train(stepper, 1)  # step 13 is read with step 20
    train(stepper, 15)
    stepper.close()
    assert [step.step for step in steps(tmp_path)] == list(range(1, 36))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_writes_nothing_and_ends(tmp_path):
    stepper = make("fp32", tmp_path)
    train(stepper, 15)
    child = os.fork()
    if child == 0:
        stepper.close()
        train(stepper, 15)
        del stepper
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    train(stepper, 5)
    stepper.close()
    assert [step.step for step in steps(tmp_path)] == list(range(1, 21))


@pytest.mark.parametrize("watch", [None, 3, {"rules": {}}])
def test_what_is_no_setting_is_one_line(watch):
    with pytest.raises(halfstep.HalfstepError, match=r"it is a halfstep\.Watch, the name of its TOML file"):
        make("fp32", None, watch=watch)
