"""What the precision did in a run, taken from its events, and the report that says it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from halfstep.events import Alert, Promotion, StepReport
from halfstep.train.observer import Observer, ends_of
from halfstep.train.train_report import Precision, TrainReport


def step(number, loss, scale, applied=True, replays=0, reads=None):
    def read():
        if reads is not None:
            reads.append(number)
        return [loss, 1.0, scale, float(not applied)]

    return StepReport(number, read, lambda loss, norm: f"the loss is {loss}", replays)


def test_an_observer_says_what_the_steps_were():
    observer = Observer()
    for event in (
        step(1, 4.0, 1024.0),
        step(2, math.nan, 1024.0, applied=False),
        step(3, 3.0, 512.0, replays=2),
        Promotion(3, "layers.0", "fp16", "why"),
        Alert("scale-collapse", 3, "warning", "m", "a"),
        step(4, 2.0, 256.0),
    ):
        observer(event)
    assert observer.losses == [4.0, 3.0, 2.0]
    skipped = {2: "the loss is nan"}
    assert observer.precision() == Precision(4, 3, 2, skipped, 1024.0, 256.0, ("layers.0",), 1)


def test_an_observer_reads_late():
    observer, reads = Observer(), []
    for number in range(1, 41):
        observer(step(number, 1.0, 1.0, reads=reads))
    assert reads == list(range(1, 9))  # those that are 32 steps old
    assert observer.precision().num_steps == 40


def test_of_no_step_nothing_is_said():
    observer = Observer()
    assert observer.precision() == Precision(0, 0, 0, {}, 1.0, 1.0, (), 0)
    assert ends_of(observer.losses) == (None, None)


def test_the_ends_of_a_run_are_means_of_a_tenth():
    assert ends_of([3.0]) == (3.0, 3.0)
    assert ends_of([float(n) for n in range(20)]) == (0.5, 18.5)


REPORT = TrainReport(
    task="sft",
    model="tiny",
    data="builtin",
    output="runs/sft-tiny",
    requested="auto",
    effective="fp16",
    reason="this card computes no bf16",
    device="Tesla T4",
    num_parameters=1_000_000,
    num_trained=20_000,
    precision=Precision(10, 9, 2, {4: "the loss is nan"}, 65536.0, 32768.0, (), 1),
    loss_first=4.0,
    loss_last=3.0,
    evaluation=3.25,
    seconds=12.3,
    stopped_at=None,
    notes=("A note.",),
)


def test_the_report_says_what_the_precision_did():
    text = str(REPORT)
    for part in (
        "sft: loss 4 to 3",
        "20,000 of 1,000,000 parameters",
        "auto, which is fp16 (this card computes no bf16)",
        "9 of 10",
        "65536 to 32768",
        "the loss is nan",
        "On what was held out the loss is 3.25.",
        "A note.",
        "runs/sft-tiny",
    ):
        assert part in text
    assert not REPORT.found


def test_a_run_that_was_stopped_or_lost_is_found():
    assert replace(REPORT, stopped_at=7).found
    assert "stopped after step 7" in str(replace(REPORT, stopped_at=7))
    for num_applied, found in ((0, True), (4, True), (5, False), (10, False)):
        assert replace(REPORT, precision=replace(REPORT.precision, num_applied=num_applied)).found is found
    assert replace(REPORT, evaluation=math.nan).found
    none = replace(REPORT, precision=Precision(0, 0, 0, {}, 1.0, 1.0, (), 0))  # resumed after its last step
    assert not none.found
    assert "sft: no step was left" in str(none)
    assert "watch check" not in str(none)
    assert "halfstep watch check runs/sft-tiny says what the alerts are." in str(REPORT)


@pytest.mark.parametrize(("seconds", "text"), [(0.43, "0.4 s"), (9.96, "10.0 s"), (12.3, "12 s"), (7201.0, "7201 s")])
def test_a_short_time_has_a_decimal(seconds, text):
    assert f" in {text} on" in str(replace(REPORT, seconds=seconds))


def test_its_json_is_strict_and_has_the_keys_of_the_page():
    values = json.loads(json.dumps(replace(REPORT, loss_last=math.nan, evaluation=None).to_dict(), allow_nan=False))
    assert values["loss_last"] == "NaN"
    assert values["evaluation"] is None
    assert values["precision"]["skipped"] == {"4": "the loss is nan"}
    page = (Path(__file__).parent.parent / "docs" / "train.md").read_text()
    for key in (*values, *values["precision"]):
        assert f"`{key}`" in page, key


@pytest.mark.parametrize(("first", "last", "text"), [(1.0, 1.0, "none is needed"), (512.0, 512.0, "512")])
def test_scales_in_words(first, last, text):
    report = replace(REPORT, precision=replace(REPORT.precision, scale_first=first, scale_last=last))
    (line,) = [line for line in str(report).splitlines() if line.startswith("loss scale")]
    assert line.split(maxsplit=2)[2] == text
