"""What gradients cost on the wire: bytes that a rank sends in a step, counted and by formula, and time on this machine.

Every collective of a step is seen where torch hands it to the process group, DDP's own and those of ``fully_shard``
too, and its bytes are what a ring sends for it: of P bytes an all-reduce sends 2 P (n - 1) / n on each of n ranks, an
all-gather, a reduce-scatter and an all-to-all P (n - 1) / n. Bytes are divided by the number of parameters, and by
(n - 1) / n, which is 1/2 here and near 1 for many ranks. The verdict, 7 numbers a step, and the norms are in it.

Two ranks that talk through gloo in one machine say little about a network: a copy in memory costs less than to round.
The time is here to show what the rounding costs at most; on a network the bytes count.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from interleave import Contender, measure, report
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep.ranks.wire import MEANS

WIDTH, NUM_BLOCKS, BATCH, ROUNDS = 256, 16, 16, 15

SENT: dict[str, float] = {
    "allreduce_": 2.0,
    "alltoall_base_": 1.0,
    "_allgather_base_": 1.0,
    "_reduce_scatter_base_": 1.0,
}
"""Collective to how many times (n - 1) / n of its larger side a ring sends."""


class Bytes(TorchDispatchMode):
    """Counts what collectives send, in units of (n - 1) / n."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            name = function._schema.name.removeprefix("c10d::")
            sizes = [tensor.numel() * tensor.element_size() for tensor in _tensors(args)]
            self.num += SENT[name] * (sum(sizes) if name == "allreduce_" else max(sizes))
        return function(*args, **(kwargs or {}))


def _tensors(args: Any) -> list[torch.Tensor]:
    flat = []
    for each in args:
        if isinstance(each, torch.Tensor):
            flat.append(each)
        elif isinstance(each, list | tuple):
            flat += _tensors(each)
    return flat


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.inner(self.norm(x)))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))


def compressed(state, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
    """torch's bf16_compress_hook, which DDP refuses by its name where there is no NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


def with_torchs_hook() -> nn.Module:
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, compressed)
    return model


def replicas(wire: str) -> nn.Module:
    return halfstep.distributed.replicate(net(), wire=wire)


def shards(policy: str, wire: str) -> nn.Module:
    return halfstep.distributed.shard(net(), policy, blocks=[Block], wire=wire)


# Model, policy, and bytes a parameter by formula: of the window, and of each micro-batch.
CHOICES: dict[str, tuple[Callable[[], nn.Module], str, int, int]] = {
    "DDP, fp32": (lambda: replicas("fp32"), "bf16", 8, 0),
    "DDP, torch's bf16_compress_hook": (with_torchs_hook, "bf16", 4, 0),
    "DDP, wire=bf16": (lambda: replicas("bf16"), "bf16", 4, 0),
    "DDP, master=split16, fp32": (lambda: replicas("fp32"), "bf16 master=split16", 8, 0),
    "DDP, master=split16, wire=bf16": (lambda: replicas("bf16"), "bf16 master=split16", 4, 0),
    "FSDP2, policy fp32": (lambda: shards("fp32", "fp32"), "fp32", 0, 12),
    "FSDP2, policy bf16": (lambda: shards("bf16", "fp32"), "bf16", 0, 8),
    "FSDP2, policy bf16, wire=bf16": (lambda: shards("bf16", "bf16"), "bf16", 0, 6),
}


def window_of(choice: str, accumulate: int) -> Callable[[], object]:
    build, policy, _, _ = CHOICES[choice]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    stepper = halfstep.Stepper(model, optimizer, policy, accumulate=accumulate, max_norm=1.0, watch=False)
    x = torch.randn(BATCH, WIDTH)

    def run() -> None:
        for _ in range(accumulate):
            stepper.step(lambda: model(x).square().mean())

    return run


def sent(choice: str, accumulate: int) -> float:
    """Bytes that a rank sends in a step, in units of (n - 1) / n, as they are counted."""
    window = window_of(choice, accumulate)
    window()  # DDP builds its buckets anew after the first backward pass
    with Bytes() as counted:
        window()
    return counted.num


def formula(choice: str, accumulate: int) -> int:
    """The same, a parameter."""
    _, _, once, each = CHOICES[choice]
    return once + accumulate * each


def count_bytes(rank: int) -> None:
    num_parameters = sum(p.numel() for p in net().parameters())
    if rank == 0:
        print(f"bytes a parameter and step, times (n - 1) / n; {num_parameters} parameters in {NUM_BLOCKS} blocks")
        print("| | accumulate=1 | by formula | accumulate=4 | by formula |\n|---|---|---|---|---|")
    for choice in CHOICES:
        cells = [choice]
        for accumulate in (1, 4):
            cells += [f"{sent(choice, accumulate) / num_parameters:.2f}", str(formula(choice, accumulate))]
        if rank == 0:
            print("| " + " | ".join(cells) + " |", flush=True)


def measure_errors(rank: int, num: int) -> None:
    """The error of a mean of N(0, 1) numbers, in roundings: relative to the mean's size, over that of one rounding."""
    values = torch.randn(2**16, generator=torch.Generator().manual_seed(rank))
    true = values.double()
    distributed.all_reduce(true)
    true /= num
    found = {}
    for wire, mean_of in MEANS.items():
        mine = values.clone()
        mean = mean_of([mine], distributed.group.WORLD)
        mean.turn()
        mean.finish()
        found[f"wire={wire}"] = mine
    plain = values.bfloat16() / num
    distributed.all_reduce(plain)
    found["bf16 all-reduce"] = plain.float()
    one = (true.bfloat16().double() - true).square().mean().sqrt()
    if rank == 0:
        errors = {name: ((mean - true).square().mean().sqrt() / one).item() for name, mean in found.items()}
        print(f"{num} ranks: " + ", ".join(f"{name} {error:.4f}" for name, error in errors.items()), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, num = distributed.get_rank(), distributed.get_world_size()
    if sys.argv[1:] == ["errors"]:
        measure_errors(rank, num)
    else:
        count_bytes(rank)
        contenders = {choice: Contender(window_of(choice, 1)) for choice in CHOICES}
        times = measure(contenders, ROUNDS)
        if rank == 0:
            print("a step, accumulate=1, over two ranks of one machine")
            for choice in list(CHOICES)[1:]:
                report(times, choice, "DDP, fp32", "for comparison")
    distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        print(__doc__.splitlines()[0])
        for num, arguments in ((2, []), (2, ["errors"]), (4, ["errors"]), (8, ["errors"])):
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num}", __file__, *arguments]
            subprocess.run([sys.executable, *launch], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
