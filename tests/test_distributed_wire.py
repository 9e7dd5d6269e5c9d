"""Shards whose gradients travel in bf16, and what each choice of engine and wire sends in a step."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

import halfstep
from halfstep import HalfstepError, Stepper

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "bench_communication.py"
U = 2.0**-8


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))  # nothing that ranks could share evenly


def batch_of(rank):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))


def gradients_of(wire):
    """Means over the ranks, or of each rank alone where there is no group."""
    if not distributed.is_initialized():
        alone = []
        for rank in range(2):
            model = net()
            model(batch_of(rank)).square().sum().backward()
            alone.append({name: p.grad.numpy() for name, p in model.named_parameters()})
        return alone
    model = halfstep.distributed.shard(net(), "fp32", blocks=[nn.Linear], wire=wire)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", accumulate=2, watch=False)
    stepper.step(lambda: model(batch_of(distributed.get_rank())).square().sum())
    gradients = {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}
    stepper.step(lambda: model(batch_of(distributed.get_rank())).square().sum())
    return gradients, {value for key, value in stepper.ranks.describe().items() if key != "engine"}


def test_shards_gradients_are_rounded_once(world2):
    alone = gradients_of(None)
    for wire, words in (("fp32", "fp32 gradients"), ("bf16", "fp32 gradients sent in bf16")):
        for gradients, described in world2.run(gradients_of, wire):
            assert described == {f"fp32 weights, {words}"}
            exact = True
            for name, gradient in gradients.items():
                parts = [each[name].astype(np.float64) for each in alone]
                error = np.abs(gradient - sum(parts) / 2)
                size = (np.abs(parts[0]) + np.abs(parts[1])) / 2
                assert (error <= (U if wire == "bf16" else 2.0**-22) * size).all(), name
                exact &= bool((error <= 2.0**-22 * size).all())
            assert exact == (wire == "fp32")


def refusal():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(HalfstepError) as error:
        halfstep.distributed.shard(net(), "fp32", mesh=mesh, wire="bf16")
    return str(error.value)


def test_two_dimensions_are_refused(world2):
    for message in world2.run(refusal):
        assert message.startswith("wire='bf16' over a mesh of 2 dimensions: ")


def test_fp16_does_not_travel_between_shards():
    with pytest.raises(HalfstepError, match="65504"):
        halfstep.distributed.shard(net(), "fp16", wire="fp16")


def bytes_sent():
    """Of every choice of the benchmark, a parameter: counted, and by its formula."""
    sys.path.insert(0, str(BENCHMARK.parent))
    script = runpy.run_path(str(BENCHMARK))
    script["net"].__globals__["NUM_BLOCKS"] = 2
    num = sum(p.numel() for p in script["net"]().parameters())
    return {choice: (script["sent"](choice, 3) / num, script["formula"](choice, 3)) for choice in script["CHOICES"]}


def test_what_a_step_sends_is_what_the_page_says(world2):
    """The rest is the verdict: 7 numbers, and under fully_shard a norm of each parameter."""
    for found in world2.run(bytes_sent):
        assert len(found) == 8
        for choice, (counted, computed) in found.items():
            assert computed <= counted <= 1.01 * computed, choice
