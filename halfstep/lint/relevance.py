"""Which parts of a source can change the order of a training step. Only there is it worth to follow both branches."""

from __future__ import annotations

import ast
import re
from functools import lru_cache

from halfstep.lint.names import last_name

_ORDER_METHODS = frozenset(
    "backward manual_backward step update unscale_ zero_grad scale clip_grad_norm_ clip_grad_value_ clip_gradients "
    "clip_grad_norm state_dict load_state_dict save save_state save_checkpoint optimizer_step lr_scheduler_step "
    "toggle_optimizer accumulate no_sync".split()
)
_ORDER_NAMES = frozenset({"clip_grad_norm_", "clip_grad_value_", "grad", "GradScaler", "autocast"})
_BACKWARD = frozenset({"backward", "manual_backward"})
_OPPOSITES = {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
_EVIDENCE = re.compile(
    r"scaler|Scaler|autocast|\bamp\b|half\b|float16|fp16|bf16|backward|unscale_|zero_grad|clip_grad|training_step|ccelerat"
    r"|isfinite|isnan|nan_to_num|ross_?[eE]ntropy"
    r"|finfo|anomaly|\.grad\b|optimizer|optim\.|torch\.save|no_grad|lerp_|precision="
)
"""What a function holds, itself or in one that it calls, if any rule may have a word to say about it."""
_OPTIMIZER = re.compile(r"(^|_)opt(?!ion)", re.I)
_LEAVES = (ast.Return, ast.Break, ast.Continue, ast.Raise)


class Relevance:
    """Answers for one parsed module."""

    def __init__(self, tree: ast.Module, lines: list[str]) -> None:
        self._matters: dict[ast.AST, bool] = {}
        self._leaves: dict[ast.AST, bool] = {}
        self._trains: dict[ast.AST, bool] = {}
        self._assignments: dict[ast.ClassDef, dict[str, list[ast.expr]]] = {}
        self._texts: dict[ast.AST, str] = {}
        self._opposites: dict[ast.AST, str] = {}
        self._members: dict[ast.ClassDef, dict[str, ast.stmt]] = {}
        self._holds_loop: dict[ast.AST, bool] = {}
        self._yields: dict[ast.AST, bool] = {}
        self._uses: dict[ast.AST, dict[str, set[str]]] = {}
        self.stepped: set[str] = set()
        """Names and attributes that a scaler steps or unscales: ``scaler.step(self.optimizer)``."""
        calls: dict[str, set[str]] = {}
        relevant, worth, counters, evident = set(), set(), set(), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
                counters.add(last_name(node.target))
            elif isinstance(node, ast.Call):
                self.stepped.add(_stepped(node))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                called = calls.setdefault(node.name, set())
                if _EVIDENCE.search("\n".join(lines[_first_line(node) - 1 : node.end_lineno])):
                    worth.add(node.name)
                    evident.add(node)
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Call):
                        called.add(_called(inner))
                    if _orders(inner):
                        relevant.add(node.name)
        self.stepped.discard("")
        self.functions = _with_callers(relevant, calls)
        self._trainers = _with_callers({name for name, called in calls.items() if called & _BACKWARD}, calls)
        self._worth, self._evident = _with_callers(worth, calls), evident
        self.counters = frozenset(counters - {""})
        """What ``+=`` and ``-=`` change somewhere: a condition that reads one asks for no setting."""

    def is_worth(self, definition: ast.FunctionDef | ast.AsyncFunctionDef, cls: ast.ClassDef | None) -> bool:
        """Whether a rule may have a word to say about a function: by itself, what it calls, or the object it is of."""
        constructor = self.members(cls).get("__init__") if cls is not None else None
        return definition.name in self._worth or constructor in self._evident

    def self_assignments(self, cls: ast.ClassDef) -> dict[str, list[ast.expr]]:
        """Every ``self.name = value`` in the methods of a class."""
        if cls not in self._assignments:
            found: dict[str, list[ast.expr]] = {}
            for node in ast.walk(cls):
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                            found.setdefault(target.attr, []).append(node.value)
            self._assignments[cls] = found
        return self._assignments[cls]

    def members(self, cls: ast.ClassDef) -> dict[str, ast.stmt]:
        """The first definition, assignment or field of each name in the body of a class."""
        if cls not in self._members:
            found: dict[str, ast.stmt] = {}
            for statement in cls.body:
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.setdefault(statement.name, statement)
                elif isinstance(statement, ast.Assign):
                    for target in statement.targets:
                        if isinstance(target, ast.Name):
                            found.setdefault(target.id, statement)
                elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    found.setdefault(statement.target.id, statement)
            self._members[cls] = found
        return self._members[cls]

    def holds_loop(self, loop: ast.For | ast.AsyncFor | ast.While) -> bool:
        """Whether a loop holds another one that trains."""
        if loop not in self._holds_loop:
            self._holds_loop[loop] = any(
                isinstance(part, ast.For | ast.While) and self.trains(part)
                for statement in loop.body
                for part in ast.walk(statement)
            )
        return self._holds_loop[loop]

    def uses(self, function: ast.AST) -> dict[str, set[str]]:
        """The attributes that a function reads of each of its names; ``()`` where it calls the name itself."""
        if function not in self._uses:
            found: dict[str, set[str]] = {}
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    found.setdefault(node.value.id, set()).add(node.attr)
                elif isinstance(node, ast.Call):
                    if isinstance(node.func, ast.Name):
                        found.setdefault(node.func.id, set()).add("()")
                    elif node.args and isinstance(node.args[0], ast.Name) and _stepped(node):
                        found.setdefault(node.args[0].id, set()).add("in step")
            self._uses[function] = found
        return self._uses[function]

    def matters(self, node: ast.AST) -> bool:
        """Whether ``node`` holds something that belongs to the order of the step."""
        if node not in self._matters:
            self._matters[node] = any(
                _orders(inner) or (isinstance(inner, ast.Call) and _called(inner) in self.functions)
                for inner in ast.walk(node)
            )
        return self._matters[node]

    def trains(self, node: ast.AST) -> bool:
        """Whether ``node`` holds a backward pass, itself or in a function that it calls."""
        if node not in self._trains:
            called = {_called(inner) for inner in ast.walk(node) if isinstance(inner, ast.Call)}
            self._trains[node] = bool(called & (_BACKWARD | self._trainers))
        return self._trains[node]

    def leaves(self, node: ast.AST) -> bool:
        """Whether ``node`` may leave the surrounding loop or function."""
        if node not in self._leaves:
            self._leaves[node] = any(isinstance(inner, _LEAVES) for inner in ast.walk(node))
        return self._leaves[node]

    def yields(self, function: ast.AST) -> bool:
        """Whether a function is a generator."""
        if function not in self._yields:
            inner = [node for node in ast.walk(function) if isinstance(node, ast.Yield | ast.YieldFrom)]
            self._yields[function] = bool(inner)
        return self._yields[function]

    def text(self, test: ast.AST) -> str:
        """A condition as text, by which its answer is remembered."""
        if test not in self._texts:
            self._texts[test] = ast.unparse(test)
        return self._texts[test]

    def opposite(self, test: ast.Compare) -> str | None:
        """The text of ``a is not b`` for ``a is b``, and the like; None for another comparison."""
        swapped = _OPPOSITES.get(type(test.ops[0])) if len(test.ops) == 1 else None
        if swapped is None:
            return None
        if test not in self._opposites:
            self._opposites[test] = ast.unparse(ast.Compare(test.left, [swapped()], test.comparators))
        return self._opposites[test]

    @staticmethod
    @lru_cache(4096)
    def words(text: str) -> frozenset[str]:
        return frozenset(re.findall(r"\w+", text))


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Where a function begins, with its decorators."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _with_callers(names: set[str], calls: dict[str, set[str]]) -> frozenset[str]:
    """``names``, and every function that calls one of them, also through others."""
    changed = True
    while changed:
        new = {name for name, called in calls.items() if name not in names and called & names}
        names |= new
        changed = bool(new)
    return frozenset(names)


def _called(call: ast.Call) -> str:
    return last_name(call.func)


def _stepped(call: ast.Call) -> str:
    """The last name of the optimizer that ``scaler.step(opt)`` or ``unscale_`` is handed; "" for another call."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in {"step", "unscale_"} or not call.args:
        return ""
    scaler, optimizer = last_name(call.func.value), last_name(call.args[0])
    is_scaler = call.func.attr == "unscale_" or "scal" in scaler.lower() or _OPTIMIZER.search(optimizer)
    return optimizer if is_scaler else ""


def _orders(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = _called(node)
        return name in _ORDER_METHODS or name in _ORDER_NAMES
    if not (isinstance(node, ast.Attribute) and node.attr == "grad"):
        return False
    return not (isinstance(node.value, ast.Name) and node.value.id in {"autograd", "torch"})
