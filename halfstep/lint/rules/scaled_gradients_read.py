"""HS102: gradients are measured or changed while they still carry the loss scale."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import Event
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.step import follow, in_helper, place, scaler_name
from halfstep.lint.values import Const, Items, Tensor

_MEASURES = frozenset(
    "norm abs max min amax amin mean sum pow square sqrt std var item tolist numpy vector_norm _foreach_norm histc "
    "get_total_norm clamp clamp_ clip clip_ quantile median nan_to_num nan_to_num_ sign sign_ matrix_norm".split()
)
"""What depends on the size of a gradient. isfinite, cat, clone, all_reduce and the like do not."""
_CHANGES = frozenset("add_ sub_ clamp_ nan_to_num_ addcmul_ addcdiv_ lerp_ sign_ normal_ renorm_ pow_ sqrt_".split())
"""What does not go through a division by the scale, as a product does."""


def check(script: Script) -> Iterator[Problem]:
    told: set[ast.stmt] = set()
    for path in script.paths:
        carried: dict[ast.AST, Event | None] = {}
        for event, step in follow(path):
            if event.what not in {"gradient.read", "gradient.write", "operator", "call"}:
                continue
            gradient = _gradient(event)
            if gradient is None:
                continue
            if isinstance(gradient.node, ast.Attribute):
                backward = step.carried_by(event, gradient)
            else:
                backward = carried.get(gradient.node) if gradient.node is not None else None
            carried[event.node] = backward
            if (
                backward is not None
                and "mask" not in gradient.tags
                and _depends(event)
                and not in_helper(event, "clip")
            ):
                where, scaler = place(event, backward), scaler_name(script, backward)
                if script.statement(where) in told:
                    continue
                told.add(script.statement(where))
                yield Problem(
                    where,
                    f"these gradients still carry the loss scale of `{scaler}`: what is {_done(event)} is not the true "
                    f"gradient; call `{scaler}.unscale_` for their optimizer first",
                )


def _gradient(event: Event) -> Tensor | None:
    """The gradient that ``event`` is about, or what was computed from it."""
    values = [event.receiver, *event.args]
    flat = [item for value in values for item in (value.items if isinstance(value, Items) else (value,))]
    return next((v for v in flat if isinstance(v, Tensor) and "gradient" in v.tags and "autograd" not in v.tags), None)


def _depends(event: Event) -> bool:
    """Whether the answer is another one when every gradient is multiplied by the scale."""
    first = event.args[0] if event.args else None
    if event.what == "gradient.read":
        return event.name in _MEASURES
    if event.what == "call":
        return event.name.rpartition(".")[2] == "get_total_norm"
    if event.what == "gradient.write":
        known = isinstance(first, Const) or (isinstance(first, Tensor) and "gradient" not in first.tags)
        return event.name in _CHANGES and (known or not event.args)
    # p.grad += weight_decay * p
    target = event.node.target if isinstance(event.node, ast.AugAssign) else None
    other = event.args[1]
    is_other = isinstance(other, Tensor) and "gradient" not in other.tags
    return isinstance(target, ast.Attribute) and target.attr == "grad" and event.name in {"add", "sub"} and is_other


def _done(event: Event) -> str:
    changed = event.what in {"gradient.write", "operator"} or event.name.endswith("_")
    return "changed" if changed else "measured"


RULE = Rule(
    code="HS102",
    name="scaled-gradients-read",
    severity="error",
    summary="Gradients are logged, compared or changed while they still carry the loss scale.",
    why="""
Between `scaler.scale(loss).backward()` and `scaler.unscale_(optimizer)` every gradient is multiplied by the loss
scale, 65536 at first. A norm that is logged there is that much too large and halves or doubles whenever the scale
does; a threshold compares with the wrong number; noise or weight decay that is added counts 65536 times too little.

`nan_to_num_` is worse: it hides the overflow from the scaler, which finds it by looking for Inf and NaN. Measured
with torch 2.13: one infinite gradient became 3.4e38, was divided by 65536, and SGD at `lr=1e-3` moved the weight by
5.2e30, while the scale stayed. Products with a factor, `isfinite` and sums over ranks are the same before and after.
""",
    bad=(
        """\
import torch
from torch import nn


def fit(net, loader, opt, scaler, writer):
    for i, (x, y) in enumerate(loader):
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        scaler.scale(nn.functional.cross_entropy(out.float(), y)).backward()
        norms = torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None])  # HS102
        scaler.step(opt)
        scaler.update()
        writer.add_histogram("gradient norms", norms, i)
""",
        """\
import torch
from torch import nn


class Job:
    def __init__(self, net):
        self.net = net
        self.opt = torch.optim.SGD(net.parameters(), lr=0.1)
        self.gs = torch.amp.GradScaler("cuda")

    def repair(self):
        for p in self.net.parameters():
            p.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def batch(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(x)
        self.gs.scale(nn.functional.mse_loss(out.float(), y)).backward()
        self.repair()  # HS102
        self.gs.step(self.opt)
        self.gs.update()
""",
    ),
    good=(
        """\
import torch
from torch import nn


def fit(net, loader, opt, scaler, writer):
    for i, (x, y) in enumerate(loader):
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        scaler.scale(nn.functional.cross_entropy(out.float(), y)).backward()
        scaler.unscale_(opt)
        norms = torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None])
        scaler.step(opt)
        scaler.update()
        writer.add_histogram("gradient norms", norms, i)
""",
        """\
import torch
from torch import nn

net = nn.Linear(8, 1).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
gs = torch.amp.GradScaler("cuda")
for x, y in batches:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = net(x)
    gs.scale(nn.functional.mse_loss(out.float(), y)).backward()
    for p in net.parameters():
        torch.distributed.all_reduce(p.grad)
        p.grad.div_(torch.distributed.get_world_size())
    finite = all(torch.isfinite(p.grad).all() for p in net.parameters())
    inverse = 1.0 / gs.get_scale()
    norm = torch.stack([(p.grad * inverse).norm() for p in net.parameters()]).norm()
    gs.step(opt)
    gs.update()
""",
    ),
    check=check,
)
