"""What a training loop trains: the model, its optimizer, scaler and scheduler, and the policy of its region."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from halfstep.lint.names import last_name
from halfstep.lint.script import Script

Loop = ast.For | ast.AsyncFor | ast.While
REGIONS = {"torch.amp.autocast": None, "torch.cuda.amp.autocast": "cuda", "torch.cpu.amp.autocast": "cpu"}
SCALERS = ("torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.cpu.amp.GradScaler")
FORWARD = "stepper.forward()"
OTHER_ENGINES = (
    "accelerate",
    "deepspeed",
    "lightning",
    "pytorch_lightning",
    "apex",
    "horovod",
    "fairscale",
    "torch_xla",
)
OUTSIDE_INFLUENCE = {
    "grad": "gradients are read or changed",
    "register_hook": "gradients have hooks",
    "register_full_backward_hook": "gradients have hooks",
    "register_post_accumulate_grad_hook": "gradients have hooks",
    "allow_tf32": "TF32 is switched by hand",
    "set_float32_matmul_precision": "TF32 is switched by hand",
    "set_default_dtype": "the default dtype is changed",
    "DataParallel": "the model is run by DataParallel",
    "set_autocast_enabled": "autocast is switched by hand",
    "set_autocast_dtype": "autocast is switched by hand",
    "set_autocast_gpu_dtype": "autocast is switched by hand",
    "set_autocast_cpu_enabled": "autocast is switched by hand",
    "compile": "something is compiled",
    "distributed": "torch.distributed has a part in the step",
}

PARAMETERS = re.compile(
    r"(?P<model>\w+)\.parameters\(\)"
    r"|filter\(lambda (?P<a>\w+): (?P=a)\.requires_grad, (?P<filtered>\w+)\.parameters\(\)\)"
    r"|[\[(](?P<b>\w+) for (?P=b) in (?P<chosen>\w+)\.parameters\(\) if (?P=b)\.requires_grad[\])]"
)
"""All trainable parameters of a model, as ``ast.unparse`` writes it."""
OTHER_FORMATS = ("torch.float16", "torch.bfloat16", "torch.float64")


class NotUnderstood(Exception):
    """A loop stays as it is: the node that has no known meaning in the step, and why."""

    def __init__(self, node: ast.AST, why: str) -> None:
        super().__init__(why)
        self.node, self.why = node, why


@dataclass
class Parts:
    """The names of a loop's objects, each made once in ``scope``, the loop's function or module; None for none.

    definitions: the statement that makes each of optimizer, scaler and scheduler.
    """

    script: Script
    scope: ast.AST
    loop: Loop
    optimizer: str
    model: str = ""
    scaler: str | None = None
    scheduler: str | None = None
    definitions: dict[str, ast.Assign] = field(default_factory=dict)

    @property
    def creation(self) -> ast.Assign:
        """The last statement that the Stepper needs; it is made there."""
        return max(self.definitions.values(), key=lambda statement: statement.lineno)

    def check_known_early(self, value: ast.expr) -> None:
        """Raise unless ``value`` is a number, or a name that has its value when the Stepper is made."""
        for node in ast.walk(value):
            if not isinstance(node, ast.Constant | ast.Name | ast.Attribute | ast.expr_context):
                raise NotUnderstood(value, f"{ast.unparse(value)} is computed in the loop")
            if isinstance(node, ast.Name):
                late = [s for s in stores(self.scope, node.id) if s.lineno >= self.creation.lineno]
                if late:
                    raise NotUnderstood(late[0], f"{node.id} may change while the loop runs")

    def is_region(self, statement: ast.With) -> bool:
        """Whether ``statement`` opens autocast, or the Stepper's region, which stands where a loop had none."""
        qualified = self.script.names.qualified
        return is_wrapped(statement) or any(qualified(_function(i.context_expr)) in REGIONS for i in statement.items)


def is_wrapped(region: ast.With) -> bool:
    """Whether the region is the Stepper's already."""
    return ast.unparse(region.items[0]) == FORWARD


def find_parts(script: Script, loop: Loop) -> Parts:
    """The objects of ``loop``. Raises :class:`NotUnderstood`."""
    _refuse_influence(script)
    scope = next(
        n for n in script.ancestors(loop) if isinstance(n, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef)
    )
    for around in script.ancestors(loop):
        entered = [item.context_expr for item in around.items] if isinstance(around, ast.With) else []
        for context in (*entered, *getattr(around, "decorator_list", ())):
            if (script.names.qualified(_function(context)) or "").startswith("torch."):
                raise NotUnderstood(context, "the whole loop runs in it")
    parts = Parts(script, scope, loop, "")
    for node in ast.walk(loop):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step"):
            continue
        receiver = node.func.value
        if not isinstance(receiver, ast.Name):
            raise NotUnderstood(node, f"{ast.unparse(receiver)} is not made in the function of the loop")
        definition = _definition(parts, receiver.id, node)
        assert isinstance(definition.value, ast.Call)
        made = script.names.qualified(definition.value.func) or ""
        if made in SCALERS and len(node.args) == 1 and isinstance(node.args[0], ast.Name):
            parts.scaler = receiver.id
            parts.definitions["scaler"] = definition
            _take_optimizer(parts, node.args[0].id, node)
        elif made.startswith("torch.optim.lr_scheduler.") and not made.endswith("ReduceLROnPlateau"):
            if parts.scheduler not in (None, receiver.id):
                raise NotUnderstood(node, "two schedulers")
            parts.scheduler = receiver.id
            parts.definitions["scheduler"] = definition
        elif made.startswith("torch.optim."):
            _take_optimizer(parts, receiver.id, node)
        else:
            raise NotUnderstood(node, f"{receiver.id}.step() is no step of a torch optimizer or scheduler")
    if not parts.optimizer:
        raise NotUnderstood(loop, "no optimizer step in the loop of the backward pass")
    parts.model = _model_of(parts)
    _check_scheduler(parts)
    _check_model(parts)
    _check_uses(parts)
    return parts


def _refuse_influence(script: Script) -> None:
    for engine in OTHER_ENGINES:
        if script.names.imports(engine):
            raise NotUnderstood(script.tree, f"{engine} has a part in the step")
    for node in script.walk(ast.Attribute, ast.Name):
        name = last_name(node)
        is_meant = isinstance(node, ast.Attribute) or name == "DataParallel"
        if name == "compile":
            is_meant &= script.names.qualified(node) in (None, "torch.compile")
        if is_meant and name in OUTSIDE_INFLUENCE:
            raise NotUnderstood(node, OUTSIDE_INFLUENCE[name])


def _definition(parts: Parts, name: str, use: ast.AST) -> ast.Assign:
    """The one statement that makes ``name``, in a block around the loop and before it."""
    bound = stores(parts.scope, name)
    if not bound:
        raise NotUnderstood(use, f"{name} is not made in the function of the loop")
    if len(bound) > 1:
        raise NotUnderstood(bound[1], f"{name} is bound more than once")
    statement = parts.script.parents[bound[0]]
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call) or len(statement.targets) > 1:
        raise NotUnderstood(bound[0], f"{name} is not made by a call")
    chain = [parts.loop, *parts.script.ancestors(parts.loop)]
    owner = parts.script.parents[statement]
    inner = chain[chain.index(owner) - 1] if owner in chain else None
    if inner is None or isinstance(owner, Loop) or not _comes_before(owner, statement, inner):
        raise NotUnderstood(statement, f"{name} is not made once before the loop")
    return statement


def _comes_before(owner: ast.AST, first: ast.stmt, second: ast.AST) -> bool:
    blocks = [block for _, block in ast.iter_fields(owner) if isinstance(block, list)]
    return any(first in block and second in block and block.index(first) < block.index(second) for block in blocks)


def _take_optimizer(parts: Parts, name: str, use: ast.AST) -> None:
    if parts.optimizer not in ("", name):
        raise NotUnderstood(use, "two optimizers")
    definition = _definition(parts, name, use)
    assert isinstance(definition.value, ast.Call)
    made = parts.script.names.qualified(definition.value.func) or ""
    if not made.startswith("torch.optim.") or made.endswith(("LBFGS", "SparseAdam")):
        raise NotUnderstood(definition, f"{name} is not an optimizer of torch that takes one gradient a step")
    parts.optimizer = name
    parts.definitions["optimizer"] = definition


def _model_of(parts: Parts) -> str:
    call = parts.definitions["optimizer"].value
    assert isinstance(call, ast.Call)
    given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "params")]
    match = PARAMETERS.fullmatch(ast.unparse(given[0])) if given else None
    if match is None:
        raise NotUnderstood(parts.definitions["optimizer"], "the optimizer does not hold all parameters of one model")
    return match["model"] or match["filtered"] or match["chosen"]


def _check_scheduler(parts: Parts) -> None:
    definition = parts.definitions.get("scheduler")
    if definition is not None:
        assert isinstance(definition.value, ast.Call)
        if name_of(definition.value.args[:1]) != parts.optimizer:
            raise NotUnderstood(definition, f"the scheduler is not one of {parts.optimizer}")


def _check_model(parts: Parts) -> None:
    """The model is complete, in fp32 and on its device when the Stepper is made."""
    optimizer = parts.definitions["optimizer"]
    for store in stores(parts.scope, parts.model):
        if store.lineno > optimizer.lineno:
            raise NotUnderstood(store, f"{parts.model} is bound anew after the optimizer was made")
        for node in ast.walk(parts.script.statement(store)):
            is_cast = isinstance(node, ast.Attribute) and node.attr in ("half", "bfloat16", "double")
            if is_cast or parts.script.names.qualified(node) in OTHER_FORMATS:
                raise NotUnderstood(node, f"{parts.model} is not in fp32")
    for node in ast.walk(parts.script.tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if parts.model not in {n.id for n in ast.walk(node.func) if isinstance(n, ast.Name)}:
            continue
        if node.func.attr in ("half", "bfloat16", "double"):
            raise NotUnderstood(node, f"{parts.model} is not in fp32")
        if node.func.attr in ("to", "cuda", "cpu") and name_of([node.func.value]) and node.lineno > optimizer.lineno:
            raise NotUnderstood(node, f"{parts.model} is moved after the optimizer was made")


def _check_uses(parts: Parts) -> None:
    """Nothing outside the loop steps the optimizer or uses the scaler, but to save and to load its state."""
    script, inside = parts.script, set(ast.walk(parts.loop))
    names = {parts.optimizer, parts.scaler, "stepper"} - {None}
    for node in ast.walk(parts.scope):
        if (
            not isinstance(node, ast.Name)
            or node.id not in names
            or node in inside
            or not isinstance(node.ctx, ast.Load)
        ):
            continue
        attribute = script.parents[node]
        used = attribute.attr if isinstance(attribute, ast.Attribute) else ""
        if node.id == "stepper" or (node.id == parts.optimizer and used == "step"):
            raise NotUnderstood(node, f"{node.id} is used elsewhere")
        if node.id == parts.scaler:
            is_early = used == "load_state_dict" and node.lineno < parts.creation.lineno
            if used not in ("state_dict", "load_state_dict") or is_early or _function_of(script, node) != parts.scope:
                raise NotUnderstood(node, f"{node.id} is used elsewhere")


def _function_of(script: Script, node: ast.AST) -> ast.AST:
    kinds = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    return next(around for around in script.ancestors(node) if isinstance(around, kinds))


# Nodes.


def stores(scope: ast.AST, name: str) -> list[ast.Name]:
    """Where ``name`` is bound in ``scope``, by lines."""
    found = [n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name and not isinstance(n.ctx, ast.Load)]
    return sorted(found, key=lambda n: n.lineno)


def called_on(call: ast.Call | None, receivers: tuple[str | None, ...], method: str) -> bool:
    """Whether ``call`` is ``receiver.method(...)``."""
    function = call.func if call is not None else None
    if not isinstance(function, ast.Attribute) or function.attr != method or not isinstance(function.value, ast.Name):
        return False
    return function.value.id in receivers


def name_of(nodes: list[ast.expr]) -> str | None:
    """The name that the one node is, None for anything else."""
    return nodes[0].id if len(nodes) == 1 and isinstance(nodes[0], ast.Name) else None


def _function(node: ast.expr) -> ast.AST:
    return node.func if isinstance(node, ast.Call) else node


def is_true(node: ast.expr) -> bool:
    """Whether it is the constant True."""
    return isinstance(node, ast.Constant) and node.value is True
