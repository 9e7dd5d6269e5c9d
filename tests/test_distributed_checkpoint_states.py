"""What a checkpoint costs in memory and on disk, and optimizer states of other kinds than a tensor for each weight."""

import warnings

import pytest
import torch
from reference.loop import assert_same
from torch import nn

from halfstep import Stepper
from halfstep.compare.memory import LiveBytes
from halfstep.distributed import load, save, store

pytestmark = pytest.mark.usefixtures("kernels_stay")


def everything_of(stepper):
    return [
        dict(stepper.model.state_dict()),
        stepper.optimizer.state_dict(),
        stepper.state_dict(),
        torch.get_rng_state(),
    ]


def wide(policy, accumulate=2):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(20)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return Stepper(model, optimizer, policy, accumulate=accumulate, watch=False)


def trained_wide(policy, num=3):
    stepper = wide(policy)
    for _ in range(num):
        stepper.step(lambda: stepper.model(torch.randn(1, 128)).float().square().mean())
    return stepper


LAYER = 128 * 128


def bytes_more(stepper, call):
    """How many bytes of tensors there are at the peak of a call, beside those of the run."""
    live = LiveBytes()
    live.count(p.data for p in stepper.model.parameters())
    live.count(p.grad for p in stepper.model.parameters() if p.grad is not None)
    live.count(stepper.masters.rests())
    live.count(value for state in stepper.optimizer.state.values() for value in state.values())
    before = live.now
    with live:
        call()
    return live.peak - before


@pytest.mark.parametrize("policy", [pytest.param("bf16", marks=pytest.mark.slow), "bf16 master=split16"])
def test_saving_copies_no_tensor_and_loading_one_at_a_time(policy, tmp_path):
    stepper = trained_wide(policy)
    assert bytes_more(stepper, lambda: save(tmp_path, stepper)) < LAYER  # random state and numbers of the window
    resumed = wide(policy)
    more = bytes_more(resumed, lambda: load(tmp_path, resumed))
    # New are the states and gradients, 12 bytes a weight. A file's tensor is there for a moment, of 4 bytes, with what
    # a weight and its rest are put together from, of 2 + 2, 4 and 4.
    assert 20 * LAYER * 12 <= more <= 20 * LAYER * 12 + LAYER * 16


@pytest.mark.parametrize(("policy", "weight"), [("bf16", 4), ("bf16 master=split16", 4), ("bf16 master=split8", 3)])
def test_size_on_disk(policy, weight, tmp_path):
    """The sum of the states, and a name and a header for each tensor."""
    path = save(tmp_path, trained_wide(policy))
    size = sum(file.stat().st_size for file in path.iterdir())
    states = 20 * LAYER * (weight + 8 + 4) + 20 * 4
    num_tensors = 20 * (1 + ("master" in policy) + 3 + 1)
    print(
        f"{policy}: {size} bytes on disk, {states} in {num_tensors} tensors: {(size - states) / num_tensors:.0f} each"
    )
    assert states < size < states + num_tensors * 2500 + 2**15


def test_files_are_of_a_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_FILE_BYTES", 3 * 4 * LAYER)
    stepper = trained_wide("bf16")
    path = save(tmp_path, stepper)
    sizes = [file.stat().st_size for file in path.glob("*.distcp")]
    assert len(sizes) > 20
    assert max(sizes) < 3 * 4 * LAYER + 2**17
    resumed = wide("bf16")
    load(tmp_path, resumed)
    assert_same(everything_of(resumed), everything_of(stepper))


def test_states_in_lists_and_dicts(tmp_path):
    """LBFGS keeps lists of tensors, a None and numbers."""
    steppers = []
    for _ in range(2):
        model = nn.Linear(4, 1)
        stepper = Stepper(model, torch.optim.LBFGS(model.parameters()), "fp32", watch=False)
        x = torch.linspace(-1, 1, 32).reshape(8, 4)

        def step(stepper=stepper, x=x):
            return stepper.step(lambda: (stepper.model(x) - x.sum(1, keepdim=True)).square().mean())

        steppers.append((stepper, step))
    steppers[0][1]()
    save(tmp_path, steppers[0][0])
    load(tmp_path, steppers[1][0])
    assert_same(everything_of(steppers[1][0]), everything_of(steppers[0][0]))
    assert str(steppers[0][1]().to_dict()) == str(steppers[1][1]().to_dict())


@pytest.mark.slow
def test_quantised_states(tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels for devices that are not here
        optim = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # its step, for minutes
    steppers = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Linear(64, 64, bias=False)
        steppers.append(Stepper(model, optim.AdamW8bit(model.parameters()), "fp32", watch=False))
    stepper, resumed = steppers
    for number in range(2):
        stepper.step(lambda number=number: stepper.model(torch.ones(1, 64) * number).square().mean())
    save(tmp_path, stepper)
    load(tmp_path, resumed)
    assert torch.equal(resumed.model.weight, stepper.model.weight)
    (own,), (its,) = resumed.optimizer.state.values(), stepper.optimizer.state.values()
    assert own.keys() == its.keys()
    for key in ("exp_avg", "exp_avg_sq"):
        assert type(own[key]) is type(its[key])
        assert torch.equal(own[key].codes, its[key].codes)
        assert torch.equal(own[key].scale, its[key].scale)
    assert torch.equal(own["step"], its["step"])


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["bf16", "fp16 master=split16"])
def test_on_cuda_a_run_goes_on_with_the_same_bits(policy, tmp_path):
    """Dropout draws from the device's generator; fused AdamW has its counts of steps there."""

    def build_there():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.Linear(64, 64)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        return Stepper(model, optimizer, policy, accumulate=2, watch=False)

    def train(stepper, numbers):
        x = torch.linspace(-1, 1, 8 * 64, device="cuda").view(8, 64)
        return [stepper.step(lambda n=n: (stepper.model(x * n).float() - x).square().mean()) for n in numbers]

    stepper = build_there()
    train(stepper, range(5))
    save(tmp_path, stepper)
    resumed = build_there()
    after = str(train(stepper, range(5, 8))[0].to_dict())
    load(tmp_path, resumed)
    assert all(value.is_cuda for state in resumed.optimizer.state.values() for value in state.values())
    assert str(train(resumed, range(5, 8))[0].to_dict()) == after
    assert_same(everything_of(resumed), everything_of(stepper))
