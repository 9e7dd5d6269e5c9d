"""What a parameter must be is told by its use and its annotation, never by its name alone."""

import ast

import pytest

from halfstep.lint.names import Names
from halfstep.lint.parameters import assumed
from halfstep.lint.relevance import Relevance
from halfstep.lint.values import Object, Tensor


def kind(source, parameter):
    """The kind that the last function's parameter is taken for; None when its use does not tell."""
    tree = ast.parse(source)
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    (arg,) = [arg for arg in function.args.args if arg.arg == parameter]
    uses = Relevance(tree, source.splitlines()).uses(function).get(parameter, set())
    value = assumed(parameter, uses, arg.annotation, Names(tree), arg, (1, 1))
    if isinstance(value, Tensor):
        return "tensor"
    return value.kind if isinstance(value, Object) else None


@pytest.mark.parametrize(
    ("use", "parameter", "expected"),
    [
        ("s.scale(loss).backward(); s.update()", "s", "scaler"),
        ("s.unscale_(o)", "s", "scaler"),
        ("scaler.scale(x)", "scaler", "scaler"),
        ("scaler.step(o); scaler.update()", "scaler", "scaler"),
        ("scaler.fit(x); scaler.transform(x)", "scaler", None),
        ("pass", "scaler", None),
        ("scaler.step(o)", "o", "optimizer"),
        ("env.step(o)", "o", None),
        ("optimizer.step()", "optimizer", "optimizer"),
        ("opt_g.zero_grad()", "opt_g", "optimizer"),
        ("options.step()", "options", None),
        ("adopt.step()", "adopt", None),
        ("lr_sched.step()", "lr_sched", "scheduler"),
        ("model(x)", "model", "module"),
        ("net.train()", "net", "module"),
        ("model_name.lower()", "model_name", None),
        ("f(x); f.parameters()", "f", "module"),
    ],
)
def test_use_tells(use, parameter, expected):
    assert kind(f"def run({parameter}, x, **rest):\n    {use}", parameter) == expected


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        ("torch.Tensor", "tensor"),
        ("'torch.Tensor'", "tensor"),
        ("nn.Module", "module"),
        ("torch.amp.GradScaler | None", "scaler"),
        ("Optional[torch.optim.Optimizer]", "optimizer"),
        ("torch.optim.lr_scheduler.LRScheduler", "scheduler"),
        ("'not python ('", None),
        ("str", None),
        ("Accelerator", "accelerator"),
    ],
)
def test_annotation_tells(annotation, expected):
    head = "import torch\nfrom torch import nn\nfrom typing import Optional\nfrom accelerate import Accelerator\n"
    assert kind(f"{head}def run(thing: {annotation}):\n    pass", "thing") == expected


def test_an_annotation_counts_more_than_a_name():
    assert kind("import torch\ndef run(model: torch.Tensor):\n    model(x)", "model") == "tensor"
