"""Shadows: the float64 step beside the real one, through views, writes in place, random numbers and freed memory."""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.explain.auditor import Auditor
from halfstep.explain.error import widen
from halfstep.explain.exact import run_wide
from halfstep.explain.shadow import Shadow
from halfstep.formats import FORMATS
from halfstep.policy import Policy

U = 2.0**-11
ONE_AND_A_BIT = 1.0 + 2.0**-12  # a quarter of an ulp of fp16: it rounds to 1


def shadow_after(step, *inputs):
    """The shadow of what ``step`` gives, and the result; the operations run as they come, outside of any model."""
    auditor = Auditor(nn.Identity(), Policy("fp16"))
    with auditor:
        result = step(*inputs)
    return auditor._shadow.of(result.detach()), result


def exact(values):
    return torch.tensor(values, dtype=torch.float64)


X = torch.tensor([ONE_AND_A_BIT, 2.0, 3.0, 4.0])


def test_a_cast_is_the_identity():
    shadow, result = shadow_after(lambda x: x.half() * 2, X)
    assert result.tolist() == [2, 4, 6, 8]
    assert shadow.tolist() == [2 * ONE_AND_A_BIT, 4, 6, 8]


STEPS = {
    "a view": lambda x: x.half().view(2, 2).T[0],
    "a write through a view": lambda x: _written(x.half(), lambda y: y.view(2, 2)[0].mul_(3)),
    "a write into a slice": lambda x: _written(x.half(), lambda y: y[1:3].copy_(x[:2].half())),
    "a sum in place": lambda x: _written(x.half(), lambda y: y.add_(y.flip(0))),
    "an out argument": lambda x: torch.add(x.half(), x.half(), out=torch.empty(4, dtype=torch.half)),
    "a list": lambda x: torch._foreach_mul([x.half(), x.half()], 2.0)[1],
    "a list in place": lambda x: _written(x.half(), lambda y: torch._foreach_add_([y], 1.0)),
    "a stack": lambda x: torch.stack([x.half(), x.half() * 2])[1],
    "an index": lambda x: x.half()[torch.tensor([0, 0, 3])],
    "a write by index": lambda x: _written(x.half(), lambda y: y.index_put_((torch.tensor([1]),), x[:1].half())),
    "a transposed copy": lambda x: x.half().view(2, 2).T.contiguous() + 0,
    "an expanded sum": lambda x: x.half()[:2].view(2, 1) + x.half()[None],
    "a softmax to fp32": lambda x: torch.ops.aten._softmax(x.half(), 0, False).float(),
    "a dtype of its own": lambda x: x.half().sum(dtype=torch.float32),
}


def _written(tensor, write):
    write(tensor)
    return tensor


@pytest.mark.parametrize("name", STEPS)
def test_the_shadow_is_what_the_same_step_gives_in_float64(name, monkeypatch):
    step = STEPS[name]
    shadow, result = shadow_after(step, X)
    monkeypatch.setattr(torch, "half", torch.float64)
    monkeypatch.setattr(torch.Tensor, "half", torch.Tensor.double)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.testing.assert_close(shadow, step(X).double(), rtol=1e-15, atol=0)
    assert (shadow != result.double()).any()


def test_a_kernel_that_takes_half_alone_takes_float64_in_its_plain_form():
    """CUDA's softmax from half to float."""
    func = torch.ops.aten._softmax.default
    named = {"self": X.half(), "dim": 0, "half_to_float": True}
    assert run_wide(func, named, widen).tolist() == X.half().double().softmax(0).tolist()


def test_random_numbers_are_what_they_are_and_dropout_keeps_its_mask():
    torch.default_generator.manual_seed(0)
    for dropout in (torch.dropout, lambda *args: torch.ops.aten.native_dropout(*args)[0]):
        shadow, result = shadow_after(lambda x, f=dropout: f(x.half().repeat(64), 0.5, True), X)
        kept = result != 0
        assert 0 < kept.sum() < 256
        torch.testing.assert_close(shadow, torch.where(kept, X.repeat(64).double() * 2, 0.0), rtol=1e-15, atol=0)
    shadow, result = shadow_after(lambda x: x.half().normal_(), X)
    assert shadow.tolist() == result.tolist()


def test_decisions_are_those_of_the_real_step():
    x = torch.tensor([2.5 + 2.0**-13, -1.0])  # in fp16 it is 2.5, which rounds to 2
    shadow, result = shadow_after(lambda x: x.half().round() * 2, x)
    assert shadow.tolist() == result.tolist() == [4, -2]
    gradient = torch.ones(2)
    tiny = torch.tensor([1e-9, 1.0])  # it flushes to zero in fp16: the gate is closed
    shadow, result = shadow_after(lambda x: torch.ops.aten.threshold_backward(gradient, x.half(), 0.0), tiny)
    assert shadow.tolist() == result.tolist() == [0, 1]


def test_what_a_foreign_kernel_writes_is_what_it_is():
    def step(x):
        memory = torch.empty(4)
        memory.numpy()[:] = 7.0
        return memory + x

    shadow, _ = shadow_after(step, X)
    torch.testing.assert_close(shadow, X.double() + 7, rtol=1e-15, atol=0)


def test_backward_has_shadows_as_well():
    x = torch.tensor([ONE_AND_A_BIT, 3.0], requires_grad=True)
    auditor = Auditor(nn.Identity(), Policy("fp16"))
    with auditor:
        (x.half() * x.half()).sum().float().backward()
    assert x.grad.tolist() == [2.0, 6.0]
    torch.testing.assert_close(auditor._shadow.of(x.grad), exact([2 * ONE_AND_A_BIT, 6.0]), rtol=1e-15, atol=0)


def test_a_checkpoint_computes_its_shadows_again():
    x = torch.tensor([ONE_AND_A_BIT, 3.0], requires_grad=True)
    auditor = Auditor(nn.Identity(), Policy("fp16"))
    with auditor:
        checkpoint(lambda x: (x.half() * x.half()).float(), x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(auditor._shadow.of(x.grad), exact([2 * ONE_AND_A_BIT, 6.0]), rtol=1e-15, atol=0)


def test_drift_is_counted_at_the_scale_of_the_shadow():
    shadow = Shadow(FORMATS["fp16"])
    value = torch.tensor([1.0, 4.0, 0.0, math.inf, -math.inf]).half()
    shadow.store(value, exact([1.0, 4.0 + 4.0 * 3 * U, 1e-3, -math.inf, 7.0]))
    drift = shadow.drift(value)
    assert drift.error == pytest.approx(3.0, rel=1e-2)
    assert (drift.lost, drift.lost_up, drift.zero) == (True, False, True)
    assert drift.missed == 7.0
    assert drift.scale == 4.0 + 12 * U
    assert shadow.drift(value[:1]).error == 0.0
    assert shadow.drift(torch.ones(3)).error == 0.0


def test_an_exact_zero_that_is_not_one_is_infinitely_far():
    shadow = Shadow(FORMATS["fp16"])
    value = torch.tensor([1e-3]).half()
    shadow.store(value, exact([0.0]))
    assert shadow.drift(value).error == math.inf


def test_shadows_of_freed_memory_go():
    shadow = Shadow(FORMATS["fp16"])
    kept = torch.ones(4)
    shadow.store(kept, exact([1.0, 2.0, 3.0, 4.0]))
    for _ in range(100):
        shadow.store(torch.ones(4), exact([9.0] * 4))
    assert len(shadow._entries) < 40
    assert shadow.of(kept).tolist() == [1, 2, 3, 4]
    fresh = torch.zeros(4)
    assert shadow.of(fresh).tolist() == [0, 0, 0, 0]


def test_bits_that_are_read_as_another_format_have_no_shadow():
    shadow = Shadow(FORMATS["fp16"])
    value = torch.ones(4)
    shadow.store(value, exact([2.0] * 4))
    assert shadow.of(value.view(torch.float16)).tolist() == value.view(torch.float16).double().tolist()


def test_results_that_overlap_keep_their_layout():
    shadow, result = shadow_after(lambda x: x.half().as_strided((3, 2), (1, 1)) * 1, X)
    x = X.double()
    assert shadow.tolist() == [[x[0], x[1]], [x[1], x[2]], [x[2], x[3]]]
    assert result.shape == (3, 2)
