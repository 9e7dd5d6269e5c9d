"""A run that is saved and resumed, alike under each engine, with odd sizes, dropout, BatchNorm and ragged batches.

The data come in numbers, of PARTS parts each. Each of N ranks takes PARTS / N of them, one micro-batch after the other,
so that a window of two numbers holds the same samples however many ranks there are.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep import Stepper
from halfstep.distributed import shard
from halfstep.gradients import gradients_of, local_of

PARTS = 4
ADAMW = "adamw fused"
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    ADAMW: lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


class Net(nn.Module):
    """13 and 5 come out even over no number of ranks; over four the last one holds nothing of ``head``'s bias."""

    def __init__(self, seed: int, draws: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.head = nn.Linear(8, 13), nn.Linear(13, 5)
        self.norm = nn.BatchNorm1d(13) if draws else nn.Identity()
        self.drop = nn.Dropout(0.1 if draws else 0.0)
        self.register_buffer("table", torch.arange(5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(torch.tanh(self.body(x))))) + self.table


def rank_and_num(engine: str) -> tuple[int, int]:
    return (0, 1) if engine == "one" else (distributed.get_rank(), distributed.get_world_size())


def build(
    engine: str, policy: str, optimizer: str = ADAMW, seed: int = 0, draws: bool = True, **settings: Any
) -> Stepper:
    model: nn.Module = Net(seed, draws)
    if engine == "ddp":
        model = DistributedDataParallel(model)
    elif engine == "fsdp":
        model = shard(model, policy)
    made = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(made, total_iters=20)
    settings = {"accumulate": PARTS // rank_and_num(engine)[1] * 2, "max_norm": 1.0, "scheduler": scheduler} | settings
    stepper = Stepper(model, made, policy, watch=False, **settings)
    torch.manual_seed(seed + 10 * rank_and_num(engine)[0])  # dropout differs by rank
    return stepper


def batch(number: int, part: int, loud: bool) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Part ``part`` of micro-batch ``number``: inputs, targets, and what its loss is multiplied by."""
    generator = torch.Generator().manual_seed(100 * number + part)
    num = 2 + int(torch.randint(5, (), generator=generator))
    x, y = torch.randn(num, 8, generator=generator), torch.randn(num, 5, generator=generator)
    factor = 40.0 if loud and (number, part) in {(1, 0), (4, 1), (5, 1), (6, 2)} else 1.0
    return x, y, factor


def micro_batches(engine: str, start: int, stop: int) -> list[tuple[int, int]]:
    """What this rank takes from micro-batches ``start`` to ``stop``: numbers and parts."""
    rank, num = rank_and_num(engine)
    return [(number, part) for number in range(start, stop) for part in range(rank, PARTS, num)]


def run(stepper: Stepper, pieces: list[tuple[int, int]], loud: bool = True) -> list[Any]:
    """Each micro-batch; the reports as text, None inside a window."""
    reports = []
    for number, part in pieces:
        x, y, factor = batch(number, part, loud)
        report = stepper.step(lambda: ((stepper.model(x).float() - y).square().sum() * factor, float(len(x))))  # noqa: B023
        reports.append(report and str(report.to_dict()))
    return reports


def everything(stepper: Stepper) -> list[Any]:
    """All that this rank holds, as copies of plain tensors."""
    state = stepper.state_dict()
    optimizer, model = stepper.optimizer.state_dict(), stepper.ranks.module.state_dict()
    return [plain(copy.deepcopy(each)) for each in (dict(model), optimizer, stepper.scheduler.state_dict(), state)]


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return local_of(value).clone() if isinstance(value, torch.Tensor) else value


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def of_all_ranks(stepper: Stepper) -> dict[str, Any]:
    """What a run is, whoever holds it: exact weights, optimizer states, and what its window adds up to."""
    named = {p: name for name, p in stepper.ranks.module.named_parameters()}
    state = stepper.state_dict()
    window = state["window"]
    num = stepper.ranks.num
    sums = {}
    for parameter, gradient in gradients_of(stepper.optimizer).items():
        true = gradient.float() / state["scale"]["value"]  # ranks may have scales of their own; all are powers of two
        if hasattr(true, "full_tensor"):
            sums[named[parameter]] = true.full_tensor() * num
        else:
            sums[named[parameter]] = sum(stepper.ranks.gather(true))
    numbers = [None if window[key] is None else float(window[key]) for key in ("loss_sum", "count")]
    gathered = stepper.ranks.gather(numbers)
    return {
        "weights": {name: whole(weight) for name, weight in stepper.weights()},
        "optimizer": {
            named[p]: {key: whole(value) for key, value in each.items()} for p, each in stepper.optimizer.state.items()
        },
        "lr": stepper.optimizer.param_groups[0]["lr"],
        "scheduler": stepper.scheduler.state_dict(),
        "scale": state["scale"],
        "counters": [state[key] for key in ("num_steps", "unit", "promoted")],
        "num_micro_batches": window["num_micro_batches"],
        "sums": sums,
        "totals": [sum(each or 0.0 for each in numbers) for numbers in zip(*gathered, strict=True)],
    }
