"""A plain training loop, read step by step; whatever in it has no known part in the step is refused by name."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from halfstep.lint.loop_parts import Loop, NotUnderstood, Parts, called_on, is_true, name_of
from halfstep.lint.script import Script

STEP = ("unscale_", "clip", "step", "update", "schedule")
"""What follows the backward pass, in this order."""
ORDERED = ("backward", *STEP)


@dataclass
class LoopShape:
    """parts: the model, optimizer and so on. region: the ``with`` around the forward pass, None before it is wrapped.

    forward: the statements from the first use of the model to the loss. backward: the statement; loss: its name.
    removed: statements that the Stepper makes superfluous. window: the ``if`` that ends an accumulation window, with
    what is left in it. accumulate, max_norm: source, or None. ends_short: whether the last window may be a short one.
    """

    loop: Loop
    parts: Parts
    forward: list[ast.stmt] = field(default_factory=list)
    region: ast.With | None = None
    backward: ast.stmt | None = None
    loss: str = ""
    divided_by: str | None = None
    removed: list[ast.stmt] = field(default_factory=list)
    window: ast.If | None = None
    left_in_window: list[ast.stmt] = field(default_factory=list)
    accumulate: str | None = None
    max_norm: str | None = None
    ends_short: bool = False


def read_loop(script: Script, loop: Loop, parts: Parts) -> LoopShape:
    """Understand ``loop``. Raises :class:`NotUnderstood` with the node that is at fault."""
    return _Reader(script, loop, parts).read()


class _Reader:
    def __init__(self, script: Script, loop: Loop, parts: Parts) -> None:
        self.script, self.loop, self.parts = script, loop, parts
        self.shape = LoopShape(loop, parts)
        self.order: list[tuple[str, ast.stmt]] = []
        """The parts of the step and what stands between them, in their order."""

    def read(self) -> LoopShape:
        shape = self.shape
        if self.loop.orelse:
            raise NotUnderstood(self.loop.orelse[0], "the loop has an else")
        for statement in self.loop.body:
            self._statement(statement, in_window=False)
        self._check_order()
        if shape.region is None:
            shape.forward = self._forward()
        elif self.parts.model not in _names(shape.region):
            raise NotUnderstood(shape.region, f"the region does not hold the forward pass of {self.parts.model}")
        self._check_window()
        self._check_jumps()
        return shape

    def _statement(self, statement: ast.stmt, in_window: bool) -> None:
        if isinstance(statement, ast.With) and self.parts.is_region(statement):
            if self.shape.region is not None or in_window:
                raise NotUnderstood(statement, "a second region")
            self.shape.region = statement
            self.order.append(("region", statement))
            for inner in statement.body:
                if not self._is_division(inner):
                    self._neutral(inner)
        elif isinstance(statement, ast.If) and self._ends_window(statement):
            self.shape.window = statement
            for inner in statement.body:
                self._statement(inner, in_window=True)
        elif (part := self._part(statement)) is not None:
            self.order.append((part, statement))
        elif not self._is_division(statement):
            self._neutral(statement)
            self.order.append(("model" if self.parts.model in _names(statement) else "other", statement))
            if in_window:
                self.shape.left_in_window.append(statement)

    # The parts of the step.

    def _part(self, statement: ast.stmt) -> str | None:
        """The part of the step that ``statement`` is, None for anything else."""
        parts, call = self.parts, _call_of(statement)
        if call is None:
            return None
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
            self._backward(statement, call)
            return "backward"
        part = None
        if called_on(call, (parts.optimizer, parts.model), "zero_grad"):
            is_plain = all(keyword.arg == "set_to_none" and is_true(keyword.value) for keyword in call.keywords)
            if call.args or not is_plain:
                raise NotUnderstood(statement, "zero_grad with an argument other than set_to_none=True")
            part = "zero_grad"
        elif called_on(call, (parts.scaler,), "unscale_") and name_of(call.args) == parts.optimizer:
            part = "unscale_"
        elif self.script.names.qualified(call.func) == "torch.nn.utils.clip_grad_norm_":
            self._clip(statement, call)
            part = "clip"
        elif called_on(call, (parts.scaler or parts.optimizer,), "step") and self._steps_alone(call):
            part = "step"
        elif called_on(call, (parts.scaler,), "update") and not call.args:
            part = "update"
        elif called_on(call, (parts.scheduler,), "step") and not call.args:
            part = "schedule"
        if part is not None:
            if not isinstance(statement, ast.Expr):
                raise NotUnderstood(statement, f"the result of {part} is kept")
            self.shape.removed.append(statement)
        return part

    def _steps_alone(self, call: ast.Call) -> bool:
        """Whether the optimizer steps without a closure."""
        wanted = [self.parts.optimizer] if self.parts.scaler else []
        return [ast.unparse(arg) for arg in call.args] == wanted and not call.keywords

    def _backward(self, statement: ast.stmt, call: ast.Call) -> None:
        assert isinstance(call.func, ast.Attribute)
        if self.shape.backward is not None:
            raise NotUnderstood(statement, "a second backward pass")
        if call.args or call.keywords:
            raise NotUnderstood(statement, "backward is called with arguments")
        loss = call.func.value
        is_scaled = isinstance(loss, ast.Call) and called_on(loss, (self.parts.scaler,), "scale")
        if is_scaled:
            assert isinstance(loss, ast.Call)
            loss = loss.args[0] if len(loss.args) == 1 else loss
        if self.parts.scaler is not None and not is_scaled:
            raise NotUnderstood(statement, "the loss is not scaled, and a GradScaler is there")
        if isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Div):
            self._divide(statement, loss.right)
            loss = loss.left
        if not isinstance(loss, ast.Name):
            raise NotUnderstood(statement, "the loss has no name")
        self.shape.backward, self.shape.loss = statement, loss.id

    def _is_division(self, statement: ast.stmt) -> bool:
        """``loss = loss / N`` and ``loss /= N``, before the backward pass."""
        if self.shape.backward is not None:
            return False
        target: ast.expr
        if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Div):
            target, divisor = statement.target, statement.value
        elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp):
            target, divisor = statement.targets[0], statement.value.right
            is_same = isinstance(target, ast.Name) and ast.unparse(target) == ast.unparse(statement.value.left)
            if not is_same or not isinstance(statement.value.op, ast.Div) or len(statement.targets) != 1:
                return False
        else:
            return False
        if not isinstance(target, ast.Name) or target.id != self._coming_loss():
            return False
        self._divide(statement, divisor)
        self.shape.removed.append(statement)
        later = [node for node in self._uses(target.id) if node.lineno > statement.lineno]
        if len(later) > 1:
            raise NotUnderstood(later[1], f"{target.id} is read after it was divided")
        return True

    def _coming_loss(self) -> str:
        """The name that the backward pass will take."""
        for node in ast.walk(self.loop):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
                names = [name.id for name in ast.walk(node) if isinstance(name, ast.Name)]
                return next((name for name in names if name != self.parts.scaler), "")
        return ""

    def _uses(self, name: str) -> list[ast.Name]:
        nodes = [node for node in ast.walk(self.parts.scope) if isinstance(node, ast.Name) and node.id == name]
        return sorted((n for n in nodes if isinstance(n.ctx, ast.Load)), key=lambda n: (n.lineno, n.col_offset))

    def _divide(self, statement: ast.stmt, divisor: ast.expr) -> None:
        if self.shape.divided_by is not None:
            raise NotUnderstood(statement, "the loss is divided twice")
        self.shape.divided_by = ast.unparse(divisor)

    def _clip(self, statement: ast.stmt, call: ast.Call) -> None:
        parameters = ast.unparse(call.args[0]) if call.args else ""
        max_norm = call.args[1] if len(call.args) == 2 else None
        for keyword in call.keywords:
            if keyword.arg != "max_norm" or max_norm is not None:
                raise NotUnderstood(statement, f"clip_grad_norm_ with {keyword.arg}")
            max_norm = keyword.value
        if parameters != f"{self.parts.model}.parameters()" or max_norm is None:
            raise NotUnderstood(statement, f"it does not clip {self.parts.model}.parameters() to one norm")
        self.parts.check_known_early(max_norm)
        self.shape.max_norm = ast.unparse(max_norm)

    # The window.

    def _ends_window(self, statement: ast.If) -> bool:
        """Whether ``statement`` ends an accumulation window; if so, its N is noted."""
        if self.shape.backward is None or not any(_is_step(node) for node in ast.walk(statement)):
            return False
        if statement.orelse or self.shape.window is not None:
            raise NotUnderstood(statement, "the step is taken under a condition that is no window's end")
        test, counter = statement.test, _counter(self.loop)
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) and len(test.values) == 2:
            if counter is None or not counter.is_last(test.values[1]):
                raise NotUnderstood(test, "the step is taken under a condition that is no window's end")
            self.shape.ends_short, test = True, test.values[0]
        num = None if counter is None else counter.num_micro_batches(test)
        if num is None:
            raise NotUnderstood(test, "the step is taken under a condition that is no window's end")
        self.parts.check_known_early(num)
        self.shape.accumulate = ast.unparse(num)
        return True

    def _check_window(self) -> None:
        shape = self.shape
        assert shape.backward is not None
        if shape.divided_by != shape.accumulate:
            what = f"divided by {shape.divided_by}" if shape.divided_by else "not divided"
            window = f"a window has {shape.accumulate} micro-batches" if shape.accumulate else "there is no window"
            raise NotUnderstood(shape.backward, f"the loss is {what}, and {window}")
        if shape.window is not None and shape.left_in_window and "report" in _names(self.parts.scope):
            raise NotUnderstood(shape.window, "the name report is taken")

    # What surrounds them.

    def _neutral(self, statement: ast.AST) -> None:
        """Raise unless ``statement`` has no part in the step."""
        parts = self.parts
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and node.attr in ("backward", "unscale_", "clip_grad_norm_", "no_sync"):
                raise NotUnderstood(node, f"{node.attr} stands where it is not understood")
            if isinstance(node, ast.Name) and node.id in {parts.optimizer, parts.scaler, parts.scheduler} - {None}:
                reads = parts.script.parents.get(node)
                allowed = ("param_groups", "state_dict", "get_last_lr")
                if not (isinstance(reads, ast.Attribute) and reads.attr in allowed):
                    raise NotUnderstood(node, f"{node.id} is used where it is not understood")
            if isinstance(node, ast.Name) and node.id == parts.model and isinstance(node.ctx, ast.Store):
                raise NotUnderstood(node, f"{node.id} is another model in each iteration")

    def _forward(self) -> list[ast.stmt]:
        """The statements from the first use of the model to the last that binds the loss."""
        shape, body = self.shape, self.loop.body
        uses = [i for i, s in enumerate(body) if self.parts.model in _called(s)]
        binds = [i for i, s in enumerate(body) if s is not shape.backward and shape.loss in _bound(s)]
        end = body.index(shape.backward) if shape.backward in body else 0
        uses, binds = [i for i in uses if i < end], [i for i in binds if i < end]
        if not uses or not binds:
            raise NotUnderstood(self.loop, f"no forward pass of {self.parts.model} that gives {shape.loss}")
        return body[min(uses[0], binds[0]) : binds[-1] + 1]

    def _check_order(self) -> None:
        shape, order = self.shape, [part for part, _ in self.order]
        if shape.backward is None:
            raise NotUnderstood(self.loop, "no backward pass in its own lines")
        step = [part for part in order if part in STEP]
        needed = {"step", "update"} if self.parts.scaler else {"step"}
        if missing := needed - set(step):
            raise NotUnderstood(self.loop, f"no {' and no '.join(sorted(missing))} in its own lines")
        if step != [part for part in STEP if part in step] or order.index("backward") > order.index(step[0]):
            raise NotUnderstood(self.loop, f"the order {', '.join(part for part in order if part in ORDERED)}")
        if self.parts.scaler and "clip" in step and "unscale_" not in step:
            raise NotUnderstood(self.loop, "gradients are clipped while they carry the scale")
        if "zero_grad" not in order:
            raise NotUnderstood(self.loop, "gradients are never cleared")
        for part, statement in self.order[order.index("backward") : order.index("step")]:
            if part in ("zero_grad", "model"):
                raise NotUnderstood(statement, "it may change the gradients between backward and step")
        outside = [s for s in shape.removed if s in self.loop.body and _call_of(s) is not None]
        if shape.window is not None and outside:
            raise NotUnderstood(outside[0], "it is done in each micro-batch, and not at the window's end")

    def _check_jumps(self) -> None:
        """A jump out of the iteration is fine before the forward pass and after the step, and not with windows."""
        jumps = [node for node in ast.walk(self.loop) if isinstance(node, ast.Continue | ast.Break | ast.Return)]
        first = self.shape.region or self.shape.forward[0]
        last = max(self.shape.removed, key=lambda s: s.lineno)
        for jump in jumps:
            if self.shape.window is not None or first.lineno < jump.lineno < last.lineno:
                raise NotUnderstood(jump, "it leaves the iteration before its step is done")


@dataclass(frozen=True)
class _Counter:
    """The index of ``for index, batch in enumerate(batches, start)``."""

    index: str
    start: int
    batches: str

    def num_micro_batches(self, test: ast.expr) -> ast.expr | None:
        """N of ``(index + 1) % N == 0`` and its like."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            counted, ends_at = test.operand, "0"
        elif isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq) and len(test.ops) == 1:
            counted, ends_at = test.left, ast.unparse(test.comparators[0])
        else:
            return None
        if not isinstance(counted, ast.BinOp) or not isinstance(counted.op, ast.Mod):
            return None
        begin, num = ast.unparse(counted.left), counted.right
        if ends_at == "0":
            return num if begin in self._one_based else None
        is_zero_based = self.start == 0 and begin == self.index
        return num if is_zero_based and ends_at == f"{ast.unparse(num)} - 1" else None

    def is_last(self, test: ast.expr) -> bool:
        """Whether ``test`` is ``index + 1 == len(batches)``, or its like."""
        num = f"len({self.batches})"
        known = [f"{begin} == {num}" for begin in self._one_based]
        return ast.unparse(test) in [*known, *([f"{self.index} == {num} - 1"] if self.start == 0 else [])]

    @property
    def _one_based(self) -> tuple[str, ...]:
        return (self.index,) if self.start == 1 else (f"{self.index} + 1", f"1 + {self.index}")


def _counter(loop: Loop) -> _Counter | None:
    if isinstance(loop, ast.While) or not isinstance(loop.iter, ast.Call) or not isinstance(loop.target, ast.Tuple):
        return None
    starts = [*loop.iter.args[1:], *(keyword.value for keyword in loop.iter.keywords)]
    start = {"": 0, "0": 0, "1": 1}.get(" ".join(map(ast.unparse, starts)))
    is_enumerate = ast.unparse(loop.iter.func) == "enumerate" and bool(loop.iter.args)
    if not is_enumerate or start is None or not isinstance(loop.target.elts[0], ast.Name):
        return None
    return _Counter(loop.target.elts[0].id, start, ast.unparse(loop.iter.args[0]))


def _call_of(statement: ast.stmt) -> ast.Call | None:
    value = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
    return value if isinstance(value, ast.Call) else None


def _is_step(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step"


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _called(node: ast.AST) -> set[str]:
    """The names that are called or handed to a call."""
    calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return {name for call in calls for part in (call.func, *call.args) for name in _names(part)}


def _bound(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
