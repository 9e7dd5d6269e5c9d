"""How gradients travel: bf16 that is summed in fp32, against a slow twin and beside an all-reduce in bf16."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.errors import HalfstepError
from halfstep.ranks.wire import (
    MEANS,
    WIRES,
    Bf16Hook,
    Bf16Mean,
    Bf16ReduceScatter,
    Fp32Mean,
    Lane,
    check_wire,
    in_bf16,
)

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
U = 2.0**-8
"""Half an ulp of bf16, relative."""
U32 = 2.0**-24


def rounded(x):
    """The slow twin of a cast to bf16: nearest, ties to even, on the bits of fp32."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    up = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return np.where(np.isnan(x), np.float32(np.nan), up.astype(np.uint32).view(np.float32))


def twin(gradients):
    """The mean of what ranks hold: each rounded, summed in fp64, the mean rounded."""
    total = sum(rounded(g).astype(np.float64) for g in gradients)
    return rounded((total / len(gradients)).astype(np.float32))


def bound(gradients):
    """Two roundings of half an ulp, and what fp32 loses in the sum: the first of each part, the second of the mean."""
    size = np.abs(np.stack(gradients).astype(np.float64)).mean(0)
    mean = np.abs(np.stack(gradients).astype(np.float64).mean(0))
    in_fp32 = (len(gradients) + 1) * U32 * size
    return U * size + U * (mean + U * size) + 2 * in_fp32


def draw(rank, sizes, kind="normal"):
    g = torch.Generator().manual_seed(100 + rank)
    values = [torch.randn(size, generator=g) for size in sizes]
    if kind == "whole":  # sums are exact in any order
        return [(8 * value).round() for value in values]
    if kind == "wide":  # from fp32's smallest to its largest, in logarithm
        return [value * 2.0 ** torch.randint(-140, 120, value.shape, generator=g) for value in values]
    return values


def averaged(wire, sizes, kind):
    values = draw(distributed.get_rank(), sizes, kind)
    mean = MEANS[wire](values, distributed.group.WORLD)
    mean.turn()
    mean.finish()
    return [value.numpy() for value in values]


SIZES = [(7,), (3, 5), (0,), (1,), (129,)]  # 152 elements: parts of 76 and 38; with one less they need filling
UNEVEN = [*SIZES, (1,)]


@pytest.mark.parametrize("kind", ["normal", "whole", "wide"])
@pytest.mark.parametrize("sizes", [SIZES, UNEVEN, [(1,)]], ids=["even", "uneven", "one"])
def test_a_mean_in_bf16_is_two_roundings_from_the_true_one(world2, sizes, kind):
    check(world2, sizes, kind)


@pytest.mark.parametrize("kind", ["normal", "whole", "wide"])
def test_a_mean_over_four_ranks(world4, kind):
    check(world4, UNEVEN, kind)


def check(world, sizes, kind):
    results = world.run(averaged, "bf16", sizes, kind)
    drawn = [[value.numpy() for value in draw(rank, sizes, kind)] for rank in range(world.num)]
    for place in range(len(sizes)):
        of_ranks = [values[place] for values in drawn]
        got = results[0][place]
        assert got.shape == sizes[place]
        assert all(np.array_equal(got, other[place]) for other in results)  # the same bits on every rank
        error = np.abs(got - np.stack(of_ranks).astype(np.float64).mean(0))
        tiny = 2.0**-133  # where bf16's ulps stop shrinking
        assert (error <= bound(of_ranks) + tiny).all()
        if kind == "whole":
            assert np.array_equal(got, twin(of_ranks))


def test_a_mean_in_fp32(world2):
    results = world2.run(averaged, "fp32", UNEVEN, "normal")
    drawn = [[value.numpy() for value in draw(rank, UNEVEN)] for rank in range(2)]
    for place in range(len(UNEVEN)):
        a, b = (values[place] for values in drawn)
        assert np.array_equal(results[0][place], (a + b) / np.float32(2))
        assert np.array_equal(results[0][place], results[1][place])


def mean_of_each_bit_pattern():
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16).float()
    mean = Bf16Mean([values], distributed.group.WORLD)
    mean.turn()
    mean.finish()
    return values.numpy()


def test_every_bf16_value_comes_back_as_it_is(world2):
    """But where the sum of the ranks is beyond fp32, as the contract says."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float().numpy()
    beyond = np.isfinite(x) & (np.abs(x) >= 2.0**127)
    for got in world2.run(mean_of_each_bit_pattern):
        assert np.array_equal(got[~beyond], x[~beyond], equal_nan=True)
        assert np.array_equal(got[beyond], np.copysign(np.inf, x[beyond]))
    assert beyond.sum() == 256


def mean_of_what_is_not_finite():
    rank = distributed.get_rank()
    ours = [float("inf"), float("nan"), 3.4e38, -float("inf"), 1.0] if rank else [1.0, 1.0, 0.0, float("inf"), 1.0]
    values = torch.tensor(ours)
    mean = Bf16Mean([values], distributed.group.WORLD)
    mean.turn()
    mean.finish()
    return values.tolist()


def test_what_is_not_finite_travels(world2):
    """3.4e38 is a number of fp32 and beyond bf16's largest, 3.39e38."""
    for got in world2.run(mean_of_what_is_not_finite):
        assert repr(got) == "[inf, nan, inf, nan, 1.0]"


class Stage:
    """A mean that notes its moments."""

    def __init__(self, name, notes):
        self.name, self.notes = name, notes
        notes.append(f"send {name}")

    def turn(self):
        self.notes.append(f"turn {self.name}")

    def finish(self):
        self.notes.append(f"finish {self.name}")


def test_means_go_through_their_moments_one_behind_the_other():
    notes = []
    lane = Lane()
    for name in "abc":
        lane.push(Stage(name, notes), lambda name=name: notes.append(f"have {name}"))
    assert notes == ["send a", "send b", "turn a", "send c", "turn b", "finish a", "have a"]
    lane.drain()
    assert notes[7:] == ["turn c", "finish b", "have b", "finish c", "have c"]
    lane.drain()
    assert len(notes) == 12


def test_a_pass_that_failed_leaves_nothing():
    notes = []
    lane = Lane()
    lane.push(Stage("a", notes), lambda: None)
    lane.clear()
    lane.drain()
    assert notes == ["send a"]


@pytest.mark.parametrize("num", [4, 64])
def test_the_figure_is_computed_as_it_is_simulated(num, monkeypatch):
    """The error of a plain bf16 all-reduce grows with the number of ranks, as each addition rounds; ours does not."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = runpy.run_path(str(BENCHMARKS / "figure_communication.py"))
    gradients = torch.randn(num, script["SIZE"], generator=torch.Generator().manual_seed(num))
    true = gradients.double().mean(0)
    one = script["size"](true.float().bfloat16().double() - true)
    for way, (mean_of, computed) in script["WAYS"].items():
        error = script["size"](mean_of(gradients) - true) / one
        # sqrt(2 / 16384) is a standard error of 1 %; a number is not as often rounded up where it lies just above 2^k.
        assert error == pytest.approx(computed(num), rel=0.1), way
    ours = script["wire"](gradients).numpy()
    assert np.mean(ours == twin([gradient.numpy() for gradient in gradients])) > 0.99  # fp32 may tip a tie


@pytest.mark.parametrize("wire", ["fp16", "e4m3", "", None])
def test_formats_that_do_not_travel(wire):
    with pytest.raises(HalfstepError, match="65504" if wire == "fp16" else "fp32, bf16"):
        check_wire(wire)
    for good in WIRES:
        check_wire(good)


# DDP's buckets.


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(5))
        self.empty = nn.Parameter(torch.empty(0))
        self.wide = nn.Parameter(torch.ones(9, dtype=torch.float64))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.wide).sum() + self.empty.sum()


def batch_of(rank):
    return torch.randn(4, 9, generator=torch.Generator().manual_seed(rank))


def gradients_by_hook(bucket_cap_mb, is_view):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=is_view)
    model.register_comm_hook(Bf16Hook(model.process_group), in_bf16)
    for _ in range(3):  # buckets are built anew after the first pass
        model.zero_grad()
        model(batch_of(distributed.get_rank())).backward()
    return {name: p.grad.numpy() for name, p in model.module.named_parameters()}


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("bucket_cap_mb", [25, 0.0005], ids=["one-bucket", "many-buckets"])
def test_gradients_of_ddp_are_means_of_what_each_rank_has(world2, bucket_cap_mb, is_view):
    """Bit for bit what the twin gives for the gradients that a rank alone would have: nothing is mixed up."""
    results = world2.run(gradients_by_hook, bucket_cap_mb, is_view)
    torch.manual_seed(0)
    model = Net()
    alone = []
    for rank in range(2):
        model.zero_grad()
        model(batch_of(rank)).backward()
        alone.append({name: p.grad.numpy().copy() for name, p in model.named_parameters()})
    for name, gradient in results[0].items():
        assert np.array_equal(gradient, results[1][name]), name
        # Two bf16 numbers, each of 8 bits, add up in fp32 exactly unless they are 2**16 apart.
        assert np.array_equal(gradient.astype(np.float32), twin([each[name] for each in alone])), name


def gradients_after_a_failure():
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.0005)
    model.register_comm_hook(Bf16Hook(model.process_group), in_bf16)
    rank = distributed.get_rank()
    model(batch_of(rank)).backward()
    first = [p.grad.clone() for p in model.parameters()]

    def fail(gradient):
        raise KeyError("a hook of the user's")

    handle = model.module.layers[0].weight.register_hook(fail)  # after most buckets have been sent
    with pytest.raises(KeyError):
        model(batch_of(rank + 2)).backward()
    handle.remove()
    model.zero_grad()
    model.reducer._reset_state()
    model(batch_of(rank)).backward()
    return all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), first, strict=True))


def test_a_backward_pass_that_failed_midway_leaves_no_bucket_behind(world2):
    assert world2.run(gradients_after_a_failure) == [True, True]


@pytest.mark.gpu
def test_buckets_on_a_gpu_travel_in_a_stream_of_their_own(tmp_path):
    """One rank sends everything to itself, so that its gradient is rounded, and nothing else happens to it."""
    distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = DistributedDataParallel(Net().cuda(), bucket_cap_mb=0.0005)
        model(batch_of(0).cuda()).backward()
        expected = [rounded(p.grad.float().cpu().numpy()) for p in model.parameters()]
        model = DistributedDataParallel(model.module, bucket_cap_mb=0.0005)
        model.register_comm_hook(Bf16Hook(model.process_group), in_bf16)
        for _ in range(3):
            model.zero_grad()
            model(batch_of(0).cuda()).backward()
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                assert np.array_equal(parameter.grad.float().cpu().numpy(), gradient)
    finally:
        distributed.destroy_process_group()


# fully_shard's reduction.


def scattered(op, num_own, kind):
    rank, num = distributed.get_rank(), distributed.get_world_size()
    (sent,) = draw(rank, [(num_own * num,)], kind)
    reduce = Bf16ReduceScatter()
    kept = reduce.allocate((num_own,), dtype=torch.float32, device=torch.device("cpu"))
    reduce(output_tensor=kept, input_tensor=sent, group=distributed.group.WORLD, op=op)
    return kept.numpy()


@pytest.mark.parametrize("kind", ["normal", "whole"])
@pytest.mark.parametrize("op", [distributed.ReduceOp.AVG, distributed.ReduceOp.SUM], ids=str)
def test_a_shard_is_rounded_once(world2, op, kind):
    parts = world2.run(scattered, op, 33, kind)
    drawn = [draw(rank, [(66,)], kind)[0].numpy() for rank in range(2)]
    total = sum(rounded(value).astype(np.float64) for value in drawn)
    true = total / 2 if op == distributed.ReduceOp.AVG else total
    assert np.array_equal(np.concatenate(parts), true.astype(np.float32))


def refusal_of_a_factor():
    with pytest.raises(HalfstepError, match="set_gradient_divide_factor") as error:
        scattered(distributed._make_nccl_premul_sum(0.5), 1, "normal")
    return str(error.value)


def test_a_factor_of_the_users_is_refused(world2):
    assert len(set(world2.run(refusal_of_a_factor))) == 1


def test_fp32_in_a_row_keeps_fp64(world2):
    for mean in world2.run(mean_in_fp64):
        assert mean == (1 / 3 + 2 / 3) / 2


def mean_in_fp64():
    value = torch.tensor([(1 + distributed.get_rank()) / 3], dtype=torch.float64)
    mean = Fp32Mean([value, torch.ones(2)], distributed.group.WORLD)
    mean.turn()
    mean.finish()
    return value.item()
