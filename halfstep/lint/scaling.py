"""The scalers of a source: whether one is on, whether a path trains with one, and how code at some place calls it."""

from __future__ import annotations

import ast
import re

from halfstep.lint.event import Event, Path
from halfstep.lint.parameters import MODULE
from halfstep.lint.script import Script
from halfstep.lint.step import is_off
from halfstep.lint.values import Const, Instance, Object, Value

USES = frozenset({"scaler.scale", "scaler.step", "scaler.unscale_", "scaler.update"})
"""What is done to a scaler that takes part in training."""
_NAMED = re.compile(r"scaler|(^|_)amp(_|$)|^gs$", re.I)


def is_on(scaler: Value | None) -> bool:
    """Whether a scaler is known to be on: its constructor is seen, and does not turn it off, nor may."""
    if not isinstance(scaler, Object) or scaler.kind != "scaler" or not scaler.type or is_off(scaler):
        return False
    old = scaler.type.startswith(("torch.cuda.", "torch.cpu."))
    value = scaler.argument("enabled", 4 if old else 5)
    if value is None:
        return scaler.argument("**") is None
    return isinstance(value, Const) and bool(value.value)


def used_scaler(event: Event) -> Object | None:
    """The scaler that an event trains with, unless it is off; None for any other event."""
    if event.what not in USES or not isinstance(event.receiver, Object) or is_off(event.receiver):
        return None
    return event.receiver


def has_scaler(script: Script, path: Path, event: Event) -> bool:
    """Whether the run that comes to ``event`` on ``path`` has a scaler, one that the source trains with."""
    if not any(used_scaler(site) is not None for site in script.sites):
        return False
    for other in (*path.before, *path.events):
        made = other.result
        if used_scaler(other) is not None:
            return True
        if other.what == "make" and isinstance(made, Object) and made.kind == "scaler" and not is_off(made):
            return True
    return _parameter(event.function) is not None


def calls_state(script: Script, method: str) -> bool:
    """Whether ``method`` (state_dict, load_state_dict) of a scaler is called, or of what may be one."""
    for event in script.sites:
        if event.what == f"scaler.{method}":
            return True
        if event.what == "other" and event.name == method and not isinstance(event.receiver, Instance):
            node = event.node.func if isinstance(event.node, ast.Call) else event.node
            if _may_be_scaler(node.value if isinstance(node, ast.Attribute) else node):
                return True
    return False


def _may_be_scaler(owner: ast.AST) -> bool:
    """Whether an object that is not known goes by the name of a scaler, or by one that only the run tells."""
    if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute) and not owner.args:
        return _may_be_scaler(owner.func.value)  # x.float(), x.cpu()
    if isinstance(owner, ast.Subscript) and isinstance(owner.slice, ast.Constant):
        return not MODULE.search(str(owner.slice.value))
    if isinstance(owner, ast.Call) and any(MODULE.search(ast.unparse(arg).rpartition(".")[2]) for arg in owner.args):
        return False  # unwrap(model)
    return isinstance(owner, ast.Call | ast.Subscript) or bool(_NAMED.search(ast.unparse(owner).rpartition(".")[2]))


def spelled(script: Script, node: ast.AST) -> str | None:
    """How code at ``node`` can call the scaler that the source trains with; None when that is not sure."""
    function = script.function(node)
    parameter = _parameter(function)
    if parameter is not None:
        return parameter
    found = set()
    for event in script.sites:
        owner = (
            event.node.func.value
            if isinstance(event.node, ast.Call) and isinstance(event.node.func, ast.Attribute)
            else None
        )
        if used_scaler(event) is None or owner is None:
            continue
        text, used_in = ast.unparse(owner), script.function(owner)
        outer = {function, script.function(function)} if function is not None else {None}
        is_own = text.startswith("self.") and _class_of(script, function) is _class_of(script, used_in) is not None
        if is_own or (isinstance(owner, ast.Name) and used_in in outer):
            found.add(text)
    return found.pop() if len(found) == 1 else None


def _class_of(script: Script, node: ast.AST | None) -> ast.ClassDef | None:
    while node is not None and not isinstance(node, ast.ClassDef):
        node = script.parents.get(node)
    return node


def _parameter(function: ast.AST | None) -> str | None:
    """The parameter of a function that is called like a scaler."""
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return next((name for name in names if "scaler" in name.lower()), None)
