"""Who made the first non-finite value: faults planted in every place, and the carriers that must not be blamed."""

from __future__ import annotations

import math

import pytest
import torch
from reference.loop import Gate
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.record import BATCH, LOSS, find_producer

KINDS = {"inf": math.inf, "nan": math.nan}
X = torch.linspace(-1, 1, 24).reshape(6, 4)


class Block(nn.Module):
    """A container with code of its own between its parts."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(4, 8), Gate(), nn.Linear(8, 4)
        object.__setattr__(self, "own", Gate())  # no part of the block, but code between its parts

    def forward(self, x):
        h = self.gate(self.up(x))
        return x + self.down(self.own.forward(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Linear(4, 4), nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


def net():
    torch.default_generator.manual_seed(0)
    return Net()


def find(model, x=X, loss=lambda out: out.square().mean(), scale=1.0):
    def backward(value):
        value.backward(torch.tensor(scale, dtype=value.dtype))

    return find_producer(model, lambda: loss(model(x)), backward)


def who(producer):
    return producer.module, producer.phase, producer.kind


def hooks_of(model):
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    count = sum(len(getattr(module, name)) for module in model.modules() for name in names)
    return count + sum(len(p._backward_hooks or ()) for p in model.parameters())


def spoil(gate, where, kind):
    gate.where, gate.value = where, KINDS[kind]


# --- forward -------------------------------------------------------------------------------------------------------


def test_a_finite_run_has_no_producer_and_leaves_nothing_behind():
    model = net()
    expected = model(X)
    assert find(model) is None
    assert hooks_of(model) == 0
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [0, 1])
def test_a_leaf_that_spoils_its_output_is_named(kind, block):
    model = net()
    spoil(model.blocks[block].gate, "output", kind)
    assert who(find(model)) == (f"blocks.{block}.gate", "forward", kind)
    assert hooks_of(model) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_container_that_spoils_between_its_parts_is_named_itself(kind):
    model = net()
    spoil(model.blocks[1].own, "output", kind)
    # The part after the fault, and everything outside, carry it on.
    assert who(find(model)) == ("blocks.1", "forward", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_function_that_spoils_is_named(kind):
    producer = find(net(), loss=lambda out: out.mean() * KINDS[kind])
    assert who(producer) == (LOSS, "forward", kind)
    assert not producer.is_module
    assert str(producer) == f"the loss function makes it ({kind}) in the forward pass"


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_holds_it_is_named_and_no_module(kind):
    x = X.clone()
    x[3, 1] = KINDS[kind]
    producer = find(net(), x)
    assert (producer.module, producer.phase, producer.is_module) == (BATCH, "forward", False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_holds_it_names_its_module(kind):
    model = net()
    with torch.no_grad():
        model.blocks[0].down.weight[0, 0] = KINDS[kind]
    producer = find(model)
    assert (producer.module, producer.phase) == ("blocks.0.down", "forward")


def test_the_first_of_two_faults_is_named():
    model = net()
    spoil(model.blocks[1].gate, "output", "inf")
    spoil(model.blocks[0].gate, "output", "nan")
    assert who(find(model)) == ("blocks.0.gate", "forward", "nan")


def test_the_kind_is_that_of_the_producer_and_not_of_what_became_of_it():
    model = nn.Sequential(nn.Linear(4, 4), Gate(), nn.Softmax(dim=-1))
    spoil(model[1], "output", "inf")
    assert who(find(model, loss=lambda out: out.sum())) == ("1", "forward", "inf")


def test_an_infinity_on_the_way_to_a_finite_loss_was_meant():
    model = nn.Sequential(nn.Linear(4, 4), Gate(), nn.Softmax(dim=-1))
    spoil(model[1], "output", "inf")
    model[1].value = -math.inf  # a masked score
    assert find(model, loss=lambda out: out.square().sum()) is None


class Recurrent(nn.Module):
    """One cell called several times; it spoils its output at the second call."""

    def __init__(self):
        super().__init__()
        self.cell, self.num_calls = Gate(), 0
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        h = self.lin(x)
        for step in range(4):
            self.cell.where = "output" if step == 1 else "nowhere"
            h = self.cell(h).tanh()
        return h


def test_a_module_called_several_times_is_named_for_the_call_that_made_it():
    assert who(find(Recurrent())) == ("cell", "forward", "nan")


def test_parts_called_without_their_model():
    model = net()
    spoil(model.blocks[0].gate, "output", "nan")

    def forward():
        return model.head(model.blocks(model.stem(X))).mean()

    assert who(find_producer(model, forward, torch.Tensor.backward)) == ("blocks.0.gate", "forward", "nan")
    assert hooks_of(model) == 0


class Nested(nn.Module):
    """Takes and gives structures, by position and by name."""

    def __init__(self):
        super().__init__()
        self.lin, self.gate = nn.Linear(4, 4), Gate()

    def forward(self, batch, *, scale):
        return {"out": [self.gate(self.lin(batch["x"])) * scale], "names": "abc", "num": 3}


@pytest.mark.parametrize("where", ["output", "gradient"])
def test_values_inside_dicts_lists_and_keyword_arguments_are_seen(where):
    model = nn.ModuleDict({"nested": Nested()})
    spoil(model["nested"].gate, where, "nan")

    def forward():
        return model["nested"]({"x": X, "ids": torch.arange(6)}, scale=torch.ones(4))["out"][0].square().mean()

    phase = "forward" if where == "output" else "backward"
    assert who(find_producer(model, forward, torch.Tensor.backward)) == ("nested.gate", phase, "nan")


# --- backward ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [0, 1])
def test_a_leaf_that_spoils_its_gradient_is_named(kind, block):
    model = net()
    spoil(model.blocks[block].gate, "gradient", kind)
    assert who(find(model)) == (f"blocks.{block}.gate", "backward", kind)
    assert hooks_of(model) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_container_that_spoils_the_gradient_between_its_parts_is_named_itself(kind):
    model = net()
    spoil(model.blocks[0].own, "gradient", kind)
    assert who(find(model)) == ("blocks.0", "backward", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_whose_gradient_is_spoiled_is_named(kind):
    gate = Gate()
    spoil(gate, "gradient", kind)
    producer = find(net(), loss=lambda out: gate(out).mean())
    assert (producer.module, producer.phase) == (LOSS, "backward")


def test_the_root_of_zero_is_named_for_its_infinite_slope():
    """Only the next operation, the gradient of the square of zero, makes NaN of it."""

    class Distance(nn.Module):
        def forward(self, x):
            return (x - x).square().sum(-1).sqrt()

    model = nn.Sequential(nn.Linear(4, 4), Distance())
    producer = find(model, loss=lambda out: out.sum())
    assert who(producer) == ("1", "backward", "inf")
    assert (producer.op, producer.function) == ("div", "sqrt")


def test_a_weight_gradient_alone_names_its_module():
    """The input needs no gradient, so only the weight's shows the fault."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.weight.clamp(min=0).sub(1).abs().sqrt().mul(0).add(1)

    model = nn.Sequential(Scale(), nn.Linear(4, 1))
    assert who(find(model)) == ("0", "backward", "nan")


class Fork(nn.Module):
    """Two branches read one tensor. ``later`` runs second, and the gradient of the shared tensor sums up both."""

    def __init__(self, first, second):
        super().__init__()
        self.stem, self.first, self.second = nn.Linear(4, 4), first, second

    def forward(self, x):
        h = self.stem(x)
        return self.first(h) + self.second(h)


@pytest.mark.parametrize("guilty", ["first", "second"])
def test_of_two_branches_only_the_guilty_one_is_named(guilty):
    model = Fork(nn.Sequential(Gate(), nn.Tanh()), nn.Sequential(Gate(), nn.Tanh()))
    spoil(getattr(model, guilty)[0], "gradient", "inf")
    assert who(find(model)) == (f"{guilty}.0", "backward", "inf")


def test_a_real_fp16_overflow_is_told_from_the_layers_that_carry_it():
    class Half(nn.Module):
        def forward(self, x):
            return x.half().float()

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Half(), nn.Linear(4, 4))
    assert find(model, loss=lambda out: out.sum(), scale=1.0) is None
    assert who(find(model, loss=lambda out: out.sum(), scale=2.0**20)) == ("2", "backward", "inf")


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["output", "gradient"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_checkpointed_block_is_searched_too(reentrant, where):
    model = net()
    spoil(model.blocks[1].gate, where, "inf")

    def forward():
        h = model.stem(X)
        for block in model.blocks:
            h = checkpoint(block, h, use_reentrant=reentrant)
        return model.head(h).mean()

    producer = find_producer(model, forward, torch.Tensor.backward)
    assert who(producer) == ("blocks.1.gate", "forward" if where == "output" else "backward", "inf")
    assert hooks_of(model) == 0


# --- manners -------------------------------------------------------------------------------------------------------


def test_an_in_place_layer_changes_nothing():
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), Gate(), nn.Linear(8, 1))
    find(model)
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(X).square().mean().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    spoil(model[2], "gradient", "nan")
    assert who(find(model)) == ("2", "backward", "nan")


def test_the_watched_pass_gives_the_same_gradients():
    model = net()
    find(model)
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(X).square().mean().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


@pytest.mark.parametrize("where", ["output", "gradient"])
def test_hooks_are_gone_after_an_exception(where):
    model = net()
    model.blocks[0].gate.where, model.blocks[0].gate.raises = where, KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        find(model)
    assert hooks_of(model) == 0


def test_no_hook_stays_on_a_batch_or_a_parameter_that_passed_through():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 1))

        def forward(self):
            return self.weight

    model, x = nn.ModuleList([nn.Linear(4, 4), Table()]), X.clone().requires_grad_()
    find_producer(model, lambda: (model[0](x) @ model[1]()).mean(), torch.Tensor.backward)
    assert not x._backward_hooks
    assert hooks_of(model) == 0


def test_hooks_of_the_user_stay_and_run():
    model, seen = net(), []
    model.head.register_forward_hook(lambda *_: seen.append("forward"))
    model.head.register_full_backward_hook(lambda *_: seen.append("backward"))
    assert find(model) is None
    assert seen == ["forward", "backward"]
    assert hooks_of(model) == 2
