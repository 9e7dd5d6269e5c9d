"""Master weights on CUDA: the bits of the CPU, no wait for the device, and the same roundings on every replica."""

import pytest
import torch
from torch import nn

from halfstep import Stepper
from halfstep.layouts import LAYOUTS

pytestmark = pytest.mark.gpu

DRAWN = "stochastic"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != DRAWN])
def test_layouts_have_the_bits_of_the_cpu(name, dtype):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(100_000, generator=generator) * 10.0 ** torch.empty(100_000).uniform_(
        -8, 3, generator=generator
    )
    layout, parts = LAYOUTS[name], []
    for device in ("cpu", "cuda"):
        high = torch.empty(weights.shape, dtype=dtype, device=device)
        low = torch.empty(weights.shape, dtype=layout.low_dtype, device=device)
        layout.write(weights.to(device, copy=True), high, low, 0)
        parts.append((high.cpu(), low.cpu(), layout.read(high, low).cpu()))
    for on_cpu, on_cuda in zip(*parts, strict=True):
        assert torch.equal(on_cpu, on_cuda)


def run(policy, steps, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    stepper = Stepper(model, optimizer, policy, max_norm=1.0, **settings)
    x = torch.randn(32, 64, device="cuda")
    reports = [stepper.step(lambda: (model(x).float() - x).square().mean()) for _ in range(steps)]
    return stepper, reports, lambda: stepper.step(lambda: (model(x).float() - x).square().mean())


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_learns(name):
    _, reports, _ = run(f"bf16 master={name}", 60)
    assert reports[-1].loss < 0.5 * reports[0].loss


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_waits_for_nothing(name):
    _, _, step = run(f"bf16 master={name}", 3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        report = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert report.applied


def test_replicas_round_alike():
    weights = []
    for noise in range(2):
        torch.rand(noise + 1, device="cuda")
        stepper, _, _ = run(f"bf16 master={DRAWN}", 5)
        weights.append([weight.clone() for _, weight in stepper.weights()])
    assert all(torch.equal(first, second) for first, second in zip(*weights, strict=True))
