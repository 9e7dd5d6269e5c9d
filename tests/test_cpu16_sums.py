"""Rows of a 16-bit table are added up in fp32 on a CPU, in backward of an embedding and of an index."""

import pytest
import torch
from reference.nets import CPU
from torch import nn

from halfstep import Hardware, Region

pytestmark = pytest.mark.usefixtures("kernels_stay")

DTYPES = [torch.bfloat16, torch.float16]
NATIVE = Hardware("cpu", "any", native=frozenset({"fp32", "bf16", "fp16"}))
MANY = torch.zeros(4096, dtype=torch.long)
READS = {
    "embedding": nn.functional.embedding,
    "index": lambda index, table: table[index],
    "negative": lambda index, table: table[index - 5],
    "columns": lambda index, table: table[:, index],
    "pairs": lambda index, table: table[index, index + 1],
    "mask": lambda index, table: table[table[:, 0] == 0],
}


def gradient_of(read, table, index, seed=0):
    """Backward of sum(weights x rows), with weights that a 16-bit sum would lose."""
    rows = read(index, table)
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.rand(rows.shape, generator=generator).to(rows.dtype)
    rows.backward(upstream)
    gradient, table.grad = table.grad, None
    return gradient, upstream


@pytest.mark.parametrize("hardware", [CPU, NATIVE], ids=["emulated", "native"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", READS)
def test_the_sum_is_fp32_rounded_once(name, dtype, hardware):
    read = READS[name]
    table = torch.zeros(5, 5, dtype=dtype, requires_grad=True)
    region = Region(nn.Linear(1, 1), {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype], hardware)
    with region.backward():
        gradient, upstream = gradient_of(read, table, MANY)
    # The plain twin: the same backward pass in fp32, over the upstream gradient as it was rounded.
    wide = torch.zeros(5, 5, requires_grad=True)
    read(MANY, wide).backward(upstream.float())
    assert gradient.dtype == dtype
    assert torch.equal(gradient, wide.grad.to(dtype))


@pytest.mark.parametrize("name", ["embedding", "index"])
def test_torch_by_itself_stops_on_the_way(name):
    """So that the test above could fail: 256 + 1 is 256 in bf16. A newer torch may have mended it."""
    table = torch.zeros(5, 5, dtype=torch.bfloat16, requires_grad=True)
    READS[name](MANY, table).backward(torch.ones(4096, 5, dtype=torch.bfloat16))
    assert table.grad[0, 0] == 256
    table.grad = None
    with Region(nn.Linear(1, 1), "bf16", CPU).backward():
        READS[name](MANY, table).backward(torch.ones(4096, 5, dtype=torch.bfloat16))
    assert table.grad[0, 0] == 4096


def test_other_formats_and_plain_writes_are_torchs_own():
    index = torch.tensor([1, 1, 3])
    with Region(nn.Linear(1, 1), "bf16", CPU).backward():
        for dtype in (torch.float32, torch.float64, torch.int64):
            target = torch.zeros(4, dtype=dtype)
            assert target.index_put_((index,), torch.ones(3, dtype=dtype), accumulate=True) is target
            assert target.tolist() == [0, 2, 0, 1]
        target = torch.zeros(4, dtype=torch.bfloat16)
        target[index] = torch.tensor([5.0, 6.0, 7.0], dtype=torch.bfloat16)
        assert target[3] == 7
        assert target[1] in (5, 6)
        assert target.index_put_((index,), torch.ones(3, dtype=torch.bfloat16), accumulate=True) is target


def test_a_target_that_is_a_view_is_changed_in_place():
    whole = torch.zeros(6, 4, dtype=torch.bfloat16)
    with Region(nn.Linear(1, 1), "bf16", CPU).backward():
        whole[1:5, ::2].index_put_((torch.tensor([0, 0, 2]),), torch.ones(3, 2, dtype=torch.bfloat16), accumulate=True)
    assert whole.sum() == 6
    assert whole[1].tolist() == [2, 0, 2, 0]
    assert whole[3].tolist() == [1, 0, 1, 0]
