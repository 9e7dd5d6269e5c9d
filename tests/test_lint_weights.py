"""Which weights an optimizer trains in 16 bit, along a path."""

import textwrap

import pytest

from halfstep.lint.script import Script
from halfstep.lint.weights import inherits_format, trained_in_16_bit

HEAD = """\
import torch
from torch import nn
net = nn.Linear(4, 4)
head = nn.Linear(4, 2)
scaler = torch.amp.GradScaler("cuda")
"""


def trained(text, head=HEAD):
    script = Script(head + textwrap.dedent(text), "x.py")
    found = [item for path in script.paths for item in trained_in_16_bit(path)]
    return [
        (item.formats, script.lines[item.cast.lineno - 1].strip(), item.step.what if item.step else None)
        for item in found
    ]


@pytest.mark.parametrize(
    "cast", ["net.half()", "net.to(torch.float16)", "net.to('cuda', torch.half)", "net.to(dtype=torch.float16)"]
)
def test_casts(cast):
    assert trained(f"{cast}\nopt = torch.optim.SGD(net.parameters(), 0.1)\nopt.step()") == [
        (frozenset({"fp16"}), cast, "optimizer.step")
    ]


@pytest.mark.parametrize(
    "text",
    [
        "opt = torch.optim.SGD(net.parameters(), 0.1)\nopt.step()",
        "net.half()\nnet.float()\nopt = torch.optim.SGD(net.parameters(), 0.1)\nopt.step()",
        "net.half().requires_grad_(False)\nopt = torch.optim.SGD(net.parameters(), 0.1)\nopt.step()",
        "net.half()\nopt = torch.optim.SGD(head.parameters(), 0.1)\nopt.step()",
        "opt = torch.optim.SGD(net.parameters(), 0.1)\nopt.step()\nnet.half()",
        "net.to(unknown())\nopt = torch.optim.SGD(net.parameters(), 0.1)\nopt.step()",
        "net.half()\nopt = torch.optim.SGD([p for p in net.parameters() if not p.requires_grad], 0.1)\nopt.step()",
    ],
)
def test_silence(text):
    assert trained(text) == []


def test_the_cast_may_come_after_the_optimizer_and_before_its_step():
    text = "opt = torch.optim.SGD(net.parameters(), 0.1)\nnet.bfloat16()\nscaler.step(opt)"
    assert trained(text) == [(frozenset({"bf16"}), "net.bfloat16()", "scaler.step")]


def test_groups_lists_and_parameters_alone():
    groups = "net.half()\nopt = torch.optim.SGD([{'params': head.parameters()}, {'params': net.parameters()}], 0.1)"
    assert trained(groups) == [(frozenset({"fp16"}), "net.half()", None)]
    alone = "w = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))\nopt = torch.optim.SGD([w], 0.1)\nopt.step()"
    ((formats, _, what),) = trained(alone)
    assert (formats, what) == ({"bf16"}, "optimizer.step")


def test_a_pretrained_model_has_the_format_it_is_asked_for():
    text = """
        from transformers import AutoModel
        model = AutoModel.from_pretrained(name, torch_dtype=torch.bfloat16)
        opt = torch.optim.AdamW(model.parameters())
        opt.step()
    """
    ((formats, _, _),) = trained(text)
    assert formats == {"bf16"}


def test_what_the_module_made_counts_in_a_function():
    text = (
        "net.half()\nopt = torch.optim.SGD(net.parameters(), 0.1)\ndef step(loss):\n    loss.backward()\n    opt.step()"
    )
    assert (frozenset({"fp16"}), "net.half()", "optimizer.step") in trained(text)


@pytest.mark.parametrize(
    ("cast", "inherits"),
    [
        ("a.to(base.weight.dtype)", True),
        ("a.to(dtype=next(base.parameters()).dtype)", True),
        ("a.to(x.dtype)", False),
        ("a.to(base.weight.device)", False),
        ("a.half()", False),
    ],
)
def test_inherits_format(cast, inherits):
    (statement,) = Script(cast, "x.py").tree.body
    assert inherits_format(statement.value) == inherits
