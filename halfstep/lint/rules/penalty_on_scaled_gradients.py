"""HS114: a penalty is computed from gradients of a scaled loss."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.event import Event, Path
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.step import divides_by_scale
from halfstep.lint.values import Const, Items, Tensor, Value

_NOT_LINEAR = frozenset("pow square exp log sqrt clamp clamp_min clamp_max relu softplus huber_loss".split())


def check(script: Script) -> Iterator[Problem]:
    for path in script.paths:
        told: set[int] = set()
        for index, event in enumerate(path):
            gradient = _operand(event)
            if gradient is None or not _needs_true_gradient(event, gradient) or _is_divided_later(path, index):
                continue
            line = event.node.lineno  # type: ignore[attr-defined]
            if line not in told:
                told.add(line)
                yield Problem(
                    event.node,
                    "these gradients are of a scaled loss, and the penalty grows with the loss scale; divide what "
                    "`autograd.grad` gave by `scaler.get_scale()` first",
                )


def _operand(event: Event) -> Tensor | None:
    """A gradient by ``autograd.grad`` that still carries the scale, among what ``event`` computes with."""
    if event.what != "operator" and event.what != "call" and not event.what.startswith("tensor."):
        return None
    operands = _flat((event.receiver, *event.args))
    return next((value for value in operands if isinstance(value, Tensor) and _is_scaled(value)), None)


def _flat(values: tuple[Value | None, ...]) -> list[Value | None]:
    return [item for value in values for item in (value.items if isinstance(value, Items) else (value,))]


def _is_scaled(value: Value | None) -> bool:
    # Divided or multiplied by a number that is not known, it may be the true gradient.
    return (
        isinstance(value, Tensor) and {"autograd", "scaled"} <= value.tags and not value.tags & {"divided", "weighted"}
    )


def _needs_true_gradient(event: Event, gradient: Tensor) -> bool:
    """Whether an operation gives something else than a multiple of what the true gradient would give."""
    last = event.name.rpartition(".")[2]
    if event.what != "operator":
        return last in _NOT_LINEAR or (last.endswith("_loss") and event.what == "call")
    left, right = event.args
    if last == "pow":
        return True
    if last == "mul":
        return _is_scaled(left) and _is_scaled(right)
    other = right if left is gradient or _is_scaled(left) else left
    return last in {"add", "sub"} and not _is_scaled(other) and other != Const(0)


def _is_divided_later(path: Path, index: int) -> bool:
    """Whether the scale is divided out of a result before the backward pass."""
    for event in path.events[index + 1 :]:
        if event.what == "backward":
            return False
        if event.what == "operator" and divides_by_scale(event):
            return True
    return False


RULE = Rule(
    code="HS114",
    name="penalty-on-scaled-gradients",
    severity="error",
    summary="A penalty is computed from gradients of a scaled loss.",
    why="""
`torch.autograd.grad(scaler.scale(score), x, create_graph=True)` gives gradients that are multiplied by the loss
scale, 65536 at first. A penalty such as `(gradient.norm() - 1) ** 2` on them is about 65536^2 = 4.3e9 times too large
and swamps the loss, or overflows; it also changes whenever the scale does.

Scale for the inner backward pass, so that it does not underflow in fp16, then divide by `scaler.get_scale()` before
anything else is computed, and scale the whole loss for the outer one.
""",
    bad=(
        """\
import torch


def gradient_penalty(critic, x, scaler):
    x = x.detach().requires_grad_()
    with torch.autocast("cuda", dtype=torch.float16):
        score = critic(x)
    (slope,) = torch.autograd.grad(scaler.scale(score.float().sum()), x, create_graph=True)
    return ((slope.flatten(1).norm(dim=1) - 1) ** 2).mean()  # HS114
""",
        """\
import torch
from torch import nn

net = nn.Linear(8, 1).cuda()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
gs = torch.amp.GradScaler("cuda")
for x, y in batches:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = net(x)
    loss = nn.functional.mse_loss(out.float(), y)
    grads = torch.autograd.grad(gs.scale(loss), net.parameters(), create_graph=True)
    rough = sum(g.square().sum() for g in grads)  # HS114
    gs.scale(loss + 0.1 * rough).backward()
    gs.step(opt)
    gs.update()
""",
    ),
    good=(
        """\
import torch


def gradient_penalty(critic, x, scaler):
    x = x.detach().requires_grad_()
    with torch.autocast("cuda", dtype=torch.float16):
        score = critic(x)
    (slope,) = torch.autograd.grad(scaler.scale(score.float().sum()), x, create_graph=True)
    slope = slope / scaler.get_scale()
    return ((slope.flatten(1).norm(dim=1) - 1) ** 2).mean()
""",
        """\
import torch
from torch import nn

net = nn.Linear(8, 1).cuda()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
gs = torch.amp.GradScaler("cuda")
for x, y in batches:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = net(x)
    loss = nn.functional.mse_loss(out.float(), y)
    grads = torch.autograd.grad(gs.scale(loss), net.parameters(), create_graph=True)
    inverse = 1.0 / gs.get_scale()
    rough = sum((g * inverse).square().sum() for g in grads)
    gs.scale(loss + 0.1 * rough).backward()
    gs.step(opt)
    gs.update()
""",
    ),
    check=check,
)
