"""HS155: trainable fp16 weights under a gradient scaler."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Const, Object
from halfstep.lint.weights import all_trained, inherits_format


def check(script: Script) -> Iterator[Problem]:
    for trained in script.once(all_trained):
        step = trained.step
        if step is None or step.what != "scaler.step" or "fp16" not in trained.formats or inherits_format(trained.cast):
            continue
        scaler = step.receiver
        if isinstance(scaler, Object) and scaler.argument("enabled") == Const(False):
            continue
        yield Problem(
            trained.cast,
            "trainable weights are cast to fp16 and stepped by a GradScaler, which refuses fp16 gradients: keep "
            "them in fp32, the autocast region casts what it needs",
        )


RULE = Rule(
    code="HS155",
    name="half-weights-under-scaler",
    severity="error",
    summary="Trainable weights are cast to fp16 although a GradScaler steps them.",
    why="""
A gradient has the format of its weight. `GradScaler.unscale_`, which `step` calls, raises `ValueError: Attempting to
unscale FP16 gradients.` for an fp16 gradient, because dividing it by the scale (65,536 at the start) would push it
below 6.0e-8, the smallest fp16 number, into zero.

The scaler and the autocast region are made for fp32 weights: the region casts them for every product, the gradients
arrive in fp32, and an update keeps 24 bits. Cast only what is frozen. To train fp16 weights nevertheless, use master
weights (`halfstep.Stepper` with a `master=` policy).
""",
    bad=(
        """\
import torch
from torch import nn

net = nn.Linear(64, 16)
net.half()  # HS155
opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-5)
scaler = torch.amp.GradScaler("cuda")


def step(x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x).float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
""",
        """\
import torch
from torch import nn


class Finetuner:
    def __init__(self, net: nn.Module, dtype=torch.float16):
        self.net = net.to("cuda", dtype)  # HS155
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.gs = torch.amp.GradScaler("cuda")

    def step(self, x, y):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(self.net(x), y)
        self.gs.scale(loss).backward()
        self.gs.step(self.optimizer)
        self.gs.update()
""",
    ),
    good=(
        """\
import torch
from torch import nn

net = nn.Linear(64, 16)
opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-5)
scaler = torch.amp.GradScaler("cuda")


def step(x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x).float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
""",
        """\
import torch
from torch import nn

encoder = nn.Linear(64, 16).requires_grad_(False).half()
net = nn.Linear(16, 16)
opt = torch.optim.AdamW(net.parameters(), lr=1e-5)
scaler = torch.amp.GradScaler("cuda")


def step(x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(encoder(x)).float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
""",
        """\
import torch
from torch import nn

net = nn.Linear(64, 16)
opt = torch.optim.AdamW(net.parameters(), lr=1e-5)
scaler = torch.amp.GradScaler("cuda")


def step(x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x).float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()


def export(x):
    return net.half()(x.half())
""",
    ),
    check=check,
)
