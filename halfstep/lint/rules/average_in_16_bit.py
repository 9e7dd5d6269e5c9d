"""HS153: a moving average of weights is kept in 16 bit."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import Event
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Const, Instance, Object, Tensor
from halfstep.lint.weights import cast_of

_HALF = {"fp16", "bf16"}
_UPDATES = {"tensor.mul_", "tensor.lerp_"}


def check(script: Script) -> Iterator[Problem]:
    casts: dict[object, Event] = {}
    for event in script.sites:
        receiver = event.receiver
        if event.what.startswith("module.") and isinstance(receiver, Object | Instance) and cast_of(event):
            casts[receiver.ident] = event
            if isinstance(receiver, Object) and receiver.kind == "average" and cast_of(event) <= _HALF:
                yield _problem(event.node, cast_of(event))
        if event.what == "make" and isinstance(event.result, Object) and event.result.kind == "average":
            model = event.args[0] if event.args else None
            cast = casts.get(model.ident) if isinstance(model, Object | Instance) else None
            if cast is not None and cast_of(cast) <= _HALF:
                yield _problem(event.node, cast_of(cast))
        if event.what not in _UPDATES or not isinstance(receiver, Tensor) or not receiver.is_16_bit:
            continue
        if "parameter" not in receiver.tags or (event.what == "tensor.mul_" and not _decays(event)):
            continue
        found = [casts[ident] for ident in receiver.of if ident in casts and cast_of(casts[ident]) == receiver.formats]
        if found:
            yield _problem(found[0].node, receiver.formats)
        elif isinstance(receiver.node, ast.Call) and "detached" in receiver.tags:
            yield _problem(receiver.node, receiver.formats)


def _decays(event: Event) -> bool:
    """Whether weights are multiplied by a decay near 1: less than that is no average."""
    factor = event.args[0] if event.args else None
    return not isinstance(factor, Const) or (isinstance(factor.value, float) and 0.5 < factor.value < 1)


def _problem(node: ast.AST, formats: frozenset[str]) -> Problem:
    name = " or ".join(sorted(formats))
    return Problem(
        node,
        f"a moving average is kept in {name}: at a decay of 0.999 a step of it is a thousandth of a difference, which "
        "rounds away; keep the average in fp32",
    )


RULE = Rule(
    code="HS153",
    name="average-in-16-bit",
    severity="error",
    summary="A moving average of weights (EMA, SWA) is kept in 16 bit.",
    why="""
An average with decay 0.999 moves by a thousandth of the difference between weight and average. bf16 has 8 significant
bits: a change under 1/512 of the number it is added to rounds away. When a weight has doubled, its average should move
by 1/1000 of itself, about half of what bf16 needs, and stays where it was. In fp16, which needs 1/4096, it stays for
every weight that is less than 24 % away.

Measured on a linear layer after 200 steps of SGD at decay 0.999, in bf16 135 of 4,096 averaged weights had moved at
all. Keep the average in fp32, whatever the format of the model: `halfstep.WeightAverage` does.
""",
    bad=(
        """\
import copy

import torch
from torch import nn


class Ema:
    def __init__(self, model, decay=0.999):
        self.decay = decay
        self.shadow = copy.deepcopy(model).to(torch.bfloat16).eval()  # HS153

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.mul_(self.decay).add_(p.to(s.dtype), alpha=1 - self.decay)


net = nn.Linear(64, 64)
ema = Ema(net)


def after_step():
    ema.update(net)
""",
        """\
import copy

import torch
from torch import nn

student = nn.Linear(32, 8)
teacher = copy.deepcopy(student).requires_grad_(False)
teacher.half()  # HS153


def follow(rate):
    with torch.no_grad():
        for mine, theirs in zip(teacher.parameters(), student.parameters()):
            mine.lerp_(theirs.half(), rate)
""",
    ),
    good=(
        """\
import copy

import torch
from torch import nn


class Ema:
    def __init__(self, model, decay=0.999):
        self.decay = decay
        self.shadow = copy.deepcopy(model).float().eval()

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.mul_(self.decay).add_(p.to(s.dtype), alpha=1 - self.decay)


net = nn.Linear(64, 64)
ema = Ema(net)


def after_step():
    ema.update(net)
""",
        """\
import copy

import torch
from torch import nn

student = nn.Linear(32, 8)
teacher = copy.deepcopy(student).requires_grad_(False).half()


def distil(x):
    with torch.no_grad():
        target = teacher(x.half()).float()
    return nn.functional.mse_loss(student(x), target)
""",
    ),
    check=check,
)
