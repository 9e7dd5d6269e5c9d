"""Gradient checkpointing: what backward computes again has the formats and the random state of the first time."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from reference.loop import Gate
from reference.nets import CPU
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from halfstep.region import Region
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")

X = torch.linspace(-2, 2, 192).reshape(24, 8).sin()
Y = X.mean(1, keepdim=True) + 0.5
POLICIES = [
    "fp32",
    "bf16",
    "fp16 scale.init=1024",
    "fp16 on_overflow=skip scale.init=1024",
    "bf16 module:*.norm=fp32",
    "bf16 module:blocks.1=fp32 op:tanh=fp32",
    "fp16 module:blocks.0.inner=bf16 op:softmax=fp16 scale.init=1024",
    "fp32 module:blocks.0=bf16",
]
WAYS = ["reentrant", "not reentrant", "sequential", "nested", "selective"]


class Block(nn.Module):
    """Notes the formats of what it computes, each time that it does."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.drop, self.formats = nn.Dropout(0.2), []

    def forward(self, x):
        self.formats.append([])
        y = self.note(self.inner(self.note(x)))
        s = self.note(torch.softmax(self.note(torch.tanh(y)), -1))
        return x + self.note(self.drop(self.note(self.norm(y + s))))

    def note(self, value):
        self.formats[-1].append(value.dtype)
        return value


class Net(nn.Module):
    def __init__(self, way=None, limit=None):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.Sequential(Block(), Block(), Block(), Block())
        self.gate, self.head = Gate(limit), nn.Linear(8, 1)
        self.way = way

    def forward(self, x):
        return self.head(self.gate(self.through_blocks(self.stem(x))))

    def through_blocks(self, x):
        if self.way == "sequential":
            return checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)
        if self.way == "nested":
            return checkpoint(self.halves, x, use_reentrant=False)
        if self.way == "selective":
            policy = functools.partial(create_selective_checkpoint_contexts, keep_products)
            return checkpoint(self.blocks, x, use_reentrant=False, context_fn=policy)
        for block in self.blocks:
            x = block(x) if self.way is None else checkpoint(block, x, use_reentrant=self.way == "reentrant")
        return x

    def halves(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def keep_products(ctx, op, *args, **kwargs):
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def loss_of(model, step=0, factor=1.0):
    x, y = X.roll(step, 0)[:12], Y.roll(step, 0)[:12]
    return (model(x).float() - y).square().mean() * factor


def make(policy, way=None, limit=None, **kwargs):
    model = Net(way, limit)
    return Stepper(model, torch.optim.AdamW(model.parameters(), lr=0.01), policy, hardware=CPU, **kwargs)


def state_of(stepper):
    return copy.deepcopy([p.detach() for p in stepper.model.parameters()])


def assert_same_bits(left, right):
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS)
def test_steps_have_the_bits_of_those_without_a_checkpoint(way, policy):
    results = []
    for each in (way, None):
        stepper = make(policy, each, accumulate=2, max_norm=1.0)
        torch.default_generator.manual_seed(3)
        reports = [stepper.step(lambda s=step, m=stepper.model: loss_of(m, s)) for step in range(6)]
        results.append((state_of(stepper), [report.grad_norm for report in reports if report]))
    assert_same_bits(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS)
def test_both_passes_have_the_same_formats(way, policy):
    stepper, plain = make(policy, way), make(policy)
    for each in (stepper, plain):
        each.step(lambda model=each.model: loss_of(model))
    for block, other in zip(stepper.model.blocks, plain.model.blocks, strict=True):
        (expected,) = other.formats
        # checkpoint_sequential leaves the last segment alone; a nested block runs once more for the outer one.
        assert len(block.formats) in {"sequential": (1, 2), "nested": (2, 3)}.get(way, (2,))
        for formats in block.formats:
            # A recomputation stops where backward has what it needs, here before dropout or its input.
            assert len(expected) - len(formats) <= 2
            assert formats == expected[: len(formats)]
    if policy != "fp32":
        assert len({dtype for block in plain.model.blocks for dtype in block.formats[0]}) > 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", [0, 1])
def test_a_micro_batch_that_overflows_is_replayed_through_checkpoints(where, way):
    """As if the lower scale had been there from the start; dropout draws the same masks in all four passes."""
    results = []
    for scale, name in ((2**16, way), (None, way), (None, None)):
        if scale is None:
            scale = results[0][1][0].scale
        stepper = make(f"fp16 scale.init={scale:g}", name, accumulate=2)
        torch.default_generator.manual_seed(3)
        factors = [1.0] * 4
        factors[where] = 2.0**10
        reports = [stepper.step(lambda s=s, f=f, m=stepper.model: loss_of(m, s, f)) for s, f in enumerate(factors)]
        results.append((state_of(stepper), [report for report in reports if report]))
    assert results[0][1][0].num_replays > 0
    assert results[1][1][0].num_replays == 0
    for state, _ in results[1:]:
        assert_same_bits(results[0][0], state)


@pytest.mark.parametrize("way", WAYS)
def test_the_module_at_fault_is_found_through_checkpoints(way):
    """A gradient that overflows at the floor of the scale: the module that makes it is promoted, and the step runs."""
    results = []
    for each in (way, None):
        stepper = make("fp16 on_exhausted=promote scale.init=1", each)
        with torch.no_grad():
            stepper.model.blocks[1].inner.weight.mul_(1e4)
            stepper.model.stem.weight.mul_(1e2)
        torch.default_generator.manual_seed(3)
        report = stepper.step(lambda m=stepper.model: loss_of(m))
        assert (report.applied, report.num_replays) == (True, 1)
        results.append((stepper.policy, state_of(stepper)))
    assert results[0][0] == results[1][0]
    assert "module:" in str(results[0][0])
    assert_same_bits(results[0][1], results[1][1])


def test_evaluation_and_training_alternate_with_checkpoints():
    results = []
    for way in ("not reentrant", None):
        stepper = make("bf16 module:*.norm=fp32", way)
        torch.default_generator.manual_seed(3)
        for step in range(3):
            stepper.step(lambda s=step, m=stepper.model: loss_of(m, s))
            with stepper.inference():
                out = stepper.model(X)
        results.append([*state_of(stepper), out])
    assert_same_bits(*results)


def test_a_region_opened_by_hand_serves_checkpoints_alike():
    gradients = []
    for way in ("not reentrant", "reentrant", None):
        model = Net(way)
        region = Region(model, "bf16 module:*.norm=fp32", CPU)
        torch.default_generator.manual_seed(3)
        with region:
            loss = loss_of(model)
        with region.backward():
            loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert_same_bits(gradients[0], gradients[2])
    assert_same_bits(gradients[1], gradients[2])


class Again(torch.autograd.Function):
    """A recomputation written by hand, as losses with cached embeddings have it: forward keeps nothing."""

    @staticmethod
    def forward(ctx, x, module, region):
        ctx.module, ctx.region = module, region
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad(), ctx.region:
            out = ctx.module(x)
        torch.autograd.backward(out, gradient)
        return x.grad, None, None


@pytest.mark.parametrize("policy", ["bf16", "bf16 module:inner=fp32"])
def test_a_recomputation_by_hand_opens_the_region_again(policy):
    """Backward runs without autocast, as it has to; what computes forward in it says in which formats."""
    gradients, formats = [], []
    for by_hand in (True, False):
        torch.default_generator.manual_seed(0)
        model = Block()
        model.drop.p = 0.0
        region = Region(model, policy, CPU)
        x = X.clone().requires_grad_()
        with region:
            out = Again.apply(x, model, region) if by_hand else model(x)
            loss = out.float().square().sum()
        with region.backward():
            loss.backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
        formats.append(model.formats)
    assert formats[0] == [formats[1][0]] * 2
    assert_same_bits(*gradients)
