"""Which optimizers need a closure; and a step that is given one: how often it evaluates, what it undoes on failure."""

from __future__ import annotations

import copy

import pytest
import torch
from reference.closure_net import sgd
from reference.loop import assert_same
from torch import nn

from halfstep.closure import NonFiniteEvaluation, needs_closure, step_by_closure

pytestmark = pytest.mark.usefixtures("kernels_stay")


def test_which_optimizers_need_a_closure():
    p = [nn.Parameter(torch.ones(1))]
    assert needs_closure(torch.optim.LBFGS(p))
    assert needs_closure(sgd(p))
    for plain in (torch.optim.SGD(p), torch.optim.AdamW(p, fused=True), torch.optim.Adagrad(p)):
        assert not needs_closure(plain)


class Scripted(torch.optim.Optimizer):
    """A step that is what a test wants of it, on one parameter whose gradient is there."""

    def __init__(self, script):
        parameter = nn.Parameter(torch.ones(2))
        super().__init__([parameter], {"lr": 0.1})
        self.parameter, self.script = parameter, script
        self.inner = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
        parameter.grad = torch.full((2,), 0.5)

    @torch.no_grad()
    def step(self, closure):
        return self.script(self, closure)


def evaluations(script):
    """How often a step with this script evaluates, and what it was given."""
    optimizer, given, num = Scripted(lambda o, closure: script(o, lambda: given.append(closure()))), [], []

    def evaluate():
        assert torch.is_grad_enabled()
        num.append(1)
        optimizer.parameter.grad = torch.full((2,), 0.25)
        return torch.tensor(2.0)

    assert step_by_closure(optimizer, torch.tensor(1.0), evaluate) is None
    assert [value.item() for value in given] == [1.0] * (len(given) - len(num)) + [2.0] * len(num)
    return len(num)


def test_what_is_there_already_is_given_once():
    assert evaluations(lambda o, closure: closure()) == 0
    assert evaluations(lambda o, closure: (closure(), closure())) == 1


def test_an_evaluation_is_due_after_anything_was_changed():
    assert evaluations(lambda o, closure: (o.parameter.grad.mul_(0.5), closure())) == 1
    assert evaluations(lambda o, closure: (o.parameter.add_(1.0), closure())) == 1
    assert evaluations(lambda o, closure: (o.parameter.data.add_(1.0), closure())) == 1  # no version counts it
    assert evaluations(lambda o, closure: (setattr(o.parameter, "grad", None), closure())) == 1


def test_what_a_step_did_before_an_evaluation_that_failed_is_undone():
    """Weights, its own state and settings, and those of an optimizer inside it."""

    def script(optimizer, closure):
        optimizer.inner.step()
        optimizer.state[optimizer.parameter]["steps"].add_(1)
        optimizer.state[optimizer.parameter]["more"] = 1
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.inner.param_groups[0]["lr"] = 3.0
        closure()

    def evaluate():
        raise failure

    failure, optimizer = NonFiniteEvaluation("why"), Scripted(script)
    optimizer.inner.step()
    optimizer.state[optimizer.parameter]["steps"] = torch.zeros(())
    before = copy.deepcopy([optimizer.state_dict(), optimizer.inner.state_dict(), optimizer.parameter.detach()])
    assert step_by_closure(optimizer, torch.tensor(1.0), evaluate) is failure
    assert_same([optimizer.state_dict(), optimizer.inner.state_dict(), optimizer.parameter.detach()], before)
