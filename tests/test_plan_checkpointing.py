"""Checkpointed blocks: which they are, that they compute the same, what runs again and what is kept."""

import copy
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from reference.stack_nets import BATCH, DEPTH, TIME, WIDTH, Block, Llama, token_loss, tokens, traced
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.errors import HalfstepError
from halfstep.plan.checkpointing import checkpoint_blocks, repeated_blocks

pytestmark = pytest.mark.usefixtures("kernels_stay")


class Ops(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def names_of(model):
    return list(repeated_blocks(model))


def pair():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def test_blocks_are_children_of_one_class_that_have_parts():
    assert names_of(Llama()) == ["blocks.0", "blocks.1", "blocks.2"]
    # A leaf is no block, and neither is what stands alone or has no parameters.
    assert names_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == []
    assert names_of(nn.Sequential(Block(), nn.Linear(4, 4))) == []
    assert names_of(nn.ModuleList([nn.Sequential(nn.ReLU(), nn.ReLU()) for _ in range(2)])) == []
    # Of a mixed container those that repeat; of nested ones the outer.
    assert names_of(nn.Sequential(nn.Linear(4, 4), pair(), pair(), nn.ReLU())) == ["1", "2"]
    nested = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList([pair(), pair()])}) for _ in range(2))
    assert names_of(nested) == ["0", "1"]
    # Two stages of blocks are found in both.
    stages = nn.ModuleDict({"one": nn.Sequential(pair(), pair()), "two": nn.Sequential(pair(), pair())})
    assert names_of(stages) == ["one.0", "one.1", "two.0", "two.1"]
    lists = nn.ModuleList([nn.ModuleList([pair(), pair()]), nn.ModuleList([pair(), pair()])])
    assert names_of(lists) == ["0.0", "0.1", "1.0", "1.1"]  # a list has no forward to wrap


@pytest.mark.parametrize("is_selective", [False, True])
def test_gradients_are_the_same_to_the_bit_and_only_what_is_dropped_runs_again(is_selective):
    torch.manual_seed(0)
    plain = Llama()
    other = copy.deepcopy(plain)
    checkpoint_blocks(other, is_selective)
    counts = []
    for model in (plain, other):
        with Ops() as ops:
            token_loss(model, tokens()).backward()
        counts.append(ops.counts)
    gradients = [[p.grad for p in model.parameters()] for model in (plain, other)]
    assert all(torch.equal(*each) for each in zip(*gradients, strict=True))
    again = counts[1] - counts[0]
    # A block has 7 products; the last one is not needed again for any gradient, and torch stops before it.
    assert again["mm"] == (0 if is_selective else 6 * DEPTH)
    attention = sum(count for name, count in again.items() if "attention" in name or name == "bmm")
    assert (attention == 0) == is_selective
    assert again["rsqrt"] == 2 * DEPTH


def test_hooks_of_a_block_run_again_with_it_so_that_its_operations_have_a_place():
    model = Llama()
    checkpoint_blocks(model)
    calls = []
    for name, block in model.blocks.named_children():
        block.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    loss = token_loss(model, tokens())
    assert calls == ["0", "1", "2"]
    loss.backward()
    assert calls == ["0", "1", "2", "2", "1", "0"]


def test_keyword_arguments_and_evaluation_go_through():
    model = Llama().eval()
    x = torch.randn(1, 4, WIDTH)
    expected = model.blocks[0](x)
    checkpoint_blocks(model)
    with torch.no_grad():
        assert torch.equal(model.blocks[0](x=x), expected)


def test_the_cache_of_keys_is_off():
    model = Llama()
    model.config = SimpleNamespace(use_cache=True)
    checkpoint_blocks(model)
    assert model.config.use_cache is False


def test_a_model_without_blocks_is_refused():
    with pytest.raises(HalfstepError, match="checkpointing of Sequential: it has no repeated blocks"):
        checkpoint_blocks(nn.Sequential(nn.Linear(4, 4)))


def saved_in_blocks(trace):
    """Bytes of activations that blocks made and that are alive when the forward pass ends."""
    end = next(start for phase, start in trace.phases if phase == "backward") - 1
    alive = [s for s in trace.alive(end) if s.component == "activations" and (s.module or "").startswith("blocks")]
    return sum(storage.nbytes for storage in alive)


def test_a_plan_keeps_the_outputs_of_blocks_alone():
    whole = saved_in_blocks(traced("llama", "bf16"))
    selective = saved_in_blocks(traced("llama", "bf16", "checkpointing=selective"))
    full = saved_in_blocks(traced("llama", "bf16", "checkpointing"))
    assert full == DEPTH * BATCH * TIME * WIDTH * 4  # the residual stream, in fp32
    assert full < selective < whole
