"""What is measured: the parts of a step, its memory, the turns of the policies, and the report of it all."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from reference.plan_workloads import BATCH, WIDTH, spec

from halfstep.errors import HalfstepError
from halfstep.loop import make_stepper
from halfstep.plan import measure as on_device
from halfstep.plan import measure_report
from halfstep.plan.build import build
from halfstep.plan.measure import Parts, Run, live_memory, timed
from halfstep.plan.measure_report import MeasureReport, Memory, PolicyMeasure, Prepared, WindowTime, measure
from halfstep.plan.subject import Subject

pytestmark = pytest.mark.usefixtures("kernels_stay")


class Ticks(on_device._Clock):
    """A clock that goes on by one at each look, and keeps what it was asked for."""

    def __init__(self):
        self.time = 0

    def now(self):
        self.time += 1
        return self.time


def run_of(name, policy="fp32", batch_size=None):
    workload = build(Subject(spec(name)))
    return Run(workload, make_stepper(workload, policy, "cpu"), batch_size)


def weights_of(run):
    return [p.detach().clone() for p in run.stepper.model.parameters()]


# --- the parts of a step -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), [("sgd", 1), ("accumulated", 3)])
def test_each_moment_ends_its_part(name, count):
    run = run_of(name)
    parts = Parts(run.stepper, Ticks())
    with parts.watching():
        parts.marks.append([])
        run.window(parts.step)
    assert [part for part, _ in parts.marks[0]] == ["", "forward", "forward", "backward", "optimizer"] * count
    # A tick for the way to the loss and one for it, one for backward, one for the rest; none between two micro-batches.
    assert parts.times() == [WindowTime(2.0 * count, 1.0 * count, 1.0 * count)]


def test_an_optimizer_that_evaluates_the_loss_itself_has_its_work_between_two_evaluations():
    run = run_of("lbfgs")
    parts = Parts(run.stepper, Ticks())
    with parts.watching():
        parts.marks.append([])
        run.window(parts.step)
    names = [part for part, _ in parts.marks[0]]
    again = ["optimizer", "forward", "backward"]
    assert names[:4] == ["", "forward", "forward", "backward"]
    assert names[4:7] == again
    assert names[-1] == "optimizer"


def test_watching_changes_no_bit_and_leaves_nothing():
    plain, watched = run_of("scheduled", "fp16"), run_of("scheduled", "fp16")
    for mine, other in zip(watched.stepper.model.parameters(), plain.stepper.model.parameters(), strict=True):
        mine.data.copy_(other)
    parts = Parts(watched.stepper, on_device._Clock())
    with parts.watching():
        for _ in range(3):
            parts.marks.append([])
            watched.window(parts.step)
            plain.window(plain.stepper.step)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(plain), weights_of(watched), strict=True))
    assert "backward" not in vars(watched.stepper.region)
    assert all(min(window) > 0 for window in parts.times())


def test_a_turn_has_windows_enough(monkeypatch):
    monkeypatch.setattr(on_device, "_run", run_of("sgd"))
    monkeypatch.setattr(on_device, "TURN_S", 0.0)
    assert len(timed()) == on_device.MIN_WINDOWS


# --- batches and memory --------------------------------------------------------------------------------------------


def test_a_batch_is_copied_and_has_the_size_asked_for():
    run = run_of("sgd", batch_size=BATCH + 3)
    drawn = run.workload.batches[0]
    x, labels = run._next()
    assert torch.equal(x, torch.cat([drawn[0], drawn[0][:3]]))
    assert torch.equal(labels, torch.cat([drawn[1], drawn[1][:3]]))
    run = run_of("sgd", batch_size=2)
    assert torch.equal(run._next()[0], run.workload.batches[0][0][:2])
    run = run_of("sgd")
    assert run._next()[0].data_ptr() != run.workload.batches[0][0].data_ptr()
    assert run.batch_size == BATCH


@pytest.mark.slow
def test_live_memory_is_that_of_every_later_window():
    run, memory = live_memory(build(Subject(spec("sgd"))), "fp32", "cpu", None)
    weights = sum(p.nbytes for p in run.stepper.model.parameters())
    inputs = BATCH * (4 * WIDTH + 8)
    # Weights and gradients live together at the end of backward, with little besides.
    assert 2 * weights + inputs < memory.peak < 2 * weights + inputs + 4 * BATCH * WIDTH * 4
    assert memory == live_memory(build(Subject(spec("sgd"))), "fp32", "cpu", None)[1]


# --- the turns -----------------------------------------------------------------------------------------------------

PREPARED = Prepared("a CPU", "2.13.0", 1, "fp32", 12, Memory(2000, None, True))
WINDOWS = [WindowTime(0.001, 0.002, 0.003), WindowTime(0.002, 0.003, 0.005)]


class Answering:
    """Workers whose answers are written down: one list for all, with what was asked."""

    answers: dict = {}  # noqa: RUF012
    asked: list = []  # noqa: RUF012

    def __init__(self, num, computes):
        assert (num, computes) == (1, True)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.asked.append("end")

    def run(self, calls):
        (call,) = calls
        name = call.function.partition(":")[2]
        self.asked.append(f"{name} {call.about}")
        answer = self.answers[name]
        answer = answer(call) if callable(answer) else answer
        if isinstance(answer, KeyboardInterrupt):
            raise answer
        return [answer]


@pytest.fixture
def answering(monkeypatch):
    monkeypatch.setattr(measure_report, "Workers", Answering)
    monkeypatch.setattr(Answering, "asked", [])
    monkeypatch.setattr(Answering, "answers", {"prepare": PREPARED, "timed": WINDOWS, "predicted": 2000})
    return Answering


def refusing(policy, message="it cannot"):
    def answer(call):
        return HalfstepError(policy, message, "Leave it.") if call.about.endswith(policy) else PREPARED

    return answer


def test_policies_take_turns_and_predictions_come_last(answering):
    seen = []
    report = measure("mlp", ["fp32", "bf16"], repeats=2, progress=seen.append)
    turn = ["timed measuring fp32", "timed measuring bf16"]
    assert answering.asked == [
        *["prepare measuring fp32", "prepare measuring bf16"],
        *turn * 2,
        *["predicted measuring fp32", "predicted measuring bf16"],
        *["end"] * 2,
    ]
    assert seen == ["fp32", "bf16"] * 4
    assert [len(row.windows) for row in report.policies] == [4, 4]
    assert not report.found


def test_a_policy_that_the_device_cannot_do_is_a_row_with_its_reason(answering):
    answering.answers["prepare"] = refusing("tf32")
    report = measure("mlp", ["fp32", "tf32"], repeats=1)
    assert report.found
    assert [row["refused"] for row in report.to_dict()["policies"]] == [
        None,
        "tf32: it cannot. Leave it.",
    ]
    assert "timed measuring tf32" not in answering.asked
    assert "tf32 did not run. tf32: it cannot. Leave it." in str(report)


def test_what_fails_for_every_policy_alike_is_raised(answering):
    answering.answers["prepare"] = HalfstepError("workload x", "there is none", "Use mlp.")
    with pytest.raises(HalfstepError, match="workload x: there is none"):
        measure("x", ["fp32", "bf16"])
    assert answering.asked[-1] == "end"


def test_a_step_that_cannot_be_planned_is_measured_all_the_same(answering):
    answering.answers["predicted"] = HalfstepError("aten::x", "it has no fake form", "Measure it.")
    report = measure("mlp", ["fp32"], repeats=1)
    row = report.to_dict()["policies"][0]
    assert (row["predicted_mib"], row["error_pct"]) == (None, None)
    assert row["samples_per_s"] > 0
    assert "fp32 has no prediction. aten::x: it has no fake form." in str(report)
    assert not report.found


def test_ctrl_c_keeps_the_turns_that_have_ended(answering):
    answers = iter([WINDOWS, WINDOWS, KeyboardInterrupt()])
    answering.answers["timed"] = lambda call: next(answers)
    report = measure("mlp", ["fp32", "bf16"], repeats=3)
    assert report.interrupted
    assert [len(row.windows) for row in report.policies] == [2, 2]
    assert "Interrupted" in str(report)
    assert answering.asked[-2:] == ["end", "end"]
    answering.answers["prepare"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        measure("mlp", ["fp32"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"repeats": 0}, "repeats=0"),
        ({"policies": []}, "no policies"),
        ({"policies": ["bf17"]}, "bf17"),
        ({"batch_size": 0}, "a batch of 0"),
    ],
)
def test_bad_calls_start_nothing(answering, arguments, message):
    with pytest.raises(HalfstepError, match=message):
        measure("mlp", **{"policies": ["fp32"]} | arguments)
    assert answering.asked == []


# --- the report ----------------------------------------------------------------------------------------------------

ROW = PolicyMeasure("fp32", PREPARED, tuple(WINDOWS), 1900)


def test_figures_of_a_policy():
    assert ROW.error_pct == pytest.approx(-5.0)
    assert ROW.quartiles() == {"median": pytest.approx(8.0), "low": pytest.approx(7.0), "high": pytest.approx(9.0)}
    assert ROW.samples_per_s == pytest.approx(12 / 0.008)
    assert [ROW.part_ms(part) for part in WindowTime._fields] == pytest.approx([1.5, 2.5, 4.0])
    assert replace(ROW, windows=tuple(WINDOWS[:1])).quartiles()["high"] == pytest.approx(6.0)


def test_json_has_the_keys_that_others_read_and_is_strict():
    row = MeasureReport("mlp", (ROW, PolicyMeasure("bf16")), 1).to_dict()
    keys = "policy peak_mib predicted_mib error_pct reserved_mib samples_per_s step_ms forward_ms backward_ms"
    assert {*keys.split(), "optimizer_ms", "refused"} <= row["policies"][0].keys()
    assert {"workload", "device", "torch", "policies"} <= row.keys()
    assert row["policies"][0]["peak_mib"] == 2000 / 2**20
    assert row["policies"][1]["step_ms"] == {"median": None, "low": None, "high": None}
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize(
    ("predicted", "text"), [(2000, "to the byte"), (1900, "off by 5 % at most"), (None, "nothing could be set")]
)
def test_the_headline_says_how_far_the_plan_is_off(predicted, text):
    assert text in MeasureReport("mlp", (replace(ROW, predicted=predicted),), 1).headline


def test_tables_show_prediction_beside_measurement_and_policies_beside_the_first():
    half = replace(PREPARED, memory=Memory(1000, None, True))
    fast = PolicyMeasure("bf16", half, tuple(WindowTime(*(part / 2 for part in w)) for w in WINDOWS), 1001)
    memory, time = MeasureReport("mlp", (ROW, fast), 1).sheet().tables
    assert [list(map(str, row)) for row in memory.rows] == [
        ["fp32", "0.0018", "0.0019", "-5.0 %", "100 %"],
        ["bf16", "0.0010", "0.0010", "+0.1 %", "50 %"],
    ]
    assert [list(map(str, row)) for row in time.rows] == [
        ["fp32", "1500", "8.00", "7.00 to 9.00", "1.50", "2.50", "4.00", "1.00"],
        ["bf16", "3000", "4.00", "3.50 to 4.50", "0.75", "1.25", "2.00", "2.00"],
    ]
    assert all(len(row) == len(table.columns) for table in (memory, time) for row in table.rows)


def test_cuda_has_reserved_bytes_and_says_what_allocated_holds():
    row = replace(ROW, prepared=replace(PREPARED, memory=Memory(2 << 20, 4 << 20, True)))
    report = MeasureReport("mlp", (row,), 1)
    memory = report.sheet().tables[0]
    assert memory.columns[-2:] == (">reserved, MiB", ">of fp32")
    assert [str(cell) for cell in memory.rows[0]][-2:] == ["4.00", "100 %"]
    assert "workspaces" in str(report)


def test_a_step_that_was_never_applied_is_told():
    row = replace(ROW, prepared=replace(PREPARED, memory=Memory(2000, None, False)))
    assert "No step of fp32 was applied" in str(MeasureReport("mlp", (row,), 1))


# --- the whole -----------------------------------------------------------------------------------------------------


def test_a_processor_takes_what_the_plan_says():
    report = measure("mlp", ["bf16"], repeats=1, batch_size=7, device="cpu")
    (row,) = report.to_dict()["policies"]
    assert row["error_pct"] == 0.0
    assert row["samples_per_s"] > 0
    assert row["step_ms"]["low"] <= row["step_ms"]["median"] <= row["step_ms"]["high"]
    assert report.to_dict()["samples"] == 7
    assert not report.found


@pytest.mark.gpu
def test_a_gpu_tells_allocated_and_reserved_bytes():
    row = measure("charlm", ["fp32"], repeats=1, device="cuda").to_dict()["policies"][0]
    assert row["reserved_mib"] >= row["peak_mib"] > 0
    assert row["forward_ms"] > 0
