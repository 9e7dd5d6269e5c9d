"""HS202: a number is read from the GPU in every step of a training loop."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.accumulation import LoopNode, encloses, turns
from halfstep.lint.event import Event, Path
from halfstep.lint.formats import region_devices
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Tensor


def check(script: Script) -> Iterator[Problem]:
    reads: dict[LoopNode, list[list[Event]]] = {}
    for path in script.paths:
        is_cuda = _computes_on_cuda(path)
        for turn in turns(path):
            if turn.loop is not None and any(
                _is_own(event, turn.loop) for event in turn.events if event.what == "backward"
            ):
                found = [event for event in turn.events if is_cuda and _is_read(event, turn.loop)]
                reads.setdefault(turn.loop, []).append(found)
    for loop, by_turn in reads.items():
        # A read that a turn goes without is one now and then.
        always = set.intersection(*({event.node for event in events} for events in by_turn))
        tested = _tested(loop)
        for event in by_turn[0]:
            if event.node in always and not _decides(script, event.node, loop, tested):
                yield Problem(
                    event.node,
                    "this waits for the GPU in every step: keep the sum on the device (`total += loss.detach()`), and "
                    "read it every 100 steps or at the end",
                )
                break  # what is read right after it waits for nothing


def _computes_on_cuda(path: Path) -> bool:
    """Whether the regions of a path name CUDA and no other device; a script that also runs on a CPU does not tell."""
    regions = {context for event in path for context in event.contexts if context.kind == "region"}
    return bool(regions) and all(region_devices(region) == {"cuda"} for region in regions)


def _is_own(event: Event, loop: LoopNode) -> bool:
    """Whether it happens in the loop itself and in no loop within it."""
    return event.loops[-1].node is loop


def _is_read(event: Event, loop: LoopNode) -> bool:
    """Whether the loss or an output is read from the device in the loop's own code, under no condition."""
    value = event.receiver
    if event.what != "item" or not isinstance(value, Tensor) or not _is_own(event, loop):
        return False
    if not value.tags & {"loss", "forward"} or value.tags & {"number", "gradient"} or value.devices == {"cpu"}:
        return False
    inside = [decision for decision in event.decisions if not encloses(decision.node, loop)]
    return all(decision.is_mode for decision in inside)


def _tested(loop: LoopNode) -> set[str]:
    """The names that conditions in a loop read."""
    tests = [node.test for node in ast.walk(loop) if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert)]
    return {node.id for test in tests for node in ast.walk(test) if isinstance(node, ast.Name)}


def _decides(script: Script, node: ast.AST, loop: LoopNode, tested: set[str]) -> bool:
    """Whether what is read decides about the step, or is handed to a function or caller that may."""
    statement = script.statement(node)
    if isinstance(statement, ast.If | ast.While | ast.Assert | ast.Return):
        return True
    if isinstance(statement, ast.Assign):
        names = {inner.id for target in statement.targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}
        return bool(names & tested)
    return not encloses(loop, node)


RULE = Rule(
    code="HS202",
    name="item-every-step",
    severity="note",
    summary="A number is read from the GPU in every step of a training loop.",
    why="""
A GPU works through a queue that the CPU fills ahead. `loss.item()`, `float(loss)`, `print(loss)` and
`scaler.get_scale()` wait until the queue is empty, and the GPU then idles until the next kernels have arrived.
Counted with torch 2.13: `scaler.step` of an optimizer that is not fused reads 1 number from the device in each step,
of a fused one 0; each `.item()` and each `get_scale()` adds 1.

How much it costs depends on the step. Where the kernels of a step are large, nothing shows; where they are small, the
wait is most of the step. The result is right either way, so this is a note and fails no build. It is given once a
loop, where the loss is read in every turn, under no condition, by a script whose regions name CUDA alone.
""",
    bad=(
        """\
import torch
from torch import nn


def train_epoch(net, loader, opt, scaler):
    running = 0.0
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        loss = nn.functional.cross_entropy(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        running += loss.item()  # HS202
    return running / len(loader)
""",
        """\
import torch
from torch import nn

net = nn.Linear(10, 1).cuda()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(1000):
    x = torch.randn(512, 10, device="cuda")
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = net(x)
    loss = nn.functional.mse_loss(out.float(), x.sum(-1, keepdim=True))
    loss.backward()
    opt.step()
    print(step, loss)  # HS202
""",
    ),
    good=(
        """\
import torch
from torch import nn


def train_epoch(net, loader, opt, scaler):
    running = torch.zeros((), device="cuda")
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        loss = nn.functional.cross_entropy(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        running += loss.detach()
    return (running / len(loader)).item()
""",
        """\
import math

import torch
from torch import nn


def train(net, loader, opt):
    for step, (x, y) in enumerate(loader):
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = net(x)
        loss = nn.functional.mse_loss(out.float(), y)
        loss.backward()
        opt.step()
        value = loss.item()
        if not math.isfinite(value):
            raise RuntimeError(f"step {step}: loss {value}")
""",
    ),
    check=check,
)
