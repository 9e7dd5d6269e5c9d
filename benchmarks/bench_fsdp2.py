"""Shards: what fp32 norms cost beside torch's own fully_shard, in collectives, bytes and time, and what they change.

A micro-batch of 8 blocks over two ranks of one machine, which talk through gloo. The gradient of each way is compared
with that of one process over the same samples, in fp32: the largest relative error over the parameters, where the
policy itself makes one, since it computes in bf16 there too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from bench_communication import Bytes
from interleave import Contender, measure, report
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

import halfstep

WIDTH, NUM_BLOCKS, NUM_WORDS, BATCH, ROUNDS = 256, 8, 2000, (8, 32), 15
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.table(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1).float()


def net() -> Any:
    torch.manual_seed(0)
    return Net()


def plain(policy: MixedPrecisionPolicy) -> nn.Module:
    model = net()
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy)
    return model


WAYS: dict[str, Callable[[], nn.Module]] = {
    "fully_shard, fp32": lambda: plain(MixedPrecisionPolicy()),
    "fully_shard, bf16": lambda: plain(BF16),
    "shard(), bf16": lambda: halfstep.distributed.shard(net(), "bf16"),
    "shard(), bf16, module:table=bf16": lambda: halfstep.distributed.shard(net(), "bf16 module:table=bf16"),
}


def words_of(rank: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(rank)
    return (torch.rand(BATCH, generator=g) ** 3 * NUM_WORDS).long()  # some are much more frequent than others


def micro_batch(model: nn.Module, policy: str, ranks: range) -> Callable[[], halfstep.StepReport | None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    stepper = halfstep.Stepper(model, optimizer, policy, accumulate=10**9, watch=False)
    batches = [words_of(rank) for rank in ranks]

    def run() -> halfstep.StepReport | None:
        for words in batches:
            stepper.step(lambda words=words: cross_entropy(model(words), words.roll(1, -1).flatten()))
        return None

    return run


def gradients(model: nn.Module, num: int) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: getattr(g, "full_tensor", lambda g=g: g / num)().double() for name, g in found.items()}


class Calls(Bytes):
    """Counts calls as well."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.calls[function._schema.name.removeprefix("c10d::")] += 1
        return super().__torch_dispatch__(function, types, args, kwargs)


def main() -> None:
    warnings.simplefilter("ignore")  # of what fully_shard rounds: that is what is measured
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, num = distributed.get_rank(), distributed.get_world_size()
    exact: dict[str, dict[str, torch.Tensor]] = {}
    for policy in ("fp32", "bf16"):
        model = net()
        micro_batch(model, policy, range(num))()
        exact[policy] = gradients(model, num)
    num_parameters = sum(p.numel() for p in net().parameters())
    if rank == 0:
        print(f"{num_parameters} parameters in {NUM_BLOCKS} blocks, a table and a head; a micro-batch over {num} ranks")
        print("| | gathers | reductions | bytes a parameter, times (n - 1) / n | largest error of a gradient | where |")
        print("|---|---|---|---|---|---|")
        tell("one process, bf16", "", "", "", exact["bf16"], exact["fp32"])
    contenders = {}
    for name, build in WAYS.items():
        model = build()
        run = micro_batch(model, "bf16", range(rank, rank + 1))
        run()
        found = gradients(model, num)
        with Calls() as counted:
            run()
        calls = counted.calls
        if rank == 0:
            sent = f"{counted.num / num_parameters:.2f}"
            tell(name, calls["_allgather_base_"], calls["_reduce_scatter_base_"], sent, found, exact["fp32"])
        contenders[name] = Contender(run)
    times = measure(contenders, ROUNDS)
    if rank == 0:
        for name in list(WAYS)[2:]:
            report(times, name, "fully_shard, bf16", "for comparison")
    distributed.destroy_process_group()


def tell(name: str, gathers: object, reductions: object, sent: str, found: Any, exact: Any) -> None:
    errors = {key: ((g - exact[key]).norm() / exact[key].norm()).item() for key, g in found.items()}
    where = max(errors, key=lambda key: errors[key])
    print(f"| {name} | {gathers} | {reductions} | {sent} | {errors[where]:.4f} | {where} |", flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        print(__doc__.splitlines()[0])
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        subprocess.run([sys.executable, *launch], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
