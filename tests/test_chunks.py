"""The step in chunks: sliced or whole, the same weights and states to the bit, without a temporary of model size."""

import pytest
import torch
from torch import nn

from halfstep import Stepper, chunks
from halfstep.compare.memory import LiveBytes
from halfstep.states import GRAIN, slices_at

pytestmark = pytest.mark.usefixtures("kernels_stay")

ELEMENTWISE = {
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adam amsgrad": lambda ps: torch.optim.Adam(ps, amsgrad=True, weight_decay=0.1),
    "adamw": torch.optim.AdamW,
    "adamw fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "adamw capturable": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1e-3), foreach=False),
    "adamax": torch.optim.Adamax,
    "asgd": lambda ps: torch.optim.ASGD(ps, lambd=0.1),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, centered=True, momentum=0.9),
    "rprop": torch.optim.Rprop,
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "sgd fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True, maximize=True),
}
WHOLE = {
    "adafactor": torch.optim.Adafactor,
    "muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2]),
    "a subclass": lambda ps: type("Mine", (torch.optim.AdamW,), {})(ps),
}


def net():
    torch.manual_seed(0)
    # 9,000 and 21,000 elements: with slices of 4,096 the last ones are 4,904 and 4,616; and two that fit into one.
    return nn.Sequential(nn.Linear(60, 150), nn.Tanh(), nn.Linear(150, 140), nn.Tanh(), nn.Linear(140, 7))


def run(make, policy, steps=4, **settings):
    model = net()
    optimizer = make(model.parameters())
    stepper = Stepper(model, optimizer, policy, **settings)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, 60, generator=generator)
        stepper.step(lambda x=x: (model(x).float() - x[:, :7]).square().mean())
    return stepper


def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "_SMALLEST_BYTES", 0)
    monkeypatch.setattr(chunks, "_FIRST_CHUNKS", 10**9)


def assert_same(first, second):
    for (name, weight), (_, other) in zip(first.weights(), second.weights(), strict=True):
        assert torch.equal(weight, other), name
    mine, yours = first.optimizer.state_dict()["state"], second.optimizer.state_dict()["state"]
    assert mine.keys() == yours.keys()
    for number, state in yours.items():
        assert mine[number].keys() == state.keys()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert mine[number][key].shape == value.shape, key
                assert torch.equal(mine[number][key], value), key
            else:
                assert mine[number][key] == value, key


@pytest.mark.parametrize("make", ELEMENTWISE.values(), ids=ELEMENTWISE)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_slices_change_no_bit(make, accumulate, monkeypatch):
    whole = run(make, "bf16 master=split16", max_norm=0.1, accumulate=accumulate)
    small_chunks(monkeypatch)
    calls = []
    monkeypatch.setattr(chunks, "slice_state", lambda *a, own=chunks.slice_state: calls.append(a[2:]) or own(*a))
    sliced = run(make, "bf16 master=split16", max_norm=0.1, accumulate=accumulate)
    assert (0, 4096) in calls
    assert (16384, 21000) in calls
    assert_same(sliced, whole)


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
def test_optimizers_that_are_not_known_to_be_elementwise_see_whole_parameters(make, monkeypatch):
    whole = run(make, "bf16 master=split16")
    small_chunks(monkeypatch)
    monkeypatch.setattr(chunks, "slice_state", None)  # a call would fail
    assert_same(run(make, "bf16 master=split16"), whole)


@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_of_torch_that_take_whole_parameters_take_them_in_chunks(name, monkeypatch):
    small_chunks(monkeypatch)
    model = net()
    optimizer = WHOLE[name](model.parameters())
    gradients = {p: torch.zeros_like(p) for group in optimizer.param_groups for p in group["params"]}
    num_chunks = len(list(chunks._chunks(optimizer, gradients)))
    assert (num_chunks == 1) == (name == "a subclass")


def test_a_state_that_is_none_grows_to_the_whole_parameter(monkeypatch):
    """As the momentum of SGD in checkpoints of old versions of torch."""
    small_chunks(monkeypatch)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = None
    stepper = Stepper(model, optimizer, "bf16 master=split16")
    for _ in range(2):
        stepper.step(lambda: model(torch.ones(8, 60)).float().square().mean())
    for parameter in model.parameters():
        assert optimizer.state[parameter]["momentum_buffer"].shape == parameter.shape


def test_small_parameters_come_first_and_slices_are_powers_of_two(monkeypatch):
    """Since they free room for large ones, and since an optimizer may compile its step for each size."""
    small_chunks(monkeypatch)
    monkeypatch.setattr(chunks, "_SMALLEST_BYTES", 20 * 5000)
    model = nn.Sequential(nn.Linear(90, 100), nn.Linear(100, 10), nn.Linear(10, 60))
    optimizer = torch.optim.AdamW(model.parameters())
    gradients = {p: torch.zeros_like(p) for p in model.parameters()}
    parts = [part for chunk in chunks._chunks(optimizer, gradients) for part in chunk]
    assert [part.stop - part.start for part in parts] == [10, 60, 100, 600, 1000, 4096, 4904]


def test_chunks_grow_into_the_room_that_they_free(monkeypatch):
    """A chunk of n elements needs 20 n bytes, and the gradients before it have freed 2 bytes an element."""
    small_chunks(monkeypatch)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
    optimizer = torch.optim.AdamW(model.parameters())
    gradients = {p: torch.zeros_like(p) for p in model.parameters()}
    sizes = [sum(part.stop - part.start for part in chunk) for chunk in chunks._chunks(optimizer, gradients)]
    assert sum(sizes) == 16 * 256 * 256
    assert all(20 * size <= max(20 * 2 * GRAIN, 2 * sum(sizes[:number])) for number, size in enumerate(sizes))
    assert sizes[-1] >= 65536


def test_a_parameter_that_does_not_lie_in_order_is_not_sliced(monkeypatch):
    small_chunks(monkeypatch)
    torch.manual_seed(0)
    model = nn.Conv2d(32, 64, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())
    stepper = Stepper(model, optimizer, "bf16 master=split16")
    assert not slices_at(optimizer, model.weight)
    twin = nn.Conv2d(32, 64, 3)
    twin.load_state_dict(model.state_dict())
    before = dict(stepper.weights())["weight"].clone()
    stepper.step(lambda: model(torch.randn(1, 32, 5, 5)).float().square().mean())
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(dict(stepper.weights())["weight"], before)


def test_a_skipped_first_step_on_the_device_leaves_states_at_zero(monkeypatch):
    small_chunks(monkeypatch)
    model = net()
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), fused=True), "bf16 master=split16")
    x = torch.randn(8, 60)
    report = stepper.step(lambda: model(x).float().mean() * float("nan"))
    assert not report.applied
    for state in stepper.optimizer.state.values():
        assert all((value == 0).all() for value in state.values())
    report = stepper.step(lambda: model(x).float().square().mean())
    assert report.applied
    assert {float(state["step"]) for state in stepper.optimizer.state.values()} == {1.0}


def test_a_failure_between_chunks_leaves_whole_states(monkeypatch):
    small_chunks(monkeypatch)
    stepper = run(torch.optim.AdamW, "bf16 master=split16")
    model, optimizer = stepper.model, stepper.optimizer
    own, calls = optimizer.step, []

    def fail_at_the_third():
        calls.append(None)
        if len(calls) == 3:
            raise RuntimeError("no")
        return own()

    monkeypatch.setattr(optimizer, "step", fail_at_the_third)
    with pytest.raises(RuntimeError, match="no"):
        stepper.step(lambda: model(torch.randn(8, 60)).float().square().mean())
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].shape == parameter.shape
    monkeypatch.setattr(optimizer, "step", own)
    assert stepper.step(lambda: model(torch.randn(8, 60)).float().square().mean()).applied


def test_sparse_gradients_of_a_16_bit_embedding(monkeypatch):
    small_chunks(monkeypatch)
    torch.manual_seed(0)
    model = nn.Embedding(300, 40, sparse=True)
    twin = nn.Embedding(300, 40, sparse=True)
    twin.load_state_dict(model.state_dict())
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.5), "bf16 master=split16")
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    seen = []
    stepper.optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.float()))
    for index in (torch.tensor([1, 5, 5]), torch.tensor([2, 299, 1])):
        stepper.step(lambda index=index: model(index).float().square().sum())
        twin.weight.grad = seen[-1]
        optimizer.step()
    assert seen[0].is_sparse
    assert torch.equal(dict(stepper.weights())["weight"], twin.weight.detach())


@pytest.mark.parametrize("fused", [True, False])
def test_the_step_needs_no_more_memory_than_the_gradients_it_frees(fused, monkeypatch):
    """Half a million elements in chunks of 4,096 and growing: 20 bytes of scratch an element of the first chunk."""
    small_chunks(monkeypatch)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), fused=fused), "bf16 master=split16", max_norm=1.0)
    x = torch.randn(2, 256)
    stepper.step(lambda: model(x).float().square().mean())
    live = LiveBytes()
    live.count(p.data for p in model.parameters())
    live.count(rest.low for rest in stepper.masters._rests.values())
    live.count(value for state in stepper.optimizer.state.values() for value in state.values())
    stepper.optimizer.register_step_pre_hook(lambda *_: live.count(p.grad for p in model.parameters()))
    before = []
    stepper.optimizer.register_step_pre_hook(lambda *_: before.append(live.now) or live.__enter__())
    stepper.optimizer.register_step_post_hook(lambda *_: live.__exit__(None, None, None))
    stepper.step(lambda: model(x).float().square().mean())
    assert before[0] >= (2 + 2 + 2 + 8) * 8 * 256 * 256
    assert before[0] < live.peak <= before[0] + 20 * GRAIN + 1000  # and a few scalars
    assert live.now < before[0] - 1.9 * 8 * 256 * 256
