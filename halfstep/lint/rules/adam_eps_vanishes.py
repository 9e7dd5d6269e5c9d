"""HS144: the eps of Adam and its kin is zero in the format of the weights."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.formats import get_format
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Const
from halfstep.lint.weights import Trained, all_trained

_EPS = {
    "torch.optim.Adam": (3, 1e-8),
    "torch.optim.AdamW": (3, 1e-8),
    "torch.optim.NAdam": (3, 1e-8),
    "torch.optim.Adamax": (3, 1e-8),
    "torch.optim.RMSprop": (3, 1e-8),
    "torch.optim.Adagrad": (5, 1e-10),
}
"""Where eps stands among the arguments, and its default."""


def check(script: Script) -> Iterator[Problem]:
    for trained in script.once(all_trained):
        if not eps_vanishes(trained) or (trained.step is None and _is_stepped_by_scaler(script, trained)):
            continue
        made = trained.made
        yield Problem(
            made.node,
            f"eps={_eps(trained):g} is zero in fp16, the format of these weights: a gradient of zero divides 0 by "
            "0 and makes its weight NaN; keep the weights in fp32, or pass eps=1e-4",
        )


def _is_stepped_by_scaler(script: Script, trained: Trained) -> bool:
    """Whether another path hands this optimizer to a scaler, which refuses fp16 gradients before Adam sees them."""
    return any(event.what == "scaler.step" and trained.optimizer in event.args for event in script.sites)


def eps_vanishes(trained: Trained) -> bool:
    """Whether the optimizer adds an eps to fp16 numbers that rounds to zero there. Fused kernels compute in fp32."""
    if trained.optimizer.type not in _EPS or "fp16" not in trained.formats:
        return False
    if trained.optimizer.argument("fused") not in (None, Const(False), Const(None)):
        return False
    if trained.step is not None and trained.step.what == "scaler.step":
        return False
    eps = _eps(trained)
    return eps is not None and not get_format("fp16").fits(eps)


def _eps(trained: Trained) -> float | None:
    position, default = _EPS[trained.optimizer.type]
    given = trained.optimizer.argument("eps", position)
    if given is None:
        return default
    return float(given.value) if isinstance(given, Const) and isinstance(given.value, int | float) else None


RULE = Rule(
    code="HS144",
    name="adam-eps-vanishes",
    severity="error",
    summary="The eps of Adam rounds to zero in the fp16 format of the weights.",
    why="""
Adam divides by `sqrt(v) + eps`, and torch's plain and foreach kernels add the eps in the format of the weights. The
smallest fp16 number is 6.0e-8 and half of it rounds to zero, so the default `eps=1e-8` is 0. The second moment `v` of a
gradient under 7.7e-3 rounds to zero as well (`v` begins at 0.001 g^2), and the division is x / 0.

Measured with torch 2.13 and weights of 1.0 after two steps at `lr=1e-3`: a gradient of zero (an unused row of an
embedding) makes its weight NaN, gradients of 1e-5 and 1e-3 make theirs -inf. With `eps=1e-4` all stay finite; with
`fused=True` (Adam, AdamW, Adagrad) the kernel computes in fp32 and they are right. Best are fp32 weights or masters.
""",
    bad=(
        """\
import torch
from torch import nn

net = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 4)).half().cuda()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)  # HS144


def step(ids, labels):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(ids).float(), labels).backward()
    optimizer.step()
""",
        """\
import torch
from torch import nn


class Job:
    def __init__(self, width):
        self.critic = nn.Linear(width, 1)
        self.critic.to(torch.float16)
        self.opt = torch.optim.RMSprop(self.critic.parameters(), 5e-5, 0.99, 1e-9)  # HS144

    def step(self, x):
        self.opt.zero_grad()
        self.critic(x).float().mean().backward()
        self.opt.step()
""",
    ),
    good=(
        """\
import torch
from torch import nn

net = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 4)).cuda()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)


def step(ids, labels):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(ids).float(), labels).backward()
    optimizer.step()
""",
        """\
import torch
from torch import nn

net = nn.Linear(64, 4)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)


def step(x, labels):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), labels).backward()
    optimizer.step()
""",
        """\
import torch
from torch import nn

encoder = nn.Linear(64, 64).half().requires_grad_(False)
head = nn.Linear(64, 4)
optimizer = torch.optim.Adam(head.parameters(), lr=1e-3)


def step(x, labels):
    optimizer.zero_grad()
    nn.functional.cross_entropy(head(encoder(x.half()).float()), labels).backward()
    optimizer.step()
""",
    ),
    check=check,
)
