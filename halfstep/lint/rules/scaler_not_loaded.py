"""HS163: the scaler's state is saved, and a resumed run loads everything but it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import Event
from halfstep.lint.finding import Edit
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.scaling import calls_state, has_scaler, spelled
from halfstep.lint.script import Script
from halfstep.lint.step import is_managed
from halfstep.lint.values import Object, Table


def check(script: Script) -> Iterator[Problem]:
    if not script.has("scaler.state_dict"):
        return
    key = _saved_key(script)
    for event in loads_without_scaler(script):
        edits = loading(script, event, key) if key is not None else ()
        yield Problem(
            event.node,
            "the state of the optimizer is loaded and that of the scaler is not, though it is saved: a resumed "
            "run begins with the first scale again and skips steps",
            edits,
            "safe" if edits else None,
        )


def loads_without_scaler(script: Script) -> list[Event]:
    """The places that load an optimizer from a checkpoint in a run with a scaler, if none of them loads that too."""
    if calls_state(script, "load_state_dict"):
        return []
    found: dict[ast.AST, Event] = {}
    for path in script.paths:
        loads = [event for event in path if event.what == "optimizer.load_state_dict" and _from_checkpoint(event)]
        # Several optimizers of one function are one place.
        last = {event.function: event for event in loads}
        found |= {event.node: event for event in last.values() if has_scaler(script, path, event)}
    return list(found.values())


def _from_checkpoint(event: Event) -> bool:
    optimizer, state = event.receiver, event.args[0] if event.args else None
    if not isinstance(optimizer, Object) or is_managed(optimizer):
        return False
    return not (isinstance(state, Object) and state.kind == "state")  # copied from another optimizer


def loading(script: Script, event: Event, key: str) -> tuple[Edit, ...]:
    """Load the scaler after the optimizer, from a checkpoint that has its state under ``key``."""
    node, scaler = event.node, spelled(script, event.node)
    state = node.args[0] if isinstance(node, ast.Call) and node.args else None
    if scaler is None or not isinstance(state, ast.Subscript) or not isinstance(state.value, ast.Name):
        return ()
    code = f'if "{key}" in {state.value.id}:\n    {scaler}.load_state_dict({state.value.id}["{key}"])'
    return (Edit("after", script.span(script.statement(node)), code),)


def _saved_key(script: Script) -> str | None:
    """The key under which a checkpoint of this source holds the scaler's state."""
    keys = {
        key
        for event in script.sites
        if event.what == "save" and event.args and isinstance(event.args[0], Table)
        for key, value in event.args[0].pairs
        if isinstance(key, str) and isinstance(value, Object) and value.type == "scaler.state_dict"
    }
    return keys.pop() if len(keys) == 1 else None


RULE = Rule(
    code="HS163",
    name="scaler-not-loaded",
    severity="warning",
    summary="The scaler's state is saved, and a resumed run loads everything but it.",
    why="""
A state that is saved and not loaded is lost as one that was never saved: the resumed run begins with a scale of
65536, and each step that overflows until the scale is back where it was is skipped, log2(65536 / 256) = 8 steps for a
run that had settled at 256. The schedule goes on meanwhile, and the growth count begins at 0.

Load it beside the optimizer's. Guard it where older checkpoints have none.
""",
    bad=(
        """\
import torch
from torch import nn


class Job:
    def __init__(self, net):
        self.net = net.cuda()
        self.opt = torch.optim.Adam(net.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cuda")

    def save(self, path):
        state = {"net": self.net.state_dict(), "opt": self.opt.state_dict(), "scaler": self.scaler.state_dict()}
        torch.save(state, path)

    def load(self, path):
        state = torch.load(path)
        self.net.load_state_dict(state["net"])
        self.opt.load_state_dict(state["opt"])  # HS163

    def step(self, x, y):
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


def main(net, loader, resume, path):
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    gs = torch.amp.GradScaler("cuda")
    if resume:
        saved = torch.load(path, map_location="cuda")
        net.load_state_dict(saved["net"])
        opt.load_state_dict(saved["opt"])  # HS163
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        gs.scale(nn.functional.mse_loss(out.float(), y)).backward()
        gs.step(opt)
        gs.update()
    torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "gs": gs.state_dict()}, path)
""",
    ),
    good=(
        """\
import torch
from torch import nn


class Job:
    def __init__(self, net):
        self.net = net.cuda()
        self.opt = torch.optim.Adam(net.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cuda")

    def save(self, path):
        state = {"net": self.net.state_dict(), "opt": self.opt.state_dict(), "scaler": self.scaler.state_dict()}
        torch.save(state, path)

    def load(self, path):
        state = torch.load(path)
        self.net.load_state_dict(state["net"])
        self.opt.load_state_dict(state["opt"])
        if "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])

    def step(self, x, y):
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


def main(net, loader, resume, path):
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    gs = torch.amp.GradScaler("cuda")
    if resume:
        saved = torch.load(path, map_location="cuda")
        net.load_state_dict(saved["net"])
        opt.load_state_dict(saved["opt"])
        gs.load_state_dict(saved["gs"])
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        gs.scale(nn.functional.mse_loss(out.float(), y)).backward()
        gs.step(opt)
        gs.update()
    torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "gs": gs.state_dict()}, path)
""",
        """\
import torch


def save(path, net, opt, scaler):
    torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "scaler": scaler.state_dict()}, path)


def load_for_use(path, net):
    net.load_state_dict(torch.load(path)["net"])
    return net.eval()
""",
    ),
    check=check,
    fix="safe",
    fix_note="It loads the scaler's state after the optimizer's, where the checkpoint has one.",
)
