"""What 8-bit states and 16-bit and 4-bit base weights hold, byte by byte."""

import warnings

import pytest
import torch
from reference.stack_nets import (
    BATCH,
    BLOCK_WEIGHTS,
    DEPTH,
    INNER,
    NUM_PARAMETERS,
    TIME,
    VOCABULARY,
    WIDTH,
    Llama,
    llama_sgd,
    tokens,
    traced,
)
from torch import nn

from halfstep.errors import HalfstepError
from halfstep.plan.classic_case import largest
from halfstep.plan.lora import adapt
from halfstep.plan.quantized import AdamW8bit, hold_base_in_4_bit, hold_base_in_16_bit, in_8_bit
from halfstep.plan.technique import technique_of
from halfstep.policy import Policy
from halfstep.states import slices_at, steps_by_parameter

pytestmark = pytest.mark.usefixtures("kernels_stay")
BF16 = Policy.parse("bf16")
VECTORS = WIDTH * (2 * DEPTH + 1)
TABLES = 2 * VOCABULARY * WIDTH
NUM_ADAPTER = DEPTH * 16 * (4 * (WIDTH + WIDTH) + 3 * (WIDTH + INNER))


def nbytes_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def states_of(make, numel):
    parameter = nn.Parameter(torch.zeros(numel))
    optimizer = make([parameter])
    parameter.grad = torch.ones(numel)
    optimizer.step()
    return optimizer.state[parameter]


@pytest.mark.parametrize(
    ("numel", "nbytes"), [(4095, 8 * 4095), (4096, 2 * (4096 + 4 * 16)), (5000, 2 * (5000 + 4 * 20))]
)
def test_a_moment_is_a_byte_and_a_scale_for_each_256(numel, nbytes):
    assert nbytes_of(states_of(AdamW8bit, numel).values()) == nbytes


def test_states_are_those_of_bitsandbytes():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels for devices that are not here
        bitsandbytes = pytest.importorskip("bitsandbytes")
    for numel in (100, 4096, 5000):
        ours, theirs = states_of(AdamW8bit, numel), states_of(bitsandbytes.optim.AdamW8bit, numel)
        # qmap is one table of 256 numbers for all parameters.
        parts = {name: t for name, t in theirs.items() if isinstance(t, torch.Tensor) and not name.startswith("qmap")}
        assert {name: (t.dtype, t.numel()) for name, t in ours.items()} == {
            name: (t.dtype, t.numel()) for name, t in parts.items()
        }


def test_groups_go_over_and_another_rule_is_refused():
    parameters = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))]
    groups = [{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:], "weight_decay": 0.0}]
    made = in_8_bit(torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3))
    assert [(g["lr"], g["weight_decay"]) for g in made.param_groups] == [(0.5, 0.3), (0.1, 0.0)]
    workload, _ = technique_of("adamw8bit").apply(llama_sgd(0), BF16)
    with pytest.raises(HalfstepError, match="adamw8bit in place of SGD: another rule"):
        workload.optimizer(parameters)


def test_a_layout_of_master_weights_steps_it_in_slices():
    parameter = nn.Parameter(torch.zeros(1 << 16))
    optimizer = AdamW8bit([parameter])
    assert steps_by_parameter(optimizer)
    assert slices_at(optimizer, parameter)


def test_a_step_with_8_bit_states():
    trace = traced("llama", "bf16", "adamw8bit")
    matrices = [WIDTH * WIDTH] * 4 * DEPTH + [WIDTH * INNER] * 3 * DEPTH + [VOCABULARY * WIDTH] * 2
    expected = sum(2 * (n + 4 * -(-n // 256)) for n in matrices) + 8 * VECTORS
    assert largest(trace, "optimizer states") == expected
    assert largest(trace, "step temporaries") < 4096  # the norm's scalars, nothing of the weights' size


def test_16_bit_base_of_a_step():
    trace = traced("llama", "bf16", "lora=16", "16bit")
    assert largest(trace, "weights") == 2 * (TABLES + DEPTH * BLOCK_WEIGHTS) + 4 * (VECTORS + NUM_ADAPTER)
    assert largest(trace, "16-bit weights") == 2 * NUM_ADAPTER


def test_16_bit_base_keeps_what_the_policy_keeps():
    model = Llama()
    adapt(model, 4)
    hold_base_in_16_bit(model, Policy.parse("bf16 module:blocks.0.*=fp32 module:head=fp16"))
    assert model.blocks[0].up.weight.dtype == model.blocks[1].inner_norm.weight.dtype == torch.float32
    assert (model.blocks[1].up.weight.dtype, model.head.weight.dtype) == (torch.bfloat16, torch.float16)
    assert model.blocks[1].up.lora_A.dtype == torch.float32
    assert model.token.weight.dtype == torch.bfloat16
    assert model.token(tokens()).dtype == torch.float32
    with pytest.raises(HalfstepError, match="16bit with the policy tf32: it computes in no 16-bit format"):
        hold_base_in_16_bit(model, Policy.parse("tf32"))


def test_4_bit_base_of_a_step():
    trace = traced("llama", "bf16", "lora=16", "4bit")
    packed = DEPTH * BLOCK_WEIGHTS // 2 + 4 * DEPTH * BLOCK_WEIGHTS // 64
    assert largest(trace, "weights") == packed + 4 * (TABLES + VECTORS + NUM_ADAPTER)
    # Unpacked for each product of the forward and the backward pass, and kept by none.
    unpacked = [s for s in trace.storages if s.op == "aten.new_empty.default" and s.nbytes == 2 * WIDTH * INNER]
    assert len(unpacked) == 2 * 3 * DEPTH
    assert {s.component for s in unpacked} == {"forward temporaries", "backward temporaries"}
    assert largest(trace, "16-bit weights") == 2 * (NUM_ADAPTER + VOCABULARY * WIDTH)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_4_bit_layer_has_the_shapes_of_the_layer(has_bias):
    layer = lambda num_in, num_out: nn.Sequential(nn.Linear(num_in, num_out, bias=has_bias))  # noqa: E731
    model = nn.Sequential(layer(6, 7), layer(7, 6))
    adapt(model, 2)
    hold_base_in_4_bit(model)
    x = torch.randn(BATCH, TIME, 6, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert (y.shape, x.grad.shape) == (x.shape, x.shape)
    assert model[0][0].weight.shape == (21, 1)
    assert model[0][0].absmax.shape == (1,)


def test_4_bit_weights_need_adapters():
    with pytest.raises(HalfstepError, match="4bit without adapters: weights of 4 bits do not train"):
        hold_base_in_4_bit(Llama())
    assert sum(p.numel() for p in Llama().parameters()) == NUM_PARAMETERS
