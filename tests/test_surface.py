"""What users rely on is written down here: public names, flags, settings, record keys. A change is a decision."""

import dataclasses
import inspect

from commands import callbacks

import halfstep
from halfstep import events, policy
from halfstep.train.settings import Settings
from halfstep.workload import Workload

RECORDS = (events.Overflow, events.Promotion, events.Alert)


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_public_names():
    assert sorted(halfstep.__all__) == [
        "Contract",
        "GradScaler",
        "HalfstepError",
        "Hardware",
        "InferenceReport",
        "LossScale",
        "Policy",
        "Region",
        "ScaleExhausted",
        "StepReport",
        "Stepper",
        "UpdateMeter",
        "Watch",
        "WeightAverage",
        "Workload",
        "align",
        "auto_policy",
        "autocast",
        "cast_for_inference",
        "distributed",
        "integrations",
    ]


def test_stepper():
    assert parameters(halfstep.Stepper.__init__) == [
        "model",
        "optimizer",
        "policy",
        "accumulate",
        "max_norm",
        "scheduler",
        "on_applied",
        "sinks",
        "keep_casts",
        "on_exhausted",
        "explain",
        "passes_closure",
        "log",
        "watch",
        "contract",
        "beside",
        "hardware",
    ]
    public = {name for name in dir(halfstep.Stepper) if not name.startswith("_")}
    assert public == {
        "backward",
        "capture",
        "close",
        "drop",
        "end_window",
        "explanation",
        "flush",
        "forward",
        "fp32_state_dict",
        "gradient_norm",
        "inference",
        "info",
        "load_state_dict",
        "policy",
        "record",
        "state_dict",
        "step",
        "unscale",
        "update_meter",
        "weights",
    }


def test_workload():
    assert [field.name for field in dataclasses.fields(Workload)] == [
        "model",
        "batches",
        "loss",
        "optimizer",
        "evaluate",
        "scheduler",
        "max_norm",
        "accumulate",
    ]


def test_policy_settings():
    assert [field.name for field in dataclasses.fields(policy.Policy)] == [
        "compute",
        "modules",
        "ops",
        "master",
        "tf32",
        "scale",
        "on_overflow",
        "on_exhausted",
    ]
    assert [field.name for field in dataclasses.fields(policy.LossScale)] == [
        "kind",
        "init",
        "growth",
        "backoff",
        "interval",
        "floor",
        "ceiling",
        "hysteresis",
    ]


def test_contract():
    assert [field.name for field in dataclasses.fields(halfstep.Contract)] == ["every", "allow"]
    assert halfstep.Contract() == halfstep.Contract(every=100, allow=())


def test_record_keys():
    report = events.StepReport(1, lambda: (1.0, 2.0, 4.0, 0.0), lambda loss, norm: "")
    assert list(report.to_dict()) == [
        "step",
        "loss",
        "grad_norm",
        "scale",
        "applied",
        "reason",
        "num_replays",
        "nonfinite_share",
    ]
    keys = {cls.__name__: [field.name for field in dataclasses.fields(cls)] for cls in RECORDS}
    assert keys == {
        "Overflow": ["step", "micro_batch", "scale", "parameters", "nonfinite_share", "overflowed_at"],
        "Promotion": ["step", "module", "policy", "reason"],
        "Alert": ["rule", "step", "severity", "message", "action", "rank"],
    }


def test_flags():
    commands = {name: parameters(callback) for name, callback in callbacks().items()}
    assert commands == {
        "doctor": ["device", "json_file"],
        "compare": [
            "workload",
            "policies",
            "seeds",
            "steps",
            "margin",
            "data",
            "device",
            "json_file",
            "html_file",
        ],
        "trace": ["workload", "policy", "steps", "seed", "device", "json_file", "html_file"],
        "ranges": ["workload", "policy", "step", "seed", "device", "json_file", "html_file"],
        "audit": ["workload", "policy", "step", "seed", "device", "json_file", "html_file"],
        "diff": ["workload", "policies", "step", "seed", "device", "json_file", "html_file"],
        "tune": [
            "workload",
            "policy",
            "steps",
            "seeds",
            "margin",
            "probes",
            "minutes",
            "policy_file",
            "device",
            "json_file",
            "html_file",
        ],
        "train": [
            "task",
            "config",
            *(field.name for field in dataclasses.fields(Settings) if field.name != "task"),
            "json_file",
        ],
        "plan": [
            "model",
            "card",
            "memory",
            "policies",
            "batch",
            "inputs",
            "ranks",
            "calibrate",
            "snapshot",
            "json_file",
            "html_file",
        ],
        "measure": ["workload", "policies", "batch", "repeats", "device", "json_file", "html_file"],
        "lint": [
            "paths",
            "select",
            "ignore",
            "exclude",
            "fix",
            "unsafe_fixes",
            "diff",
            "migrate",
            "to_halfstep",
            "format",
            "json_file",
            "statistics",
            "explain",
            "watch",
            "no_cache",
            "stdin_filename",
        ],
        "new": ["file"],
        "watch serve": ["folder", "terminal", "rank", "host", "port", "golden"],
        "watch check": ["folder", "settings", "json_file", "html_file"],
        "watch export": ["folder", "target", "json_file"],
        "watch notify": ["targets", "json_file"],
    }
