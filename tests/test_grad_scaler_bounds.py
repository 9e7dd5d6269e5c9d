"""GradScaler's floor, ceiling and hysteresis, and when a scale is exhausted."""

from __future__ import annotations

import re

import pytest
import torch
import torch._dynamo.testing
from reference.scaler_loop import INF, NAN, TORCH, Loop, contains
from torch import nn

from halfstep import grad_scaler
from halfstep.errors import HalfstepError, ScaleExhausted
from halfstep.grad_scaler import GradScaler

# --- the bounds ----------------------------------------------------------------------------------------------------


def test_a_scale_that_torch_takes_to_zero_stays_at_the_floor(monkeypatch):
    """166 overflows, then a clean step: torch's weights are NaN, ours as they should be."""
    monkeypatch.setattr(grad_scaler, "_STOP_AFTER", 10**6)
    theirs, ours = Loop(TORCH, init_scale=2.0**16), Loop(init_scale=2.0**16)
    assert theirs.run([True] * 166)[-1] == 0.0
    assert ours.run([True] * 166) == [2.0 ** max(0, 15 - n) for n in range(166)]
    theirs.run([False])
    ours.run([False])
    assert theirs.weight.isnan().all()
    assert torch.equal(ours.weight, torch.full((3,), 0.9))


def test_growth_ends_at_the_ceiling():
    assert Loop(growth_interval=1).run([False] * 12) == [2.0 ** min(24, 17 + n) for n in range(12)]
    assert Loop(growth_interval=1, ceiling=2.0**17, growth_factor=3.0).run([False] * 3) == [2.0**17] * 3


@pytest.mark.parametrize("init", [0.5, 2.0**30, 3, 1e-3, 2.0**-126, 2.0**127])
def test_an_init_scale_outside_the_bounds_widens_them(init):
    scaler = GradScaler("cpu", init_scale=init, growth_interval=1)
    assert (scaler.floor, scaler.ceiling) == (min(1.0, torch.tensor(init).item()), max(2.0**24, init))
    loop = Loop()
    loop.scaler = scaler
    scaler.scale(torch.ones(()))
    assert scaler.get_scale() == torch.tensor(float(init)).item()


@pytest.mark.parametrize(
    "kwargs",
    [{"init_scale": 0.5, "floor": 1.0}, {"ceiling": 2.0}, {"floor": 2.0**20}, {"floor": 8.0, "ceiling": 4.0}],
)
def test_bounds_that_contradict_are_refused(kwargs):
    with pytest.raises(HalfstepError, match="the scale starts outside its bounds"):
        GradScaler("cpu", **kwargs)


@pytest.mark.parametrize("name", ["init_scale", "floor", "ceiling"])
@pytest.mark.parametrize("value", [0.0, -1.0, INF, NAN, 1e-60, 1e60])
def test_a_scale_that_is_no_positive_number_is_refused(name, value):
    with pytest.raises(HalfstepError, match=re.escape(f"{name}={value}")):
        GradScaler("cpu", **{name: value})


@pytest.mark.parametrize("hysteresis", [0, -1, 1.5])
def test_hysteresis_is_a_whole_number(hysteresis):
    with pytest.raises(HalfstepError, match="a whole number of overflows"):
        GradScaler("cpu", hysteresis=hysteresis)


def test_hysteresis_skips_without_lowering_and_a_clean_step_starts_anew():
    loop = Loop(init_scale=64.0, hysteresis=2)
    assert loop.run([True, False, True, False]) == [64.0] * 4
    assert loop.run([True, True, True, False]) == [64.0, 32.0, 16.0, 16.0]
    assert torch.equal(loop.weight.detach()[:1], loop.weight.detach()[1:2])  # no inf went in
    assert loop.optimizer.state[loop.weight]["momentum_buffer"].isfinite().all()


@pytest.mark.parametrize("value", [2, 2.0, 0.25, 2.0**30, torch.tensor(2.0)])
def test_update_takes_a_new_scale(value):
    loop = Loop()
    loop.step()
    loop.scaler.update(value)
    assert loop.scaler.get_scale() == float(value)
    loop.run([False, True])
    assert loop.scaler.get_scale() == max(float(value) / 2, loop.scaler.floor)


@pytest.mark.parametrize("value", [0, -1.0, NAN, INF])
def test_update_refuses_a_new_scale_that_would_end_the_run(value):
    loop = Loop()
    loop.step()
    with pytest.raises(HalfstepError, match="new_scale="):
        loop.scaler.update(value)
    assert loop.scaler.get_scale() == 2.0**16


def test_update_brings_a_tensor_between_the_bounds():
    loop = Loop()
    for value, expected in ((0.0, 1.0), (2.0**30, 2.0**24)):
        loop.step()
        loop.scaler.update(torch.tensor(value))
        assert loop.scaler.get_scale() == expected
    with pytest.raises(AssertionError, match="1-element"):
        loop.scaler.update(torch.ones(2))


# --- an exhausted scale --------------------------------------------------------------------------------------------


def exhaust(loop, limit=1000):
    """The number of the overflow that ends the run, and the error."""
    for num in range(1, limit):
        loop.step(True)
        try:
            loop.scaler.update()
        except ScaleExhausted as error:
            return num, error
    raise AssertionError("never")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, 20),
        ({"init_scale": 1.0}, 20),
        ({"init_scale": 2.0**24}, 25),  # 24 to the floor, and one there
        ({"init_scale": 2.0**19}, 20),
        ({"init_scale": 2.0**20}, 21),
        ({"backoff_factor": 0.125}, 20),
        ({"hysteresis": 9}, 25),  # 8 tolerated, 16 to the floor, and one there
        ({"init_scale": 2.0**16, "floor": 2.0**10}, 20),
        ({"init_scale": 0.1}, 20),  # a floor that fp32 rounds
    ],
)
def test_the_20th_overflow_in_a_row_stops_if_it_is_at_the_floor(optimizer, kwargs, expected):
    loop = Loop(optimizer=optimizer, **kwargs)
    loop.run([False])
    before = [value.clone() for value in loop.result()]
    num, error = exhaust(loop)
    assert num == expected
    assert contains(error, "weight (shape (3,)) is still not finite")
    assert contains(error, f"at its floor of {loop.scaler.floor:g}")
    assert all(map(torch.equal, loop.result(), before))
    # One that is caught leaves a scaler that goes on, and stops again.
    assert exhaust(loop)[0] == 1
    assert loop.run([False] + [True] * 19)[-1] == loop.scaler.floor
    assert exhaust(loop)[0] == 1


@pytest.mark.parametrize("kwargs", [{}, {"init_scale": 1.0}])
@pytest.mark.parametrize("optimizer", ["sgd", "fused adamw"])
def test_bad_batches_between_good_ones_stop_nothing(kwargs, optimizer):
    loop = Loop(optimizer=optimizer, **kwargs)
    for _ in range(8):
        loop.run([True] * 19 + [False])
    assert loop.weight.isfinite().all()
    assert not torch.equal(loop.weight, torch.ones(3))


@pytest.mark.parametrize("optimizer", ["fused adamw", "fused sgd"])
@pytest.mark.parametrize(("num_clean", "expected"), [(0, 64), (1, 63), (44, 20), (45, 83), (64, 64)])
def test_a_fused_run_is_looked_at_every_64_updates(optimizer, num_clean, expected):
    loop = Loop(optimizer=optimizer)
    loop.run([False] * num_clean)
    num, error = exhaust(loop)
    assert num == expected
    assert contains(error, "weight (shape (3,))")


def test_a_clean_step_just_before_the_look_saves_a_fused_run():
    loop = Loop(optimizer="fused adamw", init_scale=1.0)
    assert loop.run([True] * 63 + [False]) == [1.0] * 64


def test_first_steps_of_fused_sgd_are_decided_on_the_host_and_looked_at_there():
    loop = Loop()
    loop.optimizer = torch.optim.SGD([loop.weight], lr=0.1, momentum=0.9, fused=True)
    assert exhaust(loop)[0] == 20


def test_one_of_two_optimizers_is_enough_and_is_named():
    scaler = GradScaler("cpu", init_scale=1.0)
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    first, second = torch.optim.SGD([a], lr=0.1), torch.optim.AdamW([b], lr=0.1, fused=True)

    def iterate():
        first.zero_grad()
        second.zero_grad()
        scaler.scale(a.sum() + b.sum()).backward()
        a.grad.fill_(NAN)
        scaler.step(first)
        scaler.step(second)
        scaler.update()

    for _ in range(19):
        iterate()
    with pytest.raises(ScaleExhausted, match=r"of parameter 0 of group 0 \(shape \(2,\)\) is still not finite"):
        iterate()
    assert torch.equal(a, torch.ones(2))


def test_gradients_that_are_gone_before_update_are_said():
    loop = Loop(init_scale=1.0)
    loop.run([True] * 19)
    loop.step(True)
    loop.optimizer.zero_grad()
    with pytest.raises(ScaleExhausted, match="the gradient of a parameter is still not finite"):
        loop.scaler.update()


def test_a_resumed_run_counts_on():
    loop = Loop()
    loop.run([True] * 15)
    resumed = Loop()
    resumed.scaler.load_state_dict(loop.scaler.state_dict())
    assert exhaust(resumed)[0] == 5
    assert exhaust(loop)[0] == 5
