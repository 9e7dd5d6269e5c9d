"""What `examine` reports, and that it only looks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import halfstep.doctor as doctor_module
from halfstep.doctor import NATIVE, NOT_AT_ALL, THROUGH_CPU16, UNREADABLE, DoctorReport, examine, support_of
from halfstep.errors import HalfstepError
from halfstep.formats import FORMATS
from halfstep.hardware import Hardware
from halfstep.policy import Policy, auto_policy

PAGE = (Path(__file__).parents[1] / "docs" / "doctor.md").read_text(encoding="utf-8")


def example() -> DoctorReport:
    """The report of the documentation: a T4, as if it were here."""
    hardware = Hardware.of("cuda", "Tesla T4", capability=(7, 5), memory_gib=14.56)
    policy, reason = auto_policy(hardware)
    tf32 = {
        "torch.get_float32_matmul_precision()": "highest",
        "torch.backends.cuda.matmul.fp32_precision": "none",
        "torch.backends.cuda.matmul.allow_tf32": "False",
        "torch.backends.cudnn.allow_tf32": "True",
    }
    versions = {"halfstep": "0.1.0", "python": "3.12.11", "torch": "2.13.0+cu130"}
    versions |= {"numpy": "2.4.6", "cuda": "13.0", "rocm": "none"}
    return DoctorReport(None, hardware, support_of(hardware), tf32, versions, str(policy), reason)


def test_the_cpu_of_this_machine():
    pytest.importorskip("torch")
    report = examine("cpu")
    assert report.problem is None
    assert report.hardware is not None
    assert report.hardware.kind == "cpu"
    assert list(report.formats) == list(FORMATS)
    assert report.formats["fp32"].how == NATIVE
    assert {report.formats[name].how for name in ("bf16", "fp16")} <= {NATIVE, THROUGH_CPU16}
    assert report.formats["e4m3"].how == NOT_AT_ALL
    assert report.policy == str(auto_policy(report.hardware)[0])
    assert Policy.parse(report.policy).compute in FORMATS
    assert set(example().versions) == set(report.versions)
    assert set(example().tf32) == set(report.tf32)


@pytest.mark.parametrize(
    ("hardware", "bf16", "fp16"),
    [
        (Hardware.of("cuda", "Tesla T4", capability=(7, 5)), NOT_AT_ALL, NATIVE),
        (Hardware.of("cuda", "NVIDIA L4", capability=(8, 9)), NATIVE, NATIVE),
        (Hardware.of("cpu", "some CPU"), THROUGH_CPU16, THROUGH_CPU16),
        (Hardware.of("cpu", "some CPU", features=("amx_bf16",)), NATIVE, THROUGH_CPU16),
    ],
    ids=["T4", "L4", "CPU", "CPU with AMX"],
)
def test_how_each_format_is_computed(hardware, bf16, fp16):
    support = support_of(hardware)
    assert (support["bf16"].how, support["fp16"].how) == (bf16, fp16)
    assert all(format.why for format in support.values())


def test_a_report_travels_as_json_and_reads_as_text():
    report = example()
    told = json.loads(json.dumps(report.to_dict()))
    assert told["hardware"]["card"]["name"] == "T4"
    assert told["formats"]["bf16"]["how"] == NOT_AT_ALL
    assert told["policy"] == "fp16"
    text = str(report)
    for word in ("Tesla T4", "14.6 GiB", "capability 7.5", "320 GB/s", "auto means fp16", *FORMATS):
        assert word in text


def test_an_unknown_card_says_so():
    hardware = Hardware.of("cuda", "NVIDIA A10G", capability=(8, 6))
    text = str(DoctorReport(None, hardware, support_of(hardware), {}, {}, "bf16", "because"))
    assert "card      unknown" in text
    assert "memory unknown" in text


def test_without_torch_the_report_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    report = examine()
    assert report.hardware is None
    assert "torch is not installed" in str(report)
    assert "pip install 'halfstep[torch]'" in str(report)
    assert "halfstep" in report.versions
    assert json.loads(json.dumps(report.to_dict()))["hardware"] is None


def test_a_missing_package_is_named(monkeypatch):
    def missing(name):
        raise doctor_module.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor_module.metadata, "version", missing)
    assert doctor_module._versions()["numpy"] == "not installed"


def test_an_unknown_device_is_refused():
    pytest.importorskip("torch")
    assert examine("cpu").problem is None
    with pytest.raises(HalfstepError, match="no such device"):
        examine("tpu")


def test_the_switches_are_read_as_they_are_and_left_so():
    torch = pytest.importorskip("torch")
    name = "torch.get_float32_matmul_precision()"
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        switches = examine("cpu").tf32
        assert switches[name] == "high"
        assert switches["torch.backends.cuda.matmul.allow_tf32"] == "True"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert examine("cpu").tf32[name] == before


def test_a_switch_that_torch_refuses_to_read_is_reported():
    def refuse():
        raise RuntimeError("mix of the legacy and new APIs")

    assert doctor_module._read(refuse) == UNREADABLE
    assert doctor_module._read(lambda: True) == "True"


def test_old_and_new_switches_mixed_are_no_error():
    pytest.importorskip("torch")
    # in a process of its own: torch has no way back from this state
    code = (
        "import torch; torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "from halfstep.doctor import examine; tf32 = examine('cpu').tf32\n"
        "assert tf32['torch.backends.cuda.matmul.fp32_precision'] == 'tf32', tf32"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


def test_docs_show_a_real_report():
    assert str(example()) in PAGE
