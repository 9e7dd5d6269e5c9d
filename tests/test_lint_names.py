"""Names mean library objects through imports, aliases and scopes."""

import ast

import pytest

from halfstep.lint.names import Names, canonical


def meaning(source):
    """What the last expression of ``source`` means."""
    tree = ast.parse(source)
    names = Names(tree)
    last = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)][-1]
    return names.qualified(last.value)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ntorch.amp.GradScaler", "torch.amp.GradScaler"),
        ("import torch as th\nth.float16", "torch.float16"),
        ("import torch.cuda.amp\ntorch.cuda.amp.autocast", "torch.cuda.amp.autocast"),
        ("import torch.cuda.amp as amp\namp.autocast", "torch.cuda.amp.autocast"),
        ("from torch.cuda import amp\namp.GradScaler", "torch.cuda.amp.GradScaler"),
        ("from torch.cuda.amp import GradScaler as GS\nGS", "torch.cuda.amp.GradScaler"),
        ("from torch import autocast\nautocast", "torch.amp.autocast"),
        ("import torch\namp = torch.cuda.amp\namp.autocast", "torch.cuda.amp.autocast"),
        ("import torch\na = torch\nb = a\nb.half", "torch.float16"),
        ("from .models import Net\nNet", ".models.Net"),
        ("from . import Net\nNet", ".Net"),
        ("import pytorch_lightning as pl\npl.Trainer", "lightning.pytorch.Trainer"),
        ("import torch\ntorch = make()\ntorch.amp", "torch.amp"),
        ("torch.amp.GradScaler", None),
        ("import torch\ntorch.zeros(1).half", None),
        ("amp = 3\namp.autocast", None),
    ],
)
def test_meaning(source, expected):
    assert meaning(source) == expected


def test_a_parameter_hides_an_import():
    source = "import torch\ndef f(torch):\n    torch.float16"
    assert meaning(source) is None


def test_an_import_inside_a_function_stays_there():
    inside = "def f():\n    import torch\n    torch.float16"
    outside = "def f():\n    import torch\ntorch.float16"
    assert meaning(inside) == "torch.float16"
    assert meaning(outside) is None


def test_a_class_body_is_not_seen_from_its_methods():
    source = "class A:\n    from torch import half\n    def f(self):\n        half"
    assert meaning(source) is None


def test_an_import_survives_its_fallback():
    source = "try:\n    from torch.amp import autocast\nexcept ImportError:\n    autocast = None\nautocast"
    assert meaning(source) == "torch.amp.autocast"


def test_an_alias_of_itself_ends():
    assert meaning("a = b\nb = a\na.x") is None


def test_imports():
    names = Names(ast.parse("from peft.tuners import lora\ndef f():\n    import trl.trainer as t"))
    assert names.imports("peft")
    assert names.imports("trl")
    assert not names.imports("pef")


def test_canonical_changes_whole_parts_only():
    assert canonical("torch.autocast") == "torch.amp.autocast"
    assert canonical("torch.autocast_mode") == "torch.autocast_mode"
    assert canonical("torch.halfway") == "torch.halfway"
