"""What a parameter must be, from how its function uses it, where no caller says so."""

from __future__ import annotations

import ast
import re

from halfstep.lint import vocabulary
from halfstep.lint.names import Names
from halfstep.lint.values import Ident, Object, Tensor, Unknown, Value

_SCALER = re.compile(r"scaler", re.I)
_OPTIMIZER = re.compile(r"(^|_)(opt|optim|optimi[sz]er)s?(_|\d|$)", re.I)
SCHEDULER = re.compile(r"sched", re.I)
MODULE = re.compile(
    r"(^|_)(model|net|network|module|encoder|decoder|generator|discriminator|critic|actor|policy|backbone|student|"
    r"teacher|unet|vae|transformer|classifier)s?(_|\d|$)",
    re.I,
)
_STEPS = {"step", "zero_grad", "state_dict", "load_state_dict", "param_groups", "in step"}
_TRAINS = {"parameters", "named_parameters", "train", "eval", "state_dict", "load_state_dict", "zero_grad", "()"}


def assumed(
    name: str, uses: set[str], annotation: ast.expr | None, names: Names, node: ast.AST, ident: Ident
) -> Value | None:
    """The object that parameter ``name`` stands for; None when its use does not tell.

    uses: the attributes read of it. An annotation counts more than a name, and a name alone counts nothing.
    """
    if isinstance(annotation, ast.Name) and annotation.id in {"int", "float"}:
        return Unknown(name, is_number=True)
    kind = _annotated(annotation, names)
    if kind == "tensor":
        return Tensor(node=node)
    if not kind:
        if (
            "unscale_" in uses
            or {"scale", "update"} <= uses
            or (_SCALER.search(name) and uses & {"scale", "unscale_", "get_scale"})
        ) or (_SCALER.search(name) and {"step", "update"} <= uses):
            kind = "scaler"
        elif "in step" in uses or (_OPTIMIZER.search(name) and uses & _STEPS):
            kind = "optimizer"
        elif SCHEDULER.search(name) and "step" in uses:
            kind = "scheduler"
        elif (MODULE.search(name) and uses & _TRAINS) or {"parameters", "()"} <= uses:
            kind = "module"
        else:
            return None
    return Object(kind, "", ident, node)


def _annotated(annotation: ast.expr | None, names: Names) -> str:
    if annotation is None:
        return ""
    if isinstance(annotation, ast.BinOp):  # GradScaler | None
        return _annotated(annotation.left, names) or _annotated(annotation.right, names)
    if isinstance(annotation, ast.Subscript) and getattr(annotation.value, "id", "") == "Optional":
        return _annotated(annotation.slice, names)
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            annotation = ast.parse(annotation.value, mode="eval").body
        except SyntaxError:
            return ""
    qualified = names.qualified(annotation) or ""
    if qualified in {"torch.Tensor", "torch.FloatTensor", "torch.LongTensor"}:
        return "tensor"
    if qualified in {"torch.nn.Module", "torch.nn.modules.Module"}:
        return "module"
    if qualified.startswith("torch.optim") and qualified.endswith("LRScheduler"):
        return "scheduler"
    kind = vocabulary.kind_of(qualified)
    return kind if kind in {"scaler", "optimizer", "scheduler", "accelerator", "fabric"} else ""
