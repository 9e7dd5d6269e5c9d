"""HS176: the step of a distributed run depends on the rank."""

from __future__ import annotations

import re
from collections.abc import Iterator

from halfstep.lint.event import Decision, Event, Path
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script

_RANK = re.compile(
    r"\b(global_|local_)?rank\b|get_rank\(|is_main_process|is_master\b|is_rank_zero|is_global_zero", re.I
)
_STEPS = {"scaler.step", "scaler.update", "scaler.unscale_", "optimizer.step"}


def check(script: Script) -> Iterator[Problem]:
    for path in script.paths:
        reported: set[str] = set()
        alone: set[Decision] = set()
        for event in path:
            if event.what == "backward":
                alone = set(event.decisions)  # one rank that trains by itself drifts from nobody
            if event.what not in _STEPS:
                continue
            decision = next((d for d in event.decisions if _RANK.search(d.text) and d not in alone), None)
            if decision is None or decision.text in reported or _on_both_sides(script, path, event, decision):
                continue
            reported.add(decision.text)
            yield Problem(
                event.node,
                f"{event.what.partition('.')[2]} depends on the rank (`{decision.text}`): the others keep their "
                "weights and their scale, and the ranks drift apart; run it on all of them",
            )


def _on_both_sides(script: Script, path: Path, event: Event, decision: Decision) -> bool:
    """Whether the other ranks do the same in the other branch."""
    return any(
        other.what == event.what
        and any(d.text == decision.text and d.taken is not decision.taken for d in other.decisions)
        for another in script.paths
        if another.root is path.root
        for other in another
    )


RULE = Rule(
    code="HS176",
    name="rank-dependent-step",
    severity="error",
    summary="A step, unscale or update of the loss scale runs on some ranks only.",
    why="""
After the all-reduce of DDP every rank holds the same gradients, and each must take the same step: the weights are
replicated, nobody sends them again. A step on rank 0 alone leaves N - 1 of N ranks with old weights; from the next
forward on the gradients that are averaged belong to different models. An `update` on rank 0 alone lets the scales part:
after one overflow rank 0 scales by 32,768 and the others by 65,536, so that the average of their gradients is wrong by
up to a factor of 2. With FSDP the collectives no longer match, and the run hangs.

Step, unscale and update on all ranks; print and save on rank 0.
""",
    bad=(
        """\
import torch
import torch.distributed as dist


def train(net, opt, scaler, loader):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        if dist.get_rank() == 0:
            scaler.step(opt)  # HS176
        scaler.update()
""",
        """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP


class Worker:
    def __init__(self, net, rank):
        self.rank = rank
        self.net = DDP(net.to(rank), device_ids=[rank])
        self.opt = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(self, x, y):
        self.opt.zero_grad()
        torch.nn.functional.mse_loss(self.net(x), y).backward()
        if self.rank == 0:
            self.opt.step()  # HS176
""",
    ),
    good=(
        """\
import torch


def train(net, opt, scaler, loader):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
import torch.distributed as dist


def train(net, opt, scaler, loader):
    for step, (x, y) in enumerate(loader):
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if dist.get_rank() == 0 and step % 100 == 0:
            print(step, loss.item())
""",
        """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def main(net, rank, loader):
    net = DDP(net.to(rank), device_ids=[rank])
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in loader:
        opt.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        opt.step()
    if rank == 0:
        torch.save(net.state_dict(), "net.pt")
""",
    ),
    check=check,
)
