"""HS117: weights are swapped inside a region whose 16-bit copies of them then stay stale."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.event import Event
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.step import idents_of
from halfstep.lint.values import Const, Ident, Instance, Object, Tensor

_IN_PLACE = frozenset(f"tensor.{name}_" for name in "copy lerp mul add sub div set zero fill normal clamp".split())
_LIBRARY = {"torch.nn.utils.vector_to_parameters", "torch._foreach_copy_", "torch._foreach_lerp_"}


def check(script: Script) -> Iterator[Problem]:
    for path in script.paths:
        cached: set[Ident] = set()
        swapped: dict[Ident, Event] = {}
        for event in path:
            regions = [context for context in event.contexts if context.kind == "region"]
            if not regions or (event.what == "leave" and event.name == "region" and len(regions) == 1):
                cached, swapped = set(), {}  # the outermost region drops its copies
            elif regions[-1].argument("cache_enabled") == Const(False):
                continue
            elif event.what == "forward" and isinstance(event.receiver, Object | Instance):
                stale = swapped.pop(event.receiver.ident, None)
                if stale is not None:
                    yield Problem(
                        stale.node,
                        "these weights change inside the region that has cast them, and what runs next in it computes "
                        "with the 16-bit copies of the old ones; leave the region before the change",
                    )
                cached.add(event.receiver.ident)
            else:
                swapped |= dict.fromkeys(_changed(event) & cached, event)


def _changed(event: Event) -> frozenset[Ident]:
    """The modules whose weights ``event`` overwrites."""
    receiver = event.receiver
    if event.what == "module.load_state_dict" and isinstance(receiver, Object | Instance):
        return frozenset({receiver.ident})
    if event.what == "data" or event.what in _IN_PLACE:
        return receiver.of if isinstance(receiver, Tensor) and "parameter" in receiver.tags else frozenset()
    if event.what == "call" and event.name in _LIBRARY:
        return frozenset(ident for value in event.args for ident in idents_of(value))
    return frozenset()


RULE = Rule(
    code="HS117",
    name="parameters-swapped-in-region",
    severity="error",
    summary="Weights are swapped inside a region that keeps 16-bit copies of the old ones.",
    why="""
A region casts each weight that requires a gradient to 16 bit once, under `no_grad` too, and keeps the copy until the
outermost region is left. `load_state_dict`, `p.data = ...` and `p.copy_(...)` change the fp32 weight alone. One
region around an evaluation of the weights, a swap to their average, and a second evaluation gives the first result
twice, bit for bit (torch 2.13).

Open a region for each, or pass `cache_enabled=False`, which casts every weight at each use.
""",
    bad=(
        """\
import torch


def compare(net, average, x):
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        plain = net(x)
        net.load_state_dict(average)  # HS117
        smooth = net(x)
    return plain, smooth
""",
        """\
import torch
from torch import nn

net = nn.Linear(8, 8).cuda()
shadow = [p.detach().clone() for p in net.parameters()]
with torch.autocast("cuda", dtype=torch.bfloat16):
    before = net(x)
    with torch.no_grad():
        for p, s in zip(net.parameters(), shadow):
            p.copy_(s)  # HS117
    after = net(x)
""",
    ),
    good=(
        """\
import torch


def compare(net, average, x):
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        plain = net(x)
    net.load_state_dict(average)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        smooth = net(x)
    return plain, smooth
""",
        """\
import torch
from torch import nn

net, average = nn.Linear(8, 8).cuda(), nn.Linear(8, 8).cuda()
with torch.autocast("cuda", dtype=torch.bfloat16):
    before = net(x)
    average.load_state_dict(net.state_dict())
    after = average(x)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.99)
""",
    ),
    check=check,
)
