"""Each pattern of torch's page of AMP examples as one script, run with torch's classes and with ours: the same bits.

``autocast`` and ``GradScaler`` are what the script imports. The nets have linear and convolution layers, relu and a
loss in fp32, where torch's op lists for a CPU and those for CUDA agree. cpu16's kernels act in every run, so that the
products are the same ones.
"""

from __future__ import annotations

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from reference.nets import CPU
from torch import nn
from torch.amp import custom_bwd, custom_fwd

from halfstep import autocast_mode, cpu16
from halfstep.autocast_mode import autocast
from halfstep.grad_scaler import GradScaler

THEIRS = SimpleNamespace(autocast=torch.autocast, GradScaler=torch.amp.GradScaler)
OURS = {
    "GradScaler": SimpleNamespace(autocast=torch.autocast, GradScaler=GradScaler),
    "autocast and GradScaler": SimpleNamespace(autocast=autocast, GradScaler=GradScaler),
}
BAD = (2, 3, 7)  # the batches whose gradient overflows
NUM_BATCHES = 10
SCALE = {"init_scale": 2.0**10, "growth_interval": 2}


@pytest.fixture(autouse=True)
def _cpu16_in_every_run(monkeypatch):
    # Also on a processor with the instructions, where our regions would leave it out.
    monkeypatch.setattr("halfstep.region.detect", lambda device: CPU)
    cpu16.kernels.acquire()
    cpu16.active = True
    yield
    autocast_mode._standing.close()
    cpu16.active = False
    cpu16.kernels.release()


def net(seed, *widths):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
        return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


def batches(width=8):
    generator = torch.Generator().manual_seed(1)
    for i in range(NUM_BATCHES):
        x = torch.randn(6, width, generator=generator)
        # Beyond fp16 in the first product, and beyond fp32 in the square of the loss.
        yield x * 1e30 if i in BAD else x, torch.randn(6, 1, generator=generator)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def fused(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def state_of(models, optimizers, scaler):
    """Everything that a run leaves, and the entries of the scaler's state that are torch's."""
    numbers = {key: scaler.state_dict()[key] for key in torch.amp.GradScaler("cpu").state_dict()}
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    return [model.state_dict() for model in models], states, numbers


# --- the scripts ---------------------------------------------------------------------------------------------------


def typical(amp, dtype, make):
    model = net(0, 8, 16, 16)
    optimizer, scaler = make(model), amp.GradScaler("cpu", **SCALE)
    for x, y in batches():
        optimizer.zero_grad()
        with amp.autocast(device_type="cpu", dtype=dtype):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return state_of([model], [optimizer], scaler)


def clipping(amp, dtype, make):
    model = net(0, 8, 16, 16)
    optimizer, scaler = make(model), amp.GradScaler("cpu", **SCALE)
    for x, y in batches():
        optimizer.zero_grad()
        with amp.autocast(device_type="cpu", dtype=dtype):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return state_of([model], [optimizer], scaler)


def accumulation(amp, dtype, make):
    model = net(0, 8, 16, 16)
    optimizer, scaler = make(model), amp.GradScaler("cpu", **SCALE)
    for i, (x, y) in enumerate(batches()):
        with amp.autocast(device_type="cpu", dtype=dtype):
            loss = F.mse_loss(model(x), y) / 2
        scaler.scale(loss).backward()
        if (i + 1) % 2 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return state_of([model], [optimizer], scaler)


def gradient_penalty(amp, dtype, make):
    model = net(0, 8, 16, 16)
    optimizer, scaler = make(model), amp.GradScaler("cpu", **SCALE)
    for x, y in batches():
        optimizer.zero_grad()
        with amp.autocast(device_type="cpu", dtype=dtype):
            loss = F.mse_loss(model(x), y)
        scaled = torch.autograd.grad(outputs=scaler.scale(loss), inputs=list(model.parameters()), create_graph=True)
        gradients = [gradient / scaler.get_scale() for gradient in scaled]
        with amp.autocast(device_type="cpu", dtype=dtype):
            loss = loss + sum(gradient.pow(2).sum() for gradient in gradients).sqrt()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return state_of([model], [optimizer], scaler)


def several(amp, dtype, make):
    """Two models, losses and optimizers; the second loss has a part of the first model's output."""
    models = [net(0, 8, 16), net(1, 8, 12)]
    optimizers, scaler = [make(models[0]), sgd(models[1])], amp.GradScaler("cpu", **SCALE)
    for x, y in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        with amp.autocast(device_type="cpu", dtype=dtype):
            outputs = [models[0](x), models[1](x.clamp(-9, 9))]
            losses = [F.mse_loss(2 * outputs[0] + 3 * outputs[1], y), F.mse_loss(outputs[1], y)]
        scaler.scale(losses[0]).backward(retain_graph=True)
        scaler.scale(losses[1]).backward()
        scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    return state_of(models, optimizers, scaler)


def replicas(amp, dtype, make):
    """As DataParallel does it: a thread for each part of the batch, with a copy of the weights that has a gradient."""
    model = net(0, 8, 16, 16)
    optimizer, scaler = make(model), amp.GradScaler("cpu", **SCALE)

    shells = [copy.deepcopy(model) for _ in range(2)]

    @amp.autocast(device_type="cpu", dtype=dtype)
    def forward(shell, weights, x):
        return torch.func.functional_call(shell, weights, (x,))

    with ThreadPoolExecutor(2) as pool:
        for x, y in batches():
            optimizer.zero_grad()
            # Two copies, since a sum of two gradients has the same bits in either order.
            copies = [{name: weight.clone() for name, weight in model.named_parameters()} for _ in range(2)]
            output = torch.cat(list(pool.map(forward, shells, copies, x.chunk(2))))
            with amp.autocast(device_type="cpu", dtype=dtype):
                loss = F.mse_loss(output, y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return state_of([model], [optimizer], scaler)


class Product(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad.mm(b.t()), a.t().mm(grad)


class FullProduct(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, a, b):
        assert a.dtype == b.dtype == torch.float32
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        assert not torch.is_autocast_enabled("cpu")
        return grad.mm(b.t()), a.t().mm(grad)


def with_function(function):
    def script(amp, dtype, make):
        model = nn.ModuleDict({"body": net(0, 8, 16)[:-1], "head": net(1, 16)[0]})
        optimizer, scaler = make(model), amp.GradScaler("cpu", **SCALE)
        for x, y in batches():
            optimizer.zero_grad()
            with amp.autocast(device_type="cpu", dtype=dtype):
                hidden = model["body"](x)
                loss = F.mse_loss(function.apply(hidden, model["head"].weight.t()), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return state_of([model], [optimizer], scaler)

    return script


def convolutions(amp, dtype, make):
    """One decorated forward, an inner region that is off, and one object for all regions."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2), nn.Flatten())
        model.append(nn.Linear(64, 1))
    optimizer, scaler = make(model), amp.GradScaler("cpu", **SCALE)
    off = amp.autocast("cpu", enabled=False)

    @amp.autocast("cpu", dtype)
    def forward(x):
        hidden = model[:-1](x)
        with off:
            return model[-1](hidden.float())

    for x, y in batches(121):
        optimizer.zero_grad()
        loss = F.mse_loss(forward(x.reshape(-1, 1, 11, 11)), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return state_of([model], [optimizer], scaler)


SCRIPTS = {
    "typical training": typical,
    "clipping": clipping,
    "accumulation": accumulation,
    "gradient penalty": gradient_penalty,
    "several models, losses and optimizers": several,
    "replicas in threads": replicas,
    "custom function": with_function(Product),
    "custom function that casts its inputs": with_function(FullProduct),
    "convolutions, decorated and nested": convolutions,
}


def flat(value):
    """The tensors and numbers of a nested structure, in order."""
    if isinstance(value, dict):
        return [item for key in value for item in flat(value[key])]
    if isinstance(value, (list, tuple)):
        return [item for part in value for item in flat(part)]
    return [value if isinstance(value, torch.Tensor) else torch.tensor(-1.0 if value is None else value)]


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("optimizer", [sgd, adamw, fused])
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_same_script_gives_the_same_bits(script, optimizer, dtype, ours):
    theirs = SCRIPTS[script](THEIRS, dtype, optimizer)
    own = SCRIPTS[script](OURS[ours], dtype, optimizer)
    weights, _, numbers = own
    for a, b in zip(flat(own), flat(theirs), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert all(weight.isfinite().all() for weight in flat(weights))
    assert numbers["scale"] <= 2.0**10  # there were skips: without, it would have doubled twice or more


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_comparison_notices_another_format(script):
    """A test of the test: the bits depend on what autocast does."""
    low, high = (SCRIPTS[script](OURS["GradScaler"], dtype, sgd) for dtype in (torch.float16, torch.bfloat16))
    assert not all(map(torch.equal, flat(low[0]), flat(high[0])))
