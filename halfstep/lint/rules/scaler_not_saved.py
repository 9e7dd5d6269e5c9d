"""HS162: a checkpoint holds the optimizer, and not the scaler that serves it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import Event
from halfstep.lint.finding import Edit
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.rules.scaler_not_loaded import loading, loads_without_scaler
from halfstep.lint.scaling import calls_state, has_scaler, spelled
from halfstep.lint.script import Script
from halfstep.lint.step import is_managed
from halfstep.lint.values import Items, Object, Table, Value


def check(script: Script) -> Iterator[Problem]:
    if not script.has("optimizer.state_dict") or calls_state(script, "state_dict"):
        return
    reported: set[tuple[ast.AST | None, Value]] = set()
    for path in script.paths:
        for event in path:
            state = _saved(event)
            if state is None or (event.function, state) in reported or not has_scaler(script, path, event):
                continue
            reported.add((event.function, state))  # the last, the best and every tenth are one checkpoint
            edits = _saved_and_loaded(script, event)
            yield Problem(
                event.node,
                "the checkpoint holds the optimizer and not the scaler: a resumed run begins with the first scale "
                "again and skips steps; save `scaler.state_dict()` too",
                edits,
                "safe" if edits else None,
            )


def _saved(event: Event) -> Value | None:
    """What ``torch.save`` writes, or a function of another file that is called after it, if an optimizer is in it."""
    is_save = event.what == "save" or (event.what == "call" and "save" in event.name.rpartition(".")[2])
    return next((value for value in event.args if _is_state(value)), None) if is_save else None


def _is_state(value: Value) -> bool:
    """Whether it is the state of an optimizer, or holds one."""
    if isinstance(value, Table):
        return not value.partial and any(_is_state(item) for _, item in value.pairs)
    if isinstance(value, Items):
        return any(_is_state(item) for item in value.items)
    if not isinstance(value, Object) or value.type != "optimizer.state_dict" or not value.args:
        return False
    return isinstance(value.args[0], Object) and not is_managed(value.args[0])


def _saved_and_loaded(script: Script, event: Event) -> tuple[Edit, ...]:
    """Save the scaler, and load it wherever the optimizer is loaded: one without the other is no use."""
    saving = _saving(script, event)
    loads = [loading(script, load, "scaler") for load in loads_without_scaler(script)]
    return (*saving, *(edit for edits in loads for edit in edits)) if saving and all(loads) else ()


def _saving(script: Script, event: Event) -> tuple[Edit, ...]:
    """``"scaler": scaler.state_dict()`` at the end of the dict that is saved."""
    node = event.node
    table = node.args[0] if isinstance(node, ast.Call) and node.args else None
    if isinstance(table, ast.Name):
        function = script.function(node)
        found = [
            assign.value
            for assign in script.walk(ast.Assign)
            if isinstance(assign, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == table.id for target in assign.targets)
            and script.function(assign) is function
        ]
        table = found[0] if len(found) == 1 else None
    scaler = spelled(script, table) if table is not None else None
    if scaler is None:
        return ()
    if isinstance(table, ast.Dict) and table.keys and table.keys[-1] is not None:
        names = {key.value for key in table.keys if isinstance(key, ast.Constant)}
        last: ast.AST = table.keys[-1]
        entry = f'"scaler": {scaler}.state_dict()'
    elif isinstance(table, ast.Call) and getattr(table.func, "id", "") == "dict" and table.keywords and not table.args:
        names = {keyword.arg for keyword in table.keywords}
        last, entry = table.keywords[-1], f"scaler={scaler}.state_dict()"
    else:
        return ()
    text = script.source(table)
    if "scaler" in names or "#" in text:
        return ()
    body = text[:-1].rstrip()
    space = " " if script.span(last).line == table.lineno else "\n" + " " * script.span(last).column
    comma = "," if body.endswith(",") else ""
    code = f"{body.removesuffix(',')},{space}{entry}{comma}{text[len(body) :]}"
    return (Edit("replace", script.span(table), code),)


RULE = Rule(
    code="HS162",
    name="scaler-not-saved",
    severity="warning",
    summary="A checkpoint holds the optimizer, and not the scaler that serves it.",
    why="""
The scale and its growth count are state of the run, as the moments of the optimizer are. A run that has settled at a
scale of 512 and is resumed with a new scaler begins at 65536: log2(65536 / 512) = 7 steps overflow and are skipped
before it is back. Measured on a small run with a schedule, the learning rate was 5.9e-4 after the resume instead of
5.1e-4, and the two runs never meet again.

Save `scaler.state_dict()` with the model and the optimizer, and load it with them.
""",
    bad=(
        """\
import torch
from torch import nn


def train(net, loader, opt, path, num_epochs):
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(num_epochs):
        for x, y in loader:
            opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                out = net(x)
            scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
            scaler.step(opt)
            scaler.update()
        torch.save({"epoch": epoch, "net": net.state_dict(), "opt": opt.state_dict()}, path)  # HS162
""",
        """\
import torch
from torch import nn


class Job:
    def __init__(self, net):
        self.net = net.cuda()
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        self.grad_scaler = torch.amp.GradScaler("cuda")

    def save(self, path):
        state = dict(net=self.net.state_dict(), optimizer=self.optimizer.state_dict())
        torch.save(state, path)  # HS162

    def step(self, x, y):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(x)
        self.grad_scaler.scale(nn.functional.cross_entropy(out.float(), y)).backward()
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
""",
    ),
    good=(
        """\
import torch
from torch import nn


def train(net, loader, opt, path, num_epochs):
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(num_epochs):
        for x, y in loader:
            opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                out = net(x)
            scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
            scaler.step(opt)
            scaler.update()
        state = {"epoch": epoch, "net": net.state_dict(), "opt": opt.state_dict(), "scaler": scaler.state_dict()}
        torch.save(state, path)
""",
        """\
import torch
from torch import nn


def train(net, loader, opt, path, num_epochs):
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(num_epochs):
        for x, y in loader:
            opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                out = net(x)
            scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
            scaler.step(opt)
            scaler.update()
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "scaler": scaler.state_dict()}, path)
""",
        """\
import torch
from torch import nn


def train(net, loader, opt, path):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
        scaler.step(opt)
        scaler.update()
    torch.save({"net": net.state_dict()}, path)
""",
    ),
    check=check,
    fix="safe",
    fix_note="It adds the scaler's state to the dict that is saved, and loads it where the file loads the optimizer's.",
)
