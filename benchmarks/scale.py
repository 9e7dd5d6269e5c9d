"""What one verdict a step and one contract every hundred steps cost, from 8 to 16,384 ranks; a model, and its checks.

The model: a small all-reduce over N GPUs costs what NCCL's own tuner expects of it (Tree, protocol LL), from the table
of latencies in its source, src/graph/tuning.cc:

    4.4 us + 2 (7 x 0.52 us x 1.8 + floor(log2(nodes)) x 5.0 us) + bytes / bandwidth

8 GPUs a node; 0.52 us is a hop over NVLink, which counts 1.8 times beside a network, 5.0 us one over InfiniBand. A
ring, which NCCL leaves to large messages, would take 2 (N - 1) hops.

Its checks: a simulation of every message of such a tree (--simulate), what a step really sends (a Stepper over
fully_shard in a process group of N ranks that only counts, --count), and ranks that are processes of this machine
(--processes 2 4 8 16 32 64, gloo).
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

RANKS = (8, 64, 512, 1024, 4096, 16384)
PER_NODE = 8
NVLINK_US, NETWORK_US, BASE_US, BESIDE_NETWORK = 0.52, 5.0, 4.4, 1.8
NETWORK_BYTES_PER_S = 50e9
"""400 Gb/s a GPU."""
LL_SHARE = 0.5 * 0.9 / 3.8
"""Of that, for a tree in protocol LL: half of it each way, 0.9 for the tree, and a flag beside every datum."""
MEASURED = 2.5
"""A tuner's 25 us for 128 bytes were 62 us in a log of an H100 cluster (NVIDIA/nccl issue 1453)."""
VERDICT_NUMBERS = 6
CONTRACT_BYTES, CONTRACT_EVERY = 480.0, 100


def tree_us(num_ranks: int, num_bytes: float) -> float:
    """An all-reduce in microseconds."""
    nodes = max(1, num_ranks // PER_NODE)
    nvlink = NVLINK_US * (BESIDE_NETWORK if nodes > 1 else 1.0)
    hops = (min(num_ranks, PER_NODE) - 1) * nvlink + (nodes.bit_length() - 1) * NETWORK_US
    return BASE_US + 2.0 * hops + num_bytes / (NETWORK_BYTES_PER_S * LL_SHARE) * 1e6


def ring_us(num_ranks: int) -> float:
    """The same around a ring, without its bandwidth."""
    nodes = max(1, num_ranks // PER_NODE)
    between = 2 * (nodes - 1)
    return 3.6 + (2 * (num_ranks - 1) - between) * 0.47 * (BESIDE_NETWORK if nodes > 1 else 1.0) + between * 2.7


def simulated_us(num_ranks: int) -> float:
    """Every message of an all-reduce over a binary tree of nodes, each a chain of GPUs: up, and down again.

    A rank sends when it has heard of all below it. The tree is the one of NCCL's ``ncclGetBtree``: the parent of node n
    is n with its lowest bit cleared and the next one set, or if that is beyond the last node, only cleared.
    """
    nodes = max(1, num_ranks // PER_NODE)
    per_node = min(num_ranks, PER_NODE)
    nvlink = NVLINK_US * (BESIDE_NETWORK if nodes > 1 else 1.0)
    parent: dict[int, tuple[int, float]] = {}
    for node in range(nodes):
        for place in range(1, per_node):
            parent[node * per_node + place] = (node * per_node + place - 1, nvlink)
        if node:
            lowest = node & -node
            above = (node ^ lowest) | (lowest << 1)
            above = above if above < nodes else node ^ lowest
            parent[node * per_node] = (above * per_node, NETWORK_US)
    children: dict[int, list[tuple[int, float]]] = {}
    for rank, (above, us) in parent.items():
        children.setdefault(above, []).append((rank, us))
    missing = {rank: len(children.get(rank, ())) for rank in range(num_ranks)}
    events = [(0.0, rank, True) for rank in range(num_ranks) if not missing[rank]]
    heapq.heapify(events)
    last = 0.0
    while events:
        now, rank, is_up = heapq.heappop(events)
        last = max(last, now)
        if is_up and rank in parent:
            above, us = parent[rank]
            missing[above] -= 1
            if not missing[above]:  # the one that it had to wait for
                heapq.heappush(events, (now + us, above, True))
        else:
            for below, us in children.get(rank, ()):
                heapq.heappush(events, (now + us, below, False))
    return BASE_US + last


@dataclass(frozen=True)
class Run:
    """A training run: weights, tokens of a step, GPUs, the share of 989 TFLOP/s that its products reach."""

    name: str
    num_weights: float
    num_parameters: int
    num_tokens: float
    num_ranks: int
    mfu: float

    @property
    def step_s(self) -> float:
        return 6.0 * self.num_weights * self.num_tokens / (self.num_ranks * 989e12 * self.mfu)

    def verdict_us(self) -> float:
        return MEASURED * tree_us(self.num_ranks, 8.0 * (VERDICT_NUMBERS + self.num_parameters))


RUNS = (
    Run("1.3B, one node", 1.3e9, 290, 0.5e6, 8, 0.40),
    Run("8B, 64 nodes", 8.0e9, 291, 4e6, 512, 0.40),
    Run("Llama 3 405B, 2,048 nodes", 405e9, 1137, 16e6, 16384, 0.41),
    Run("1T, ZeRO-3, 2,048 nodes", 1e12, 1500, 16e6, 16384, 0.40),
)


def print_model() -> None:
    print("one small all-reduce (128 B), microseconds")
    print(f"{'ranks':>7} {'nodes':>6} {'tree':>7} {'simulated':>10} {'x 2.5':>7} {'ring':>9}")
    for num in RANKS:
        tree = tree_us(num, 128.0)
        row = f"{num:7,} {num // PER_NODE:6,} {tree:7.1f} {simulated_us(num):10.1f}"
        print(f"{row} {MEASURED * tree:7.0f} {ring_us(num):9.0f}")
    print("\nverdict each step and contract each hundredth, with the factor 2.5")
    print(f"{'run':28} {'step':>8} {'verdict':>9} {'share':>9} {'contract':>9} {'share':>9}")
    for run in RUNS:
        contract = MEASURED * tree_us(run.num_ranks, CONTRACT_BYTES) / CONTRACT_EVERY
        print(
            f"{run.name:28} {run.step_s:6.2f} s {run.verdict_us():6.0f} us {run.verdict_us() / run.step_s / 1e6:8.4%} "
            f"{contract:6.1f} us {contract / run.step_s / 1e6:8.4%}"
        )


def print_trillion(num_weights: float = 1e12, num_layers: int = 128) -> None:
    """ZeRO-3 of a trillion weights: what each rank holds and sends, as FSDP2 counts it below."""
    print("\n1T weights, fully sharded, a step of 16 million tokens in one micro-batch a rank, 400 Gb/s a GPU")
    heads = ("16-bit gather, fp32 sum", "bf16 wire", "latencies of a ring")
    print(f"{'ranks':>7} {'states':>9} {'products':>9} {heads[0]:>24} {heads[1]:>10} {heads[2]:>20}")
    for num in (1024, 4096, 16384):
        states = 16.0 * num_weights / num / 2**30
        products = 6.0 * num_weights * 16e6 / (num * 989e12 * 0.4)
        seconds = [num_weights * width * (num - 1) / num / NETWORK_BYTES_PER_S for width in (2 + 2 + 4, 2 + 2 + 2)]
        hops = 3 * num_layers * (num - 1) / PER_NODE * 2.7e-6
        print(f"{num:7,} {states:5.1f} GiB {products:7.1f} s {seconds[0]:22.0f} s {seconds[1]:8.0f} s {hops:18.1f} s")
    print("states: fp32 weights, gradients and two moments, 16 bytes a weight over all ranks")


# Checks.


def count(num_ranks: int) -> dict[str, list[int]]:
    """Bytes of each collective in the third step of four sharded layers; the group of ``num_ranks`` only counts."""
    import torch
    from torch import distributed, nn
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from halfstep import Stepper
    from halfstep.distributed.sharding import shard

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    sent: dict[str, list[int]] = {}

    def counting(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            sent.setdefault(name, []).append(max(each.numel() * each.element_size() for each in tensors))
            return collective(*args, **kwargs)

        return call

    model = shard(nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))), "bf16")
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), fused=True), "bf16", watch=False)
    x = torch.ones(4, 64)
    for step in range(3):
        if step == 2:
            for name in dir(distributed):
                if name.startswith(("all_reduce", "all_gather", "reduce_scatter", "all_to_all")):
                    setattr(distributed, name, counting(name, getattr(distributed, name)))
        stepper.step(lambda: model(x).square().mean())
    return sent


def print_count() -> None:
    print("\none step of four sharded layers (8 parameters), counted: collectives and the bytes of the largest side")
    for num in RANKS:
        program = f"import json; from scale import count; print(json.dumps(count({num})))"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], env=environment, capture_output=True)
        sent = json.loads(done.stdout.splitlines()[-1])
        own = sent.pop("all_reduce")
        others = Counter({name: len(each) for name, each in sent.items()})
        print(f"{num:7,} ranks: halfstep {len(own)} all_reduce of {own} bytes; engine {dict(others)}")


def print_processes(numbers: list[int]) -> None:
    print(
        "\nranks as processes of this machine, gloo: one all-reduce of 128 bytes, and 20 steps in which one rank fails"
    )
    for num in numbers:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run([*launch, __file__, "--rank"], env=environment, capture_output=True, text=True)
        print(done.stdout.strip() or done.stderr[-500:], flush=True)


def run_rank() -> None:
    """One rank: times of a small all-reduce, and what a Stepper says when another rank's loss is NaN in each step."""
    import torch
    from torch import distributed, nn

    from halfstep import Stepper

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, num = distributed.get_rank(), distributed.get_world_size()
    numbers = torch.ones(16, dtype=torch.float64)
    times = list(_times(lambda: distributed.all_reduce(numbers), 50))
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", watch=False)
    said = []
    for step in range(20):
        x = torch.full((2, 4), torch.nan if step * 7 % num == rank else 1.0)
        said.append(stepper.step(lambda x=x: model(x).square().mean()).reason)  # type: ignore[misc, union-attr]
    right = [f"the loss of rank {step * 7 % num} is" in str(reason) for step, reason in enumerate(said)]
    answers: list[Any] = [None] * num
    distributed.all_gather_object(answers, said)
    if rank == 0:
        low, median, high = statistics.quantiles(times, n=4)
        same = "alike" if all(each == said for each in answers) else "NOT ALIKE"
        print(
            f"{num:4} processes: {median:8.0f} us [{low:.0f}, {high:.0f}]; "
            f"20 verdicts {same} on all ranks, {sum(right)} name the rank at fault"
        )
    distributed.destroy_process_group()


def _times(call: Callable[[], object], num: int) -> Iterator[float]:
    for _ in range(num):
        start = time.perf_counter()
        call()
        yield (time.perf_counter() - start) * 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4, 8], help="up to 64; each takes 200 MB")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank()
    else:
        print_model()
        print_trillion()
        print_count()
        print_processes(options.processes)
