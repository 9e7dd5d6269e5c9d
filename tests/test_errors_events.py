"""Errors are one line and travel between processes; records read the device once, and only when somebody asks."""

from __future__ import annotations

import copy
import json
import math
import pickle

import pytest

from halfstep.errors import HalfstepError, ScaleExhausted
from halfstep.events import Alert, Overflow, RunInfo, StepReport

# ---- errors


def test_an_error_is_one_line_and_keeps_its_parts():
    error = HalfstepError("accumulate=0", "a window holds\n   whole\tmicro-batches", "Use 1,\n2, 3.")
    assert str(error) == "accumulate=0: a window holds whole micro-batches. Use 1, 2, 3."
    assert (error.what, error.why, error.fix) == (
        "accumulate=0",
        "a window holds\n   whole\tmicro-batches",
        "Use 1,\n2, 3.",
    )


def test_an_error_is_a_value_error():
    with pytest.raises(ValueError, match=r"^a: b\. c$"):
        raise HalfstepError("a", "b", "c")


@pytest.mark.parametrize("travel", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_survives_a_copy_and_a_pickle(travel):
    error = HalfstepError("100 %s {0}", "line\nbreak", "ü \\ '\"")
    again = travel(error)
    assert type(again) is HalfstepError
    assert (again.what, again.why, again.fix, str(again)) == (error.what, error.why, error.fix, str(error))


def test_an_exhausted_scale_survives_a_pickle_as_itself():
    again = pickle.loads(pickle.dumps(ScaleExhausted("a", "b", "c")))
    assert type(again) is ScaleExhausted
    assert isinstance(again, HalfstepError)
    assert str(again) == "a: b. c"


# ---- step reports


class Device:
    """Four numbers that count how often somebody waits for them."""

    def __init__(self, loss=1.5, norm=2.0, scale=4.0, skipped=0.0):
        self.numbers, self.num_reads = [loss, norm, scale, skipped], 0

    def read(self):
        self.num_reads += 1
        return self.numbers


def explain(loss, norm):
    return f"loss {loss}, norm {norm}"


def test_a_report_reads_nothing_before_somebody_asks():
    device = Device()
    report = StepReport(3, device.read, explain, num_replays=1)
    assert (report.step, report.num_replays) == (3, 1)
    assert device.num_reads == 0


@pytest.mark.parametrize("name", ["loss", "grad_norm", "scale", "applied", "reason", "nonfinite_share"])
def test_each_number_reads_once_and_then_never_again(name):
    device = Device()
    report = StepReport(3, device.read, explain)
    getattr(report, name)
    assert device.num_reads == 1
    device.numbers = [9.0, 9.0, 9.0, 1.0]
    assert (report.loss, report.grad_norm, report.scale, report.applied) == (1.5, 2.0, 4.0, True)
    report.to_dict()
    repr(report)
    assert device.num_reads == 1


def test_a_read_that_fails_is_not_taken_for_a_number():
    numbers = [[1.0, 2.0, 3.0, 0.0]]

    def read():
        if len(numbers) == 1:
            numbers.append([])
            raise RuntimeError("the device is gone")
        return numbers[0]

    report = StepReport(1, read, explain)
    with pytest.raises(RuntimeError, match="gone"):
        report.loss  # noqa: B018
    assert report.loss == 1.0


def test_an_applied_report():
    report = StepReport(7, Device().read, explain, num_replays=2, nonfinite_share=0.25)
    assert report.applied is True
    assert report.reason is None
    assert report.nonfinite_share == 0.0
    assert repr(report) == "step 7: loss 1.5, gradient norm 2, scale 4, 2 replays, applied"


def test_nothing_is_explained_on_an_applied_step():
    def never(loss, norm):
        raise AssertionError("asked why an applied step was skipped")

    assert StepReport(1, Device().read, never).reason is None


def test_a_skipped_report_keeps_nan_and_inf_and_says_why():
    report = StepReport(7, Device(math.nan, math.inf, 0.5, 1.0).read, explain, nonfinite_share=0.25)
    assert math.isnan(report.loss)
    assert report.grad_norm == math.inf
    assert report.applied is False
    assert report.reason == "loss nan, norm inf"
    assert report.nonfinite_share == 0.25
    assert repr(report) == "step 7: loss nan, gradient norm inf, scale 0.5, skipped: loss nan, norm inf"
    numbers = report.to_dict()
    assert math.isnan(numbers["loss"])
    assert numbers["grad_norm"] == math.inf


def test_a_share_that_nobody_counted_stays_unknown():
    assert StepReport(1, Device(skipped=1.0).read, explain).nonfinite_share is None


def test_report_keys_are_the_ones_written_down():
    report = StepReport(7, Device().read, explain)
    assert report.to_dict() == {
        "step": 7,
        "loss": 1.5,
        "grad_norm": 2.0,
        "scale": 4.0,
        "applied": True,
        "reason": None,
        "num_replays": 0,
        "nonfinite_share": 0.0,
    }
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


def test_a_misspelt_field_is_not_taken():
    report = StepReport(1, Device().read, explain)
    with pytest.raises(AttributeError):
        report.losss = 3.0


# ---- the other records

RECORDS = [
    (
        Overflow(3, 1, 32768.0, ("a.weight",), 0.5, 65536.0),
        ["step", "micro_batch", "scale", "parameters", "nonfinite_share", "overflowed_at"],
    ),
    (Alert("scale-floor", 3, "error", "m", "a"), ["rule", "step", "severity", "message", "action", "rank"]),
    (RunInfo("auto", "bf16", "r", "cpu", {"torch": "2"}), ["requested", "effective", "reason", "device", "versions"]),
]


@pytest.mark.parametrize(("record", "keys"), RECORDS, ids=lambda value: type(value).__name__)
def test_records_are_frozen_plain_and_round_trip(record, keys):
    table = record.to_dict()
    assert list(table) == keys
    assert type(record)(**table) == record
    json.dumps(table)
    assert pickle.loads(pickle.dumps(record)) == record
    with pytest.raises(AttributeError):
        setattr(record, keys[0], None)


def test_the_record_of_a_run_does_not_hand_out_its_own_table():
    info = RunInfo("auto", "bf16", "r", "cpu", {"torch": "2"})
    info.to_dict()["versions"]["torch"] = "3"
    assert info.versions["torch"] == "2"


def test_an_alert_is_of_rank_zero_unless_it_says_so():
    assert Alert("r", 1, "warning", "m", "a").rank == 0
