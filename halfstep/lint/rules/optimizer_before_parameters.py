"""HS110: an optimizer was built before the parameters it should hold were replaced."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.event import Event
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.step import held_by, optimizer_of
from halfstep.lint.values import Ident, Instance, Object, Value
from halfstep.lint.vocabulary import PASSING_CLASSES

_REPLACES = {"replace", "module.resize_token_embeddings"}
_PARAMETERS = {"PReLU", "SyncBatchNorm"} | {f"{kind}Norm{n}d" for kind in ("Batch", "Instance") for n in (1, 2, 3)}


def check(script: Script) -> Iterator[Problem]:
    for path in script.paths:
        built: dict[Ident, Object] = {}
        replaced: dict[Ident, Event] = {}
        for event in path:
            if event.what == "make" and isinstance(event.result, Object) and event.result.kind == "optimizer":
                built[event.result.ident] = event.result
                replaced.pop(event.result.ident, None)
            elif event.what in _REPLACES and isinstance(event.receiver, Object | Instance):
                for optimizer in built.values():
                    if event.receiver.ident in held_by(optimizer) and _brings_parameters(event):
                        replaced.setdefault(optimizer.ident, event)
            elif event.what == "optimizer.add_param_group" and isinstance(event.receiver, Object):
                replaced.pop(event.receiver.ident, None)
            elif event.what in {"scaler.step", "optimizer.step"}:
                used = optimizer_of(event) if event.what == "scaler.step" else event.receiver
                earlier = replaced.pop(used.ident, None) if isinstance(used, Object) else None
                if earlier is not None:
                    yield Problem(
                        earlier.node,
                        "the optimizer was built before and holds the parameters that are replaced here: the new ones "
                        "are never trained; build it afterwards",
                    )


def _brings_parameters(event: Event) -> bool:
    """Whether a module with parameters of its own comes in, and not the same one wrapped."""
    if event.what == "module.resize_token_embeddings":
        return True
    new: Value | None = event.args[0] if event.args else None
    if not isinstance(new, Object | Instance) or new.ident == getattr(event.receiver, "ident", None):
        return False
    if isinstance(new, Instance):
        return True
    last = new.type.rpartition(".")[2]
    return last not in PASSING_CLASSES or last in _PARAMETERS


RULE = Rule(
    code="HS110",
    name="optimizer-before-parameters",
    severity="error",
    summary="The optimizer was built before the parameters it should hold were replaced.",
    why="""
An optimizer keeps the parameters that it was given. A head, an embedding or a model that is replaced afterwards has
new ones, which it does not know: their gradients are computed, grow with every backward pass because `zero_grad` does
not reach them either, and are never used.

Measured with torch 2.13, a new last layer after `SGD(net.parameters())`: in 5 steps its weights moved by 0.0. Where
all the parameters that the optimizer holds are frozen or gone, `scaler.step` raises "No inf checks were recorded for
this optimizer".
""",
    bad=(
        """\
import torch
from torch import nn


def finetune(backbone, loader, scaler):
    opt = torch.optim.SGD(backbone.parameters(), lr=0.01)
    backbone.fc = nn.Linear(512, 10)  # HS110
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = backbone(x)
        scaler.scale(nn.functional.cross_entropy(out.float(), y)).backward()
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn


class Job:
    def __init__(self, num_classes):
        self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1000))
        self.optim = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.net[-1] = nn.Linear(32, num_classes)  # HS110

    def batch(self, x, y):
        self.optim.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = self.net(x)
        nn.functional.cross_entropy(out.float(), y).backward()
        self.optim.step()
""",
    ),
    good=(
        """\
import torch
from torch import nn


def finetune(backbone, loader, scaler):
    backbone.fc = nn.Linear(512, 10)
    opt = torch.optim.SGD(backbone.parameters(), lr=0.01)
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = backbone(x)
        scaler.scale(nn.functional.cross_entropy(out.float(), y)).backward()
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn


def finetune(backbone, loader, scaler):
    backbone.fc = nn.Linear(512, 10)
    opt = torch.optim.SGD(backbone.parameters(), lr=0.01)
    backbone.drop = nn.Identity()
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = backbone(x)
        scaler.scale(nn.functional.cross_entropy(out.float(), y)).backward()
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Job:
    def __init__(self, net: nn.Module):
        self.net = net
        self.optim = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.net = DistributedDataParallel(self.net)

    def grow(self):
        self.net.extra = nn.Linear(32, 32)
        self.optim.add_param_group({"params": self.net.extra.parameters()})

    def batch(self, x, y):
        self.grow()
        self.optim.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = self.net(x)
        nn.functional.cross_entropy(out.float(), y).backward()
        self.optim.step()
""",
    ),
    check=check,
)
