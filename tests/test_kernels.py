"""Kernels come with the first user and go with the last one, and torch is then what it was, to the bit."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch

from halfstep import cpu16, oplist
from halfstep.hardware import Hardware
from halfstep.kernels import Kernels
from halfstep.region import Region

CPU = Hardware.of("cpu", "plain CPU")
GENERATOR = torch.Generator().manual_seed(0)
A, B = (torch.randn(5, 5, generator=GENERATOR).bfloat16() for _ in range(2))


@pytest.fixture(scope="module", autouse=True)
def _no_region_lingers():
    """Regions of other files that wait in a reference cycle still use our kernels."""
    gc.collect()


def double_of_mm(keyset, a, b):
    return torch.full((a.shape[0], b.shape[1]), 7.0, dtype=a.dtype)


def put_mm(kernels):
    kernels.add("aten::mm", double_of_mm)


def is_torchs_own():
    return not torch.equal(torch.mm(A, B), torch.full_like(A, 7.0))


def test_kernels_are_there_from_the_first_user_to_the_last():
    kernels, before = Kernels("CPU", put_mm), torch.mm(A, B)
    kernels.acquire()
    kernels.acquire()
    assert not is_torchs_own()
    kernels.release()
    assert not is_torchs_own()
    kernels.release()
    assert torch.equal(torch.mm(A, B), before)
    for _ in range(3):
        kernels.acquire()
        assert not is_torchs_own()
        kernels.release()
        assert torch.equal(torch.mm(A, B), before)


def test_making_them_registers_nothing():
    Kernels("CPU", put_mm)
    assert is_torchs_own()


def test_the_fill_runs_once_for_all_users_and_again_after_the_last():
    fills = []
    kernels = Kernels("CPU", fills.append)
    for _ in range(3):
        kernels.acquire()
    assert fills == [kernels]
    for _ in range(3):
        kernels.release()
    kernels.acquire()
    kernels.release()
    assert fills == [kernels, kernels]


def test_a_name_already_there_stays():
    kernels = Kernels("CPU", put_mm)
    kernels.acquire()
    kernels.add("aten::mm", lambda keyset, a, b: torch.zeros(1))
    assert torch.equal(torch.mm(A, B), torch.full_like(A, 7.0))
    kernels.release()
    assert is_torchs_own()


def test_a_fill_that_fails_leaves_nothing_and_can_be_tried_again():
    fails = [True]

    def fill(kernels):
        put_mm(kernels)
        if fails.pop():
            raise RuntimeError("no header")
        fails.append(False)

    kernels = Kernels("CPU", fill)
    with pytest.raises(RuntimeError, match="no header"):
        kernels.acquire()
    assert is_torchs_own()
    fails.append(False)
    kernels.acquire()
    assert not is_torchs_own()
    kernels.release()
    assert is_torchs_own()


def test_a_release_without_its_acquire_is_our_own_mistake():
    with pytest.raises(AssertionError, match="release without its acquire"):
        Kernels("CPU", put_mm).release()


def test_adding_without_a_user_is_our_own_mistake():
    with pytest.raises(AssertionError, match="added by a user"):
        put_mm(Kernels("CPU", put_mm))


def test_two_sets_on_one_operation_come_and_go_in_any_order():
    other = Kernels("CPU", lambda kernels: kernels.add("aten::bmm", lambda keyset, a, b: torch.zeros(1)))
    kernels, before = Kernels("CPU", put_mm), torch.bmm(A[None], B[None])
    kernels.acquire()
    other.acquire()
    kernels.release()
    assert is_torchs_own()
    assert torch.bmm(A[None], B[None]).shape == (1,)
    other.release()
    assert torch.equal(torch.bmm(A[None], B[None]), before)


def test_a_kernel_gets_keywords_and_can_raise():
    def refuse(keyset, *args, **kwargs):
        raise ValueError(f"beta {kwargs.get('beta')}")

    kernels = Kernels("CPU", lambda kernels: kernels.add("aten::addmm", refuse))
    kernels.acquire()
    try:
        with pytest.raises(ValueError, match=r"^beta 3$"):
            torch.addmm(A, A, B, beta=3)
    finally:
        kernels.release()


# ---- our own two sets


def fresh(code):
    """Run ``code`` in a process that has not touched halfstep yet, warnings being errors."""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def num_users():
    return cpu16.kernels._num_users, oplist.kernels("cpu")._num_users


def test_importing_registers_nothing():
    fresh(
        "import torch\n"
        "names = 'aten::mm', 'aten::softmax.int', 'aten::exp'\n"
        "def tables(): return [torch._C._dispatch_dump_table(name) for name in names]\n"
        "before = tables()\n"
        "import halfstep.region\n"
        "assert tables() == before\n"
        "region = halfstep.region.Region(torch.nn.Linear(1, 1), 'bf16')\n"
        "assert tables() != before\n"
        "del region\n"
        "assert tables() == before\n"
    )


def test_a_process_that_ends_with_a_region_open_ends_quietly():
    fresh(
        "import torch, halfstep\n"
        "region = halfstep.Region(torch.nn.Linear(1, 1), 'bf16 op:exp=fp16').__enter__()\n"
        "region.hold()\n"
    )


def test_the_last_region_takes_all_kernels_with_it():
    names, before = ["mm", "convolution", "softmax.int", "exp", "gelu", "linear"], num_users()
    tables = [torch._C._dispatch_dump_table(f"aten::{name}") for name in names]
    model = torch.nn.Linear(2, 2)
    first = Region(model, "fp16 op:gelu=fp32 op:linear=fp32", CPU)
    second = Region(model, "bf16", CPU)
    during = [torch._C._dispatch_dump_table(f"aten::{name}") for name in names]
    assert all(now != then for now, then in zip(during, tables, strict=True))
    del first
    # What another region's op rules put there may stay as long as any region uses the set; without a rule it does
    # nothing.
    with second:
        assert torch.nn.functional.gelu(A).dtype == torch.bfloat16
    del second
    assert [torch._C._dispatch_dump_table(f"aten::{name}") for name in names] == tables
    assert num_users() == before


def test_torchs_own_kernels_of_the_low_list_stay_since_they_cache_casts():
    names = ["linear", "matmul", "conv2d"]
    before = [torch._C._dispatch_dump_table(f"aten::{name}") for name in names]
    region = Region(torch.nn.Linear(2, 2), "bf16", CPU)
    assert [torch._C._dispatch_dump_table(f"aten::{name}") for name in names] == before
    assert region.policy.compute == "bf16"


def test_an_fp32_region_needs_no_kernels():
    before = torch._C._dispatch_dump_table("aten::exp")
    region = Region(torch.nn.Linear(2, 2), "fp32 op:exp=fp32", CPU)
    with region:
        assert torch.exp(A).dtype == torch.bfloat16
    assert torch._C._dispatch_dump_table("aten::exp") == before


def test_a_region_that_could_not_be_made_releases_what_it_took():
    model, before = torch.nn.Sequential(torch.nn.Linear(2, 2)), num_users()
    for policy in ("bf16 module:head=fp32", "bf16 op:softmux=fp32"):
        with pytest.raises(ValueError, match=r"head|softmux"):
            Region(model, policy, CPU)
    assert num_users() == before
