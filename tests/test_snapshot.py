"""What a forward pass changes besides its output: saved, put back, to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from halfstep.snapshot import RandomState, RunningStatistics

CPU = torch.device("cpu")


def buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


# --- random state --------------------------------------------------------------------------------------------------


def test_restore_repeats_the_draws_and_can_be_done_twice():
    state = RandomState(CPU)
    torch.default_generator.manual_seed(3)
    torch.randn(5)
    state.save()
    first = [torch.randn(7), torch.rand(3), torch.randperm(9), nn.functional.dropout(torch.ones(50))]
    for _ in range(2):
        state.restore()
        again = [torch.randn(7), torch.rand(3), torch.randperm(9), nn.functional.dropout(torch.ones(50))]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_restore_keeps_the_half_of_a_pair_of_normals_that_is_still_to_come():
    """randn of an odd number on the CPU leaves one normal in the generator's cache, which belongs to the state."""
    state = RandomState(CPU)
    torch.default_generator.manual_seed(0)
    torch.randn(1)
    state.save()
    first = torch.randn(1), torch.randn(3)
    state.restore()
    again = torch.randn(1), torch.randn(3)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def test_a_later_save_replaces_the_earlier():
    state = RandomState(CPU)
    state.save()
    torch.randn(3)
    state.save()
    first = torch.randn(3)
    state.restore()
    assert torch.equal(first, torch.randn(3))


def test_restore_without_save_is_our_own_mistake():
    with pytest.raises(AssertionError, match="after save"):
        RandomState(CPU).restore()


@pytest.mark.gpu
def test_restore_covers_the_device_and_the_cpu():
    device = torch.device("cuda")
    state = RandomState(device)
    state.save()
    first = torch.randn(5, device=device), torch.randn(5)
    state.restore()
    again = torch.randn(5, device=device), torch.randn(5)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


# --- running statistics --------------------------------------------------------------------------------------------


class Own(nn.Module):
    """A layer of the user's own that keeps a running mean and nothing else."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))

    def forward(self, x):
        self.running_mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.running_mean


MODELS = {
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4))),
    "cumulative": lambda: nn.Sequential(nn.BatchNorm1d(4, momentum=None)),
    "instance norm": lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.InstanceNorm1d(1, track_running_stats=True)),
    "a batch norm alone": lambda: nn.BatchNorm1d(4),
    "own layer": lambda: nn.Sequential(Own(), nn.BatchNorm1d(4)),
    "double": lambda: nn.BatchNorm1d(4).double(),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_forward_pass_with_a_nan_is_undone_to_the_bit(name):
    torch.default_generator.manual_seed(0)
    model = MODELS[name]()
    dtype = next(model.buffers()).dtype
    model(torch.randn(6, 4, dtype=dtype))
    statistics = RunningStatistics(model)
    assert statistics
    before = buffers(model)
    statistics.save()
    model(torch.full((6, 4), float("nan"), dtype=dtype))
    assert any(not torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    statistics.restore()
    assert_equal(buffers(model), before)


@pytest.mark.parametrize("name", ["layer norm", "no tracking", "nothing"])
def test_a_model_without_running_statistics_is_false_and_costs_nothing(name):
    layers = {"layer norm": nn.LayerNorm(4), "no tracking": nn.BatchNorm1d(4, track_running_stats=False)}
    statistics = RunningStatistics(layers.get(name, nn.Identity()))
    assert not statistics
    statistics.save()
    statistics.restore()
    assert statistics.state_dict() == {}


def test_restore_before_any_save_gives_what_the_model_began_with():
    model = nn.BatchNorm1d(4)
    statistics = RunningStatistics(model)
    before = buffers(model)
    model(torch.randn(8, 4))
    statistics.restore()
    assert_equal(buffers(model), before)


def test_the_buffers_stay_the_same_objects():
    model = nn.BatchNorm1d(4)
    mean = model.running_mean
    statistics = RunningStatistics(model)
    statistics.save()
    model(torch.randn(8, 4))
    statistics.restore()
    assert model.running_mean is mean


def test_other_buffers_are_left_alone():
    model = nn.Sequential(nn.BatchNorm1d(4))
    model.register_buffer("counter", torch.zeros(()))
    statistics = RunningStatistics(model)
    statistics.save()
    model.counter += 5
    statistics.restore()
    assert model.counter == 5


def test_a_layer_used_under_two_names_is_saved_once():
    layer = nn.BatchNorm1d(4)
    model = nn.ModuleDict({"a": layer, "b": layer})
    assert set(RunningStatistics(model).state_dict()) == {"a.running_mean", "a.running_var", "a.num_batches_tracked"}


def test_state_round_trip_into_a_copy_of_the_model():
    model = MODELS["batch norm"]()
    statistics = RunningStatistics(model)
    model(torch.randn(6, 4))
    statistics.save()
    saved = buffers(model)
    model(torch.randn(6, 4))
    twin = copy.deepcopy(model)
    other = RunningStatistics(twin)
    other.load_state_dict(statistics.state_dict())
    assert_equal(buffers(twin), buffers(model))
    other.restore()
    assert_equal(buffers(twin), saved)


def test_a_state_is_a_copy():
    model = nn.BatchNorm1d(4)
    statistics = RunningStatistics(model)
    state = statistics.state_dict()
    model(torch.randn(6, 4))
    statistics.save()
    assert torch.equal(state["running_mean"], torch.zeros(4))


def test_a_state_without_an_entry_means_what_the_model_holds_now():
    model = nn.BatchNorm1d(4)
    statistics = RunningStatistics(model)
    model(torch.randn(6, 4))
    before = buffers(model)
    statistics.load_state_dict({})
    model(torch.randn(6, 4))
    statistics.restore()
    assert_equal(buffers(model), before)
