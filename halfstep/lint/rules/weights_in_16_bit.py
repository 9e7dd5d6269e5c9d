"""HS152: weights kept in 16 bit are trained without a master copy."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.rule import Problem, Rule
from halfstep.lint.rules.adam_eps_vanishes import eps_vanishes
from halfstep.lint.script import Script
from halfstep.lint.weights import all_trained, inherits_format


def check(script: Script) -> Iterator[Problem]:
    for trained in script.once(all_trained):
        if trained.step is None or not trained.writes_plainly or trained.step.what == "scaler.step":
            continue
        if eps_vanishes(trained) or inherits_format(trained.cast):
            continue
        bits = 8 if trained.formats == {"bf16"} else 11
        name = " or ".join(sorted(trained.formats))
        yield Problem(
            trained.cast,
            f"these weights are trained in {name} without a master copy: an update smaller than 2^-{bits + 1} of "
            "its weight rounds away; keep them in fp32 and open an autocast region, or train with master weights",
        )


RULE = Rule(
    code="HS152",
    name="weights-in-16-bit",
    severity="warning",
    summary="Weights kept in 16 bit are trained by a plain optimizer, without master weights.",
    why="""
A bf16 number has 8 significant bits and an fp16 number 11. An update changes a weight only if it is at least half of
the step between neighbours: for a weight of 1.0 that is 0.0039 upwards in bf16, and 0.00049 in fp16. Adam's updates are
about as large as the learning rate, so at `lr=1e-3` a bf16 weight of 1.0 does not move in 100 steps, nor in a million.
Nothing raises: the small weights learn, the large ones (every norm starts at 1.0) stay.

Keep the weights in fp32 and let an autocast region compute in 16 bit. Where the memory does not allow that, use master
weights or stochastic rounding: `halfstep.Stepper` with `Policy.parse("bf16 master=split16")` keeps 16-bit weights and
their remainders, exactly fp32 together.
""",
    bad=(
        """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
model = model.to("cuda", dtype=torch.bfloat16)  # HS152
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)


def train(batches):
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x.to(torch.bfloat16)).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


train([(torch.randn(8, 32, device="cuda"), torch.zeros(8, dtype=torch.long, device="cuda"))])
""",
        """\
import torch
from torch import nn


class Job:
    def __init__(self, width):
        self.net = nn.Linear(width, 4).bfloat16()  # HS152
        self.opt = torch.optim.SGD([{"params": self.net.parameters(), "lr": 1e-3}], momentum=0.9)

    def run(self, x, y):
        self.opt.zero_grad()
        nn.functional.mse_loss(self.net(x).float(), y).backward()
        self.opt.step()
""",
    ),
    good=(
        """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
model = model.to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)


def train(batches):
    for x, y in batches:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


train([(torch.randn(8, 32, device="cuda"), torch.zeros(8, dtype=torch.long, device="cuda"))])
""",
        """\
import torch
from torch import nn

model = nn.Linear(32, 8).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)


def train(batches):
    for x, y in batches:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


train([(torch.randn(8, 32, device="cuda"), torch.zeros(8, dtype=torch.long, device="cuda"))])
""",
        """\
import torch
from torch import nn

backbone = nn.Linear(64, 64).requires_grad_(False).bfloat16()
head = nn.Linear(64, 4)
opt = torch.optim.AdamW(head.parameters(), lr=1e-3)


def step(x, y):
    opt.zero_grad()
    nn.functional.cross_entropy(head(backbone(x.bfloat16()).float()), y).backward()
    opt.step()
""",
    ),
    check=check,
)
