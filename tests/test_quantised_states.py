"""8-bit optimizer states of torchao and bitsandbytes under the loss scale, the verdict, clipping and master weights."""

import io
import math
import warnings

import pytest
import torch
from torch import nn

from halfstep import Stepper, chunks
from halfstep.states import slices_at

pytestmark = pytest.mark.usefixtures("kernels_stay")


@pytest.fixture(scope="module", params=["torchao", "bitsandbytes"])
def library(request):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels for devices that are not here
        if request.param == "torchao":
            return request.param, pytest.importorskip("torchao.optim").AdamW8bit
        return request.param, pytest.importorskip("bitsandbytes").optim.AdamW8bit


@pytest.fixture
def make(library, monkeypatch):
    """Makes the optimizer. torchao compiles its step, which takes minutes on a CPU; here it runs as it is written."""
    if library[0] == "torchao":
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return lambda parameters: library[1](parameters, lr=1e-2)


def net():
    torch.manual_seed(0)
    # 8,192 and 12,544 elements: with slices of 4,096 two, and three with the last of 4,352.
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 98), nn.Tanh(), nn.Linear(98, 5))


def run(make, policy, steps=6, model=None, **settings):
    model = net() if model is None else model
    stepper = Stepper(model, make(model.parameters()), policy, **settings)
    return stepper, [step(stepper, number) for number in range(steps)]


def step(stepper, number, factor=1.0):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
    return stepper.step(lambda: (stepper.model(x).float() - x[:, :5]).square().mean() * factor)


def flat_state(optimizer):
    """All tensors of the states, the quantised ones as their parts."""
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in sorted(_flat(state), key=lambda pair: pair[0]):
            yield f"{number} {key}", value


def _flat(state, prefix=""):
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield f"{prefix}{key}.{name}", getattr(value, name)
        elif isinstance(value, torch.Tensor):
            yield f"{prefix}{key}", value


def assert_same_states(first, second):
    mine, yours = dict(flat_state(first)), dict(flat_state(second))
    assert mine.keys() == yours.keys()
    assert any(value.dtype == torch.uint8 for value in mine.values())
    for key in yours:
        assert mine[key].shape == yours[key].shape, key
        assert torch.equal(mine[key], yours[key]), key


@pytest.mark.parametrize("policy", ["bf16", "fp16 scale.init=256", "bf16 master=split16", "fp16 master=split8"])
def test_it_learns_with_scale_verdict_and_clipping(make, policy):
    stepper, reports = run(make, policy, steps=60, max_norm=1.0)
    assert all(report.applied for report in reports)
    assert sum(report.loss for report in reports[-10:]) < 0.9 * sum(report.loss for report in reports[:10])
    assert any(value.dtype == torch.uint8 for _, value in flat_state(stepper.optimizer))


@pytest.mark.parametrize("policy", ["bf16", "bf16 master=split16"])
def test_clipping_gives_it_the_clipped_true_gradient(make, policy):
    """The plain twin: the same optimizer, given gradient x max_norm / norm by hand."""
    stepper, _ = run(make, policy, steps=0, max_norm=1e-3)
    seen = {}

    def look(*_):
        seen.update({n: p.grad.to(torch.float32, copy=True) for n, p in stepper.model.named_parameters()})

    stepper.optimizer.register_step_pre_hook(look)
    twin = net()
    optimizer = make(twin.parameters())
    for number in range(4):
        report = step(stepper, number)
        factor = (report.grad_norm + 1e-6) / 1e-3 if policy != "bf16" else 1.0  # without rests it was divided before
        for name, parameter in twin.named_parameters():
            parameter.grad = seen[name] / factor
        optimizer.step()
    for (name, weight), other in zip(stepper.weights(), twin.parameters(), strict=True):
        # An 8-bit code may fall to the other side where the divisor rounds differently: 1/128 of a step of 1e-2 then.
        assert torch.allclose(weight, other, atol=1e-3), name
        assert (weight - other).abs().mean() < 1e-5, name


@pytest.mark.parametrize("policy", ["bf16", "bf16 master=split16"])
def test_a_non_finite_gradient_reaches_neither_weight_nor_state(make, policy):
    stepper, _ = run(make, policy, max_norm=1.0)
    weights = {name: weight.clone() for name, weight in stepper.weights()}
    states = {key: value.clone() for key, value in flat_state(stepper.optimizer)}
    assert not step(stepper, 0, math.inf).applied
    for name, weight in stepper.weights():
        assert torch.equal(weight, weights[name])
    for key, value in flat_state(stepper.optimizer):
        assert torch.equal(value, states[key]), key


def test_slices_change_no_bit(make, monkeypatch):
    whole, _ = run(make, "bf16 master=split16")
    monkeypatch.setattr(chunks, "_SMALLEST_BYTES", 0)
    monkeypatch.setattr(chunks, "_FIRST_CHUNKS", 10**9)
    calls = []
    monkeypatch.setattr(chunks, "slice_state", lambda *a, own=chunks.slice_state: calls.append(a[2:]) or own(*a))
    sliced, _ = run(make, "bf16 master=split16")
    assert {(0, 4096), (4096, 8192), (8192, 12544)} <= set(calls)
    assert_same_states(sliced.optimizer, whole.optimizer)
    for (name, weight), (_, other) in zip(sliced.weights(), whole.weights(), strict=True):
        assert torch.equal(weight, other), name


def test_slices_with_a_last_block_that_is_not_full(make, library, monkeypatch):
    """9,024 and 13,818 elements, in blocks of 256: torchao keeps fp32 states then, and whole parameters."""

    def uneven():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 141), nn.Tanh(), nn.Linear(141, 98), nn.Tanh(), nn.Linear(98, 5))

    whole, _ = run(make, "bf16 master=split16", model=uneven())
    monkeypatch.setattr(chunks, "_SMALLEST_BYTES", 0)
    calls = []
    monkeypatch.setattr(chunks, "slice_state", lambda *a, own=chunks.slice_state: calls.append(a[2:]) or own(*a))
    sliced, _ = run(make, "bf16 master=split16", model=uneven())
    assert ((8192, 13818) in calls) == (library[0] == "bitsandbytes")
    mine, yours = dict(flat_state(sliced.optimizer)), dict(flat_state(whole.optimizer))
    assert mine.keys() == yours.keys()
    for key in yours:
        assert torch.equal(mine[key], yours[key]), key


def test_a_parameter_is_sliced_where_each_slice_gets_the_states_of_the_whole(make, library):
    """Both keep fp32 states of small tensors, torchao also where the blocks do not come out even."""
    even, uneven = nn.Parameter(torch.zeros(128, 98)), nn.Parameter(torch.zeros(150, 60))
    optimizer = make([even, uneven])
    assert slices_at(optimizer, even)
    assert slices_at(optimizer, uneven) == (library[0] == "bitsandbytes")
    large = {"torchao": {"block_size": 8192}, "bitsandbytes": {"min_8bit_size": 16384}}[library[0]]
    parameter = nn.Parameter(torch.zeros(128, 128))
    assert not slices_at(library[1]([parameter], **large), parameter)


def test_chunks_leave_room_for_the_states_that_are_unpacked(make):
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2)))
    gradients = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
    sizes = []
    for optimizer in (make(model.parameters()), torch.optim.AdamW(model.parameters())):
        chunk = next(chunks._chunks(optimizer, dict(gradients)))
        sizes.append(sum(part.stop - part.start for part in chunk))
    assert sizes == [2**15, 2**18]  # of 5 MB: 128 bytes an element, and 20


def test_a_resumed_run_takes_the_same_steps_to_the_bit(make):
    stepper, _ = run(make, "bf16 master=split16")
    file = io.BytesIO()
    torch.save((stepper.model.state_dict(), stepper.optimizer.state_dict(), stepper.state_dict()), file)
    file.seek(0)
    states = torch.load(file)
    other, _ = run(make, "bf16 master=split16", steps=0)
    other.model.load_state_dict(states[0])
    other.optimizer.load_state_dict(states[1])
    other.load_state_dict(states[2])
    assert_same_states(other.optimizer, stepper.optimizer)
    for number in range(3):
        step(stepper, number)
        step(other, number)
    assert_same_states(other.optimizer, stepper.optimizer)
    for (name, weight), (_, same) in zip(other.weights(), stepper.weights(), strict=True):
        assert torch.equal(weight, same), name
