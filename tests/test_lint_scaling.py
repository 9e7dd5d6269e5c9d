"""Whether a scaler is on, and how code at some place can call it."""

import ast
import textwrap

import pytest

from halfstep.lint.scaling import calls_state, has_scaler, is_on, spelled
from halfstep.lint.script import Script

TRAIN = """
def step(loss, opt, {scaler}):
    {scaler}.scale(loss).backward()
    {scaler}.step(opt)
    {scaler}.update()
"""


def script_of(text):
    return Script(textwrap.dedent(text), "x.py")


@pytest.mark.parametrize(
    ("call", "on"),
    [
        ("torch.amp.GradScaler('cuda')", True),
        ("torch.amp.GradScaler('cuda', enabled=True)", True),
        ("torch.amp.GradScaler('cuda', enabled=False)", False),
        ("torch.amp.GradScaler('cuda', enabled=use_amp)", False),
        ("torch.amp.GradScaler('cuda', 1024.0, 2.0, 0.5, 100, False)", False),
        ("torch.cuda.amp.GradScaler(1024.0, 2.0, 0.5, 100, False)", False),
        ("torch.cuda.amp.GradScaler(1024.0, 2.0, 0.5, 100)", True),
        ("torch.amp.GradScaler(**settings)", False),
    ],
)
def test_only_a_scaler_that_is_surely_on_is_on(call, on):
    script = script_of(f"import torch\nfrom settings import settings, use_amp\nscaler = {call}\n")
    (made,) = [event.result for event in script.sites if event.what == "make"]
    assert is_on(made) is on


def test_a_scaler_as_a_parameter_is_not_known_to_be_on():
    script = script_of(TRAIN.format(scaler="scaler"))
    assert not any(is_on(event.receiver) for event in script.sites)


def test_a_run_has_a_scaler_when_it_makes_or_takes_or_uses_one():
    script = script_of("""
    import torch

    class Job:
        def __init__(self, net):
            self.opt = torch.optim.SGD(net.parameters(), lr=0.1)
            self.scaler = torch.amp.GradScaler("cuda")

        def save(self):
            torch.save({"opt": self.opt.state_dict()}, "a.pt")

        def step(self, loss):
            self.scaler.scale(loss).backward()

    def export(opt):
        torch.save({"opt": opt.state_dict()}, "b.pt")

    def write(opt, grad_scaler):
        torch.save({"opt": opt.state_dict()}, "c.pt")
    """)
    found = {
        event.node.lineno: has_scaler(script, path, event)
        for path in script.paths
        for event in path
        if event.what == "save"
    }
    assert found == {10: True, 16: False, 19: True}


@pytest.mark.parametrize(
    ("line", "calls"),
    [
        ("scaler.state_dict()", True),
        ("self.amp_scaler.state_dict()", True),
        ("getattr(self, name).state_dict()", True),  # it may be the scaler's
        ("parts['x'].state_dict()", True),
        ("net.state_dict()", False),
        ("helper.state_dict()", False),
    ],
)
def test_calls_of_state_dict(line, calls):
    text = TRAIN.format(scaler="scaler") + f"\n\ndef save(self, name, net, scaler, parts, helper):\n    return {line}\n"
    assert calls_state(script_of(text), "state_dict") is calls


def test_spelling_is_only_given_where_the_name_reaches():
    script = script_of("""
    import torch

    class Job:
        def __init__(self, net):
            self.gs = torch.amp.GradScaler("cuda")

        def step(self, loss):
            self.gs.scale(loss).backward()

        def save(self):
            here = 1

    def train(loss, opt):
        mine = torch.amp.GradScaler("cuda")
        mine.scale(loss).backward()
        def inside():
            here = 2
        inside()

    def elsewhere():
        here = 3

    def taken(grad_scaler):
        here = 4
    """)
    spellings = {
        node.value.value: spelled(script, node)
        for node in script.walk(ast.Assign)
        if ast.unparse(node.targets[0]) == "here"
    }
    assert spellings == {1: "self.gs", 2: "mine", 3: None, 4: "grad_scaler"}
