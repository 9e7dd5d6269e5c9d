"""HS402: apex.amp, which has given way to torch.amp."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script

_INSTEAD = {
    "apex.amp.initialize": "open torch.autocast(device_type, dtype=...) around the forward, with weights in float32",
    "apex.amp.scale_loss": "write scaler.scale(loss).backward() with a torch.amp.GradScaler",
    "apex.amp.master_params": "weights stay in float32: clip model.parameters() after scaler.unscale_(optimizer)",
}


def check(script: Script) -> Iterator[Problem]:
    for name, instead in _INSTEAD.items():
        for node in script.calls(name):
            yield Problem(node, f"{name} is deprecated and no longer maintained: {instead}")


RULE = Rule(
    code="HS402",
    name="apex-amp",
    severity="warning",
    summary="apex.amp.initialize, scale_loss or master_params, which torch.amp has replaced.",
    why="""
`apex.amp` has been deprecated in favour of `torch.amp` since torch 1.6 (2020). It patches torch's functions and the
optimizer in place, needs an extension built for each version of CUDA, and its opt levels O2 and O3 cast the weights of
the model to fp16.

In `torch.amp` the parts stand apart: a region, `torch.autocast("cuda", dtype=torch.float16)`, around forward and loss,
and a `torch.amp.GradScaler("cuda")` with `scale(loss).backward()`, `unscale_` before clipping, `step` and `update`.
""",
    bad=(
        """\
import apex
import torch


def prepare(model, lr):
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    return apex.amp.initialize(model, opt, opt_level="O1")  # HS402
""",
        """\
from apex.amp import scale_loss


class Loop:
    def __init__(self, model, opt):
        self.model, self.opt = model, opt

    def step(self, x, y):
        loss = self.model(x, y)
        with scale_loss(loss, self.opt) as scaled:  # HS402
            scaled.backward()
        self.opt.step()
""",
    ),
    good=(
        """\
import torch


def prepare(model, lr):
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    return model, opt, torch.amp.GradScaler("cuda")
""",
        """\
import torch
from torch import amp

scaler = amp.GradScaler("cuda")
region = amp.autocast("cuda", dtype=torch.float16)
""",
        """\
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam

norm, optimizer = FusedLayerNorm(64), FusedAdam
""",
    ),
    check=check,
)
