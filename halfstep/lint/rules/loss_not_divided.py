"""HS120: gradients of several micro-batches are summed, and the loss is not divided by their number."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.lint import vocabulary
from halfstep.lint.accumulation import Window, encloses, windows
from halfstep.lint.event import Event
from halfstep.lint.finding import Edit
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Const, Object, Tensor

_AVERAGES = re.compile(r"grad|averag|normali[sz]e|rescale", re.I)
"""What a function from elsewhere is called that may divide the gradients."""


def check(script: Script) -> Iterator[Problem]:
    for window in windows(script):
        if any(_divides(event) for turn in (*window.idle, *window.stepping) for event in turn.events):
            continue
        for event in window.backwards:
            loss = event.receiver
            if not isinstance(loss, Tensor) or "loss" not in loss.tags or loss.tags & {"divided", "weighted"}:
                continue
            if event.args or event.keywords:
                continue
            length, node = ast.unparse(window.length), _loss(event)
            name = script.source(node) if node is not None else "the loss"
            edits = _mended(script, window, node, length)
            yield Problem(
                event.node,
                f"the gradients of `{length}` micro-batches are summed: backward of `{name} / {length}`, or the step "
                f"is `{length}` times too large",
                edits,
                "unsafe" if edits else None,
            )


def _divides(event: Event) -> bool:
    """Whether gradients are divided later, or a loss is a sum that a count divides later, or that cannot be told."""
    if event.what == "gradient.write" or (event.what == "gradient.read" and event.name.startswith("_foreach_")):
        return True
    if event.what == "other" and _AVERAGES.search(event.name):
        return True
    given = None
    if event.what == "call" and event.name.rpartition(".")[2] in vocabulary.LOSSES:
        given = event.argument("reduction")
    elif event.what == "forward" and isinstance(event.receiver, Object) and event.receiver.kind == "loss function":
        given = event.receiver.argument("reduction")
    return given is not None and given != Const("mean")


def _loss(event: Event) -> ast.expr | None:
    """The expression of the loss in ``loss.backward()`` and ``scaler.scale(loss).backward()``."""
    node = event.node
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    inner = node.func.value
    if isinstance(inner, ast.Call) and getattr(inner.func, "attr", "") == "scale" and len(inner.args) == 1:
        return inner.args[0]
    return inner if isinstance(inner, ast.Name | ast.Attribute | ast.Call) else None


def _mended(script: Script, window: Window, loss: ast.expr | None, length: str) -> tuple[Edit, ...]:
    if loss is None or window.loop is None or not encloses(window.loop, loss) or isinstance(loss, ast.Starred):
        return ()
    is_operator = isinstance(loss, ast.BinOp | ast.UnaryOp | ast.IfExp)
    text = f"({script.source(loss)})" if is_operator else script.source(loss)
    divisor = f"({length})" if isinstance(window.length, ast.BinOp) else length
    return (Edit("replace", script.span(loss), f"{text} / {divisor}"),)


RULE = Rule(
    code="HS120",
    name="loss-not-divided",
    severity="warning",
    summary="Gradients of several micro-batches are summed, and the loss is not divided by their number.",
    why="""
`backward` adds to `.grad`. After N micro-batches the gradient is the sum of N means, N times that of the batch that
the window stands for. With N = 4 and SGD the learning rate is 4 times what was set, `clip_grad_norm_(..., 1.0)` clips
as 0.25 would, and a loss scale settles 4 times lower, since the fp16 gradients of the activations are 4 times larger.

Adam hides most of it, since its step does not depend on the size of the gradient, but not the clipping. Divide each
loss by the number of micro-batches of its window, before `backward`.
""",
    bad=(
        """\
import torch
from torch import nn


def train_epoch(model, loader, optimizer, scaler, accum_steps=4):
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(x.cuda())
        loss = nn.functional.cross_entropy(logits.float(), y.cuda())
        scaler.scale(loss).backward()  # HS120
        if (i + 1) % accum_steps == 0 or i + 1 == len(loader):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
        """\
import torch
from torch import nn


class Run:
    def __init__(self, gpt, batches, micro_batches):
        self.gpt, self.batches, self.micro_batches = gpt.cuda(), batches, micro_batches
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(gpt.parameters(), lr=0.1)

    def step(self):
        self.optimizer.zero_grad()
        for _ in range(self.micro_batches):
            tokens, target = next(self.batches)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = self.gpt(tokens)
            self.criterion(logits.float(), target).backward()  # HS120
        self.optimizer.step()
""",
    ),
    good=(
        """\
import torch
from torch import nn


def train_epoch(model, loader, optimizer, scaler, accum_steps=4):
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(x.cuda())
        loss = nn.functional.cross_entropy(logits.float(), y.cuda())
        scaler.scale(loss / accum_steps).backward()
        if (i + 1) % accum_steps == 0 or i + 1 == len(loader):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
        """\
import torch
from torch import nn


def step(gpt, micro_batches, optimizer, num_tokens):
    optimizer.zero_grad()
    for tokens, target in micro_batches:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = gpt(tokens)
        nn.functional.cross_entropy(logits.float(), target, reduction="sum").backward()
    for weight in gpt.parameters():
        weight.grad.div_(num_tokens)
    optimizer.step()
""",
    ),
    check=check,
    fix="unsafe",
    fix_note="It divides the loss at its backward. A learning rate tuned on the sum means something else then.",
)
