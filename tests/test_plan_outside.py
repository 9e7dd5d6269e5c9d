"""What a process holds on its card besides the step: workspaces by torch's source, the context by who measured it."""

import subprocess
import sys

import pytest
from reference.allocator import trace_of

from halfstep.plan import outside
from halfstep.plan.outside import MIB, not_counted, outside_of, workspaces_of
from halfstep.plan.step_trace import StepTrace, Storage
from halfstep.plan.target import target_of

SMALL = 8 * MIB + 128 * 1024


def trace_with(**ops):
    """A step with these operations by phase."""
    storages = [
        Storage(512, "activations", phase, op, "", None, None, 2 * i + 1, 2 * i + 2)
        for i, (phase, op) in enumerate((phase, op) for phase, names in ops.items() for op in names)
    ]
    return StepTrace(storages, 2 * len(storages), (("forward", 1),), 1, 1, 0, 0, "fp32")


TRAINS = trace_with(forward=["aten.addmm.default", "aten.relu.default"], backward=["aten.mm.default"])


def release(monkeypatch, text):
    monkeypatch.setattr(outside, "version", lambda name: {"torch": text}[name])


@pytest.mark.parametrize(
    ("card", "of_2_11", "of_2_12"),
    [
        ("T4", SMALL, SMALL),
        ("A100 SXM4 80GB", SMALL, SMALL),
        ("RTX 4090", SMALL, SMALL),
        ("H100 SXM5", 32 * MIB, 32 * MIB),
        ("B200", SMALL, 32 * MIB),
        ("RTX 5090", SMALL, 32 * MIB),
    ],
)
def test_a_workspace_for_each_thread_that_multiplies(monkeypatch, card, of_2_11, of_2_12):
    release(monkeypatch, "2.11.0+cu130")
    assert [each.nbytes for each in workspaces_of(target_of(card), TRAINS)] == [of_2_11, MIB, of_2_11]
    for text in ("2.12.1", "2.13.0+cpu"):
        release(monkeypatch, text)
        assert [each.nbytes for each in workspaces_of(target_of(card), TRAINS)] == [of_2_12, of_2_12]


def test_a_workspace_says_whose_and_by_whom(monkeypatch):
    release(monkeypatch, "2.11.0")
    found = workspaces_of(target_of("T4"), TRAINS)
    assert [each.name for each in found] == [
        "cuBLAS workspace of the forward pass",
        "cublasLt workspace of the forward pass",
        "cuBLAS workspace of the backward pass",
    ]
    assert {each.how for each in found} == {"stated by the source of torch 2.11 for capability 7.5"}


def test_no_product_no_workspace():
    convolves = trace_with(forward=["aten.convolution.default"], backward=["aten.convolution_backward.default"])
    assert workspaces_of(target_of("T4"), convolves) == ()
    frozen = trace_with(forward=["aten.bmm.default"], backward=["aten.mul.Tensor"])
    assert [each.name for each in workspaces_of(target_of("T4"), frozen)] == ["cuBLAS workspace of the forward pass"]
    assert workspaces_of(target_of("T4"), trace_of((512, 0, None, "weights"))) == ()


def test_a_clip_by_a_product_is_the_callers_thread():
    steps = trace_with(step=["aten.dot.default"])
    assert [each.name for each in workspaces_of(target_of(), steps)] == ["cuBLAS workspace of the forward pass"]


def test_the_context_is_the_measured_one_or_the_largest_known():
    (t4,) = outside_of(target_of("T4"))
    assert (t4.name, t4.nbytes) == ("CUDA context", 135 * MIB)
    assert t4.how.startswith("assumed: measured on a T4 ")
    (other,) = outside_of(target_of("RTX 3070"))
    assert other.nbytes == 426 * MIB
    assert other.how.startswith("assumed: no figure for the RTX 3070, so the largest that is known; measured on an RTX")
    (unnamed,) = outside_of(target_of(None, 8))
    assert unnamed.nbytes == 426 * MIB
    assert "no card was named" in unnamed.how


def test_a_cpu_holds_nothing_besides():
    cpu = target_of("cpu")
    assert outside_of(cpu) == workspaces_of(cpu, TRAINS) == not_counted(cpu, TRAINS) == ()


def test_of_a_card_without_a_capability_nothing_is_known():
    card = target_of("MI300X")
    assert outside_of(card) == workspaces_of(card, TRAINS) == ()
    assert "the context of the MI300X and workspaces" in " ".join(not_counted(card, TRAINS))


def test_what_is_not_counted_is_said():
    assert [note.split(",")[0] for note in not_counted(target_of("T4"), TRAINS)] == ["Not counted: code of kernels"]
    convolves = trace_with(forward=["aten.convolution.default"])
    assert "workspaces of cuDNN" in not_counted(target_of("T4"), convolves)[1]


def test_a_measured_context_comes_first():
    measured = {"NVIDIA H200": 500 * MIB, "a CUDA card": 1, "NVIDIA H100": 7}
    (h200,) = outside_of(target_of("H200 SXM5"), measured)
    assert (h200.nbytes, h200.how) == (500 * MIB, "measured on NVIDIA H200")
    assert outside_of(target_of(), measured)[0].nbytes == 1
    # "NVIDIA H100" fits several cards, so it is of none of them.
    assert outside_of(target_of("H100 SXM5"), measured)[0].nbytes == 426 * MIB
    assert outside_of(target_of("cpu"), measured) == ()


def test_it_needs_no_torch():
    code = "import halfstep.plan.outside, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
