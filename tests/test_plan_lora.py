"""Adapters: what they compute, which layers get one, what trains, and what a step with them holds."""

import pytest
import torch
from reference.stack_nets import (
    BLOCK_WEIGHTS,
    DEPTH,
    INNER,
    NUM_PARAMETERS,
    VOCABULARY,
    WIDTH,
    Block,
    Llama,
    tokens,
    traced,
)
from torch import nn

from halfstep.errors import HalfstepError
from halfstep.plan.classic_case import largest
from halfstep.plan.lora import adapt, adapted_layers

pytestmark = pytest.mark.usefixtures("kernels_stay")
RANK = 16
NUM_ADAPTER = DEPTH * RANK * (4 * (WIDTH + WIDTH) + 3 * (WIDTH + INNER))
NUM_TENSORS = DEPTH * 7 * 2


class Conv1D(nn.Module):
    """As transformers' one: a linear layer whose weight is [in, out]."""

    def __init__(self, num_in, num_out):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(num_in, num_out)), nn.Parameter(torch.randn(num_out))

    def forward(self, x):
        return x @ self.weight + self.bias


Conv1D.__module__ = "transformers.pytorch_utils"


def test_nothing_changes_until_b_moves_and_then_as_the_product_says():
    torch.manual_seed(0)
    model = Llama()
    layer, x = model.blocks[1].down, torch.randn(5, INNER)
    before, of_layer = model(tokens()), layer(x)
    adapt(model, RANK)
    assert torch.equal(model(tokens()), before)
    nn.init.normal_(layer.lora_B)
    expected = x.double() @ (layer.weight.double() + 8 / RANK * layer.lora_B.double() @ layer.lora_A.double()).T
    # Sums of INNER products of numbers near 1 in fp32, each rounded by 2^-24 of sums that reach some tens.
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-4)
    assert not torch.equal(layer(x), of_layer)


def test_what_trains_are_the_adapters_of_the_blocks():
    model = Llama()
    adapt(model, RANK)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(adapted_layers(model)) == 7 * DEPTH
    assert len(trained) == NUM_TENSORS
    assert sum(p.numel() for p in trained.values()) == NUM_ADAPTER
    assert {name.rpartition(".")[2] for name in trained} == {"lora_A", "lora_B"}
    assert all(name.startswith("blocks.") and p.dtype == torch.float32 for name, p in trained.items())


def test_conv1d_gets_one_and_the_inside_of_attention_none():
    def block():
        attention = nn.MultiheadAttention(8, 2)
        return nn.ModuleDict({"attention": attention, "up": Conv1D(8, 24), "again": Conv1D(24, 8)})

    model = nn.ModuleList([block(), block()])
    adapt(model, 4)
    up = model[0]["up"]
    assert (up.lora_A.shape, up.lora_B.shape) == ((4, 8), (24, 4))
    assert up(torch.randn(3, 8)).shape == (3, 24)
    assert len(adapted_layers(model)) == 4  # out_proj's weight is used without calling the layer


def test_a_shared_layer_gets_one_adapter():
    blocks = nn.ModuleList([Block(), Block()])
    blocks[1].up = blocks[0].up
    adapt(blocks, 2)
    x = torch.randn(2, WIDTH)
    nn.init.ones_(blocks[0].up.lora_B)
    twice = blocks[0].up.weight + 4 * blocks[0].up.lora_B @ blocks[0].up.lora_A
    torch.testing.assert_close(blocks[1].up(x), x @ twice.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.Sequential(*(nn.Sequential(nn.Conv2d(1, 1, 1)),) * 2)])
def test_a_model_without_layers_to_adapt_is_refused(model):
    with pytest.raises(HalfstepError, match=r"lora=16 on .*: no torch\.nn\.Linear stands in its repeated blocks"):
        adapt(model, 16)


def test_a_step_holds_the_base_once_and_gradients_and_states_of_adapters():
    trace = traced("llama", "bf16", "lora=16")
    assert trace.num_trained == NUM_ADAPTER
    assert largest(trace, "weights") == 4 * (NUM_PARAMETERS + NUM_ADAPTER)
    assert largest(trace, "gradients") == 4 * NUM_ADAPTER
    assert largest(trace, "optimizer states") == 8 * NUM_ADAPTER + 4 * NUM_TENSORS  # and a step count each
    # Frozen weights are cast as well, and kept for the gradients of what comes before them, which the first query, key
    # and value have nothing of that trains.
    num_kept = DEPTH * BLOCK_WEIGHTS - 3 * WIDTH * WIDTH + VOCABULARY * WIDTH
    assert largest(trace, "16-bit weights") == 2 * (num_kept + NUM_ADAPTER)
