"""The guard inside a real Stepper: it lowers the real scale, tells everybody, and changes nothing of a healthy run."""

import json
import logging

import pytest
import torch
from reference.planted_gradient import Net
from reference.reads import Reads

from halfstep import Stepper
from halfstep.events import Alert
from halfstep.watch.entry import RunStart
from halfstep.watch.guard import Guard
from halfstep.watcher import EVERY, Watcher

pytestmark = pytest.mark.usefixtures("kernels_stay")

X = torch.linspace(-2, 2, 64).reshape(8, 8).sin()


class Loop:
    """Trains a small net. factor(step) multiplies the gradient of its body, loss(step) the loss."""

    def __init__(self, policy, factor=lambda step: 1.0, loss=lambda step: 1.0, **options):
        self.model, self.events, self.factor, self.loss = Net(8), [], factor, loss
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.stepper = Stepper(self.model, optimizer, policy, sinks=[self.events.append], **options)
        self.reports = []

    def run(self, num_steps):
        for _ in range(num_steps):
            step = self.stepper.num_steps + 1
            self.model.factor = self.factor(step)
            closure = lambda: self.loss(step) * (self.model(X).float() - 1).square().mean()  # noqa: E731, B023
            while (report := self.stepper.step(closure)) is None:
                pass
            self.reports.append(report)
        self.stepper.close()
        return self

    @property
    def alerts(self):
        return [event for event in self.events if isinstance(event, Alert)]

    def said(self, rule="nonfinite-gradients"):
        return [(alert.step, alert.severity) for alert in self.alerts if alert.rule == rule]

    def scales(self):
        return [report.scale for report in self.reports]


def entries(folder):
    return [json.loads(line) for line in (folder / "rank-00000.jsonl").read_text().splitlines()]


def now_and_then(step):
    """One step in 30 has a gradient that is inf at any scale."""
    return float("inf") if step > 50 and step % 30 == 0 else 1.0


def test_the_scale_is_really_lowered_once_a_window(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "halfstep"):
        policy = "fp16 on_overflow=skip scale.init=1024 scale.floor=0.0009765625"
        loop = Loop(policy, now_and_then, log=tmp_path).run(220)
    lines = entries(tmp_path)
    reductions = [(entry["step"], entry["scale"]) for entry in lines if entry["kind"] == "reduction"]
    assert [step for step, _ in reductions] == [70, 190]
    # By itself the scale halves after each of these steps.
    skipped = [report.step for report in loop.reports if not report.applied]
    assert skipped == [60, 90, 120, 150, 180, 210]
    lowered = [*skipped, *(step for step, _ in reductions)]
    expected = [1024.0 * 0.5 ** sum(before < step for before in lowered) for step in range(1, 221)]
    assert loop.scales() == expected
    assert all(scale == expected[step] for step, scale in reductions)
    # It is told to everybody.
    assert loop.said() == [(60, "warning"), (210, "error")]
    assert " in body, " in loop.alerts[0].message
    told = [{name: entry[name] for name in alert.to_dict()} for alert, entry in zip(
        loop.alerts, [entry for entry in lines if entry["kind"] == "alert"], strict=True)]  # fmt: skip
    assert told == [alert.to_dict() for alert in loop.alerts]
    assert sum(record.message.startswith("step 60, rank 0, nonfinite-gradients: ") for record in caplog.records) == 1
    # And the log says the same again.
    guard = Guard(RunStart.from_entry(lines[0]))
    assert [alert for line in lines for alert in guard.see(line)] == loop.alerts


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_that_grow_under_replay(tmp_path, accumulate):
    """From step 60 on they are 2^14 times as large: one step runs again until they fit, and the guard adds a factor."""
    loop = Loop("fp16", lambda step: 2.0**14 if step >= 60 else 1.0, log=tmp_path, accumulate=accumulate).run(90)
    lines = entries(tmp_path)
    assert all(report.applied for report in loop.reports)
    assert loop.reports[59].num_replays > 3
    assert [entry["step"] for entry in lines if entry["kind"] == "reduction"] == [70]
    assert loop.scales()[70] == loop.scales()[69] / 2
    assert loop.said() == [(60, "warning")]
    assert " in body, with a finite loss" in next(a.message for a in loop.alerts if a.rule == "nonfinite-gradients")
    assert [alert.step for alert in loop.alerts if alert.rule == "scale-collapse"] == [60]
    guard = Guard(RunStart.from_entry(lines[0]))
    assert [alert for line in lines for alert in guard.see(line)] == loop.alerts


@pytest.mark.parametrize("policy", ["bf16", "fp32", "fp16 scale=static on_overflow=skip scale.init=1024"])
def test_without_a_dynamic_scale_it_only_tells(policy):
    loop = Loop(policy, lambda step: float("nan") if step == 60 else 1.0).run(70)
    assert loop.said() == [(60, "warning")]
    assert len(set(loop.scales())) == 1


def test_a_loss_that_is_not_finite_lowers_nothing_more():
    loop = Loop("fp16 on_overflow=skip scale.init=1024", loss=lambda step: float("nan") if step == 60 else 1.0).run(80)
    assert loop.said() == [(60, "error")]
    assert loop.scales() == [1024.0] * 60 + [512.0] * 20


@pytest.mark.parametrize("policy", ["fp16", "fp16 on_overflow=skip scale.interval=7", "bf16"])
def test_a_healthy_run_is_the_same_to_the_bit_and_says_nothing(policy, tmp_path):
    """The first scale is far too high, and grows to where it overflows again."""
    factor = lambda step: 2.0**8  # noqa: E731
    watched, plain = Loop(policy, factor, log=tmp_path).run(70), Loop(policy, factor, watch=False).run(70)
    assert watched.alerts == []
    assert list(map(repr, watched.reports)) == list(map(repr, plain.reports))
    for name, weight in watched.model.state_dict().items():
        assert torch.equal(weight, plain.model.state_dict()[name])
    assert "bf16" in policy or len(set(watched.scales())) > 1 or sum(r.num_replays for r in watched.reports)


def test_a_run_that_goes_on_is_calibrated(tmp_path):
    """The scale that it has held for 40 steps overflows right after the seam: twice is once too often."""
    first = Loop("fp16 on_overflow=skip", log=tmp_path).run(40)
    again = Loop("fp16 on_overflow=skip", lambda step: float("inf") if step in (41, 42) else 1.0, log=tmp_path)
    again.stepper.load_state_dict(first.stepper.state_dict())
    again.run(60)
    assert again.said() == [(42, "warning")]
    lines = entries(tmp_path)
    guard = Guard(RunStart.from_entry(lines[0]))
    assert [alert for line in lines for alert in guard.see(line)] == again.alerts


@pytest.mark.parametrize("policy", ["bf16", "fp16 on_overflow=skip scale.init=256"])
def test_nothing_waits_for_the_device_but_what_has_arrived(policy, tmp_path, monkeypatch):
    """The numbers that were read late are on the host; apart from them a watched step reads what a plain one reads."""
    see, waits = Watcher._read, Reads()

    def own_see(self, *args, **kwargs):
        before = waits.num_reads
        see(self, *args, **kwargs)
        waits.num_reads = before

    monkeypatch.setattr(Watcher, "_read", own_see)
    loop = Loop(policy, log=tmp_path)
    with waits:
        for _ in range(3 * EVERY + 1):
            loop.stepper.step(lambda: (loop.model(X).float() - 1).square().mean())
    assert waits.num_reads == 0
    loop.stepper.close()
    assert [entry["step"] for entry in entries(tmp_path) if entry["kind"] == "step"] == list(range(1, 3 * EVERY + 2))
