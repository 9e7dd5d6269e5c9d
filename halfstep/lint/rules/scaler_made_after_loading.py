"""HS164: a new scaler takes the place of the one whose state was loaded."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.event import Path
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.scaling import used_scaler
from halfstep.lint.script import Script
from halfstep.lint.step import is_off
from halfstep.lint.values import Ident, Object


def check(script: Script) -> Iterator[Problem]:
    if not script.has("scaler.load_state_dict"):
        return
    for path in script.paths:
        for made in _made_in_its_place(path):
            yield Problem(
                made.node,
                "this new scaler takes the place of the one whose state was loaded: make it once, before loading",
            )


def _made_in_its_place(path: Path) -> Iterator[Object]:
    """The scalers that a path makes after it has loaded the state of another, which it does not use from then on."""
    used: dict[Ident, int] = {}
    loaded: dict[Ident, int] = {}
    made: list[tuple[int, Object]] = []
    for position, event in enumerate(path):
        scaler = used_scaler(event)
        if scaler is not None:
            used[scaler.ident] = position
        if event.what == "scaler.load_state_dict" and isinstance(event.receiver, Object):
            loaded[event.receiver.ident] = position
        result = event.result
        if event.what == "make" and isinstance(result, Object) and result.kind == "scaler" and not is_off(result):
            made.append((position, result))
    for position, scaler in made:
        before = [ident for ident, when in loaded.items() if when < position and ident != scaler.ident]
        was_used = used.get(scaler.ident, -1) > position
        if was_used and scaler.ident not in loaded and any(used.get(ident, -1) < loaded[ident] for ident in before):
            yield scaler


RULE = Rule(
    code="HS164",
    name="scaler-made-after-loading",
    severity="warning",
    summary="A new scaler takes the place of the one whose state was loaded.",
    why="""
The state goes into the object that `load_state_dict` was called on. A scaler that is made afterwards, in `fit` or
when the precision is set, begins with the scale 65536 and a growth count of 0, and what was loaded is thrown away
without a word. A run that had settled at a scale of 16 skips log2(65536 / 16) = 12 steps before it is there again.

Make the scaler once, where the optimizer is made, and load into it.
""",
    bad=(
        """\
import torch
from torch import nn


class Runner:
    def __init__(self, net):
        self.net = net.cuda()
        self.opt = torch.optim.SGD(net.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cuda")

    def fit(self, loader, checkpoint):
        state = torch.load(checkpoint)
        self.net.load_state_dict(state["net"])
        self.opt.load_state_dict(state["opt"])
        self.scaler.load_state_dict(state["scaler"])
        self.scaler = torch.amp.GradScaler("cuda", growth_interval=500)  # HS164
        for x, y in loader:
            self.opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                out = self.net(x)
            self.scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
""",
        """\
import torch
from torch import nn


def resume(path, net, opt):
    scaler = torch.amp.GradScaler("cuda")
    state = torch.load(path)
    net.load_state_dict(state["net"])
    opt.load_state_dict(state["opt"])
    scaler.load_state_dict(state["scaler"])


def main(net, batches):
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    resume("last.pt", net, opt)
    gs = torch.amp.GradScaler("cuda")  # HS164
    for x, y in batches:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        gs.scale(nn.functional.mse_loss(out.float(), y)).backward()
        gs.step(opt)
        gs.update()
""",
    ),
    good=(
        """\
import torch
from torch import nn


class Runner:
    def __init__(self, net):
        self.net = net.cuda()
        self.opt = torch.optim.SGD(net.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cuda", growth_interval=500)

    def fit(self, loader, checkpoint):
        state = torch.load(checkpoint)
        self.net.load_state_dict(state["net"])
        self.opt.load_state_dict(state["opt"])
        self.scaler.load_state_dict(state["scaler"])
        for x, y in loader:
            self.opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                out = self.net(x)
            self.scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
""",
        """\
import torch
from torch import nn


def train(net, opt, scaler, batches):
    for x, y in batches:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
        scaler.step(opt)
        scaler.update()


def main(first, second, batches, state):
    opt = torch.optim.SGD(first.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda")
    opt.load_state_dict(state["opt"])
    scaler.load_state_dict(state["scaler"])
    train(first, opt, scaler, batches)
    train(second, torch.optim.SGD(second.parameters(), lr=0.01), torch.amp.GradScaler("cuda"), batches)
""",
    ),
    check=check,
)
