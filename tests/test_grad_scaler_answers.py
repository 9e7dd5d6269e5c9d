"""What GradScaler answers where torch's says too little: steps, parameters at fault, errors, states."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch._dynamo.testing
from reference.scaler_loop import INF, NAN, TORCH, Loop, contains, draws, every_optimizer, every_stage
from torch import nn

from halfstep.errors import HalfstepError
from halfstep.grad_scaler import GradScaler

# --- answers -------------------------------------------------------------------------------------------------------


@every_optimizer
@every_stage
def test_last_step_applied(optimizer, unscales):
    loop = Loop(optimizer=optimizer)
    assert loop.scaler.last_step_applied is None
    assert loop.scaler.step_applied(loop.optimizer) is None
    for bad in (False, True, True, False, NAN, False):
        before = loop.weight.detach().clone()
        loop.step(bad, unscales)
        for _ in range(2):
            assert loop.scaler.last_step_applied is not bool(bad)
            assert loop.scaler.step_applied(loop.optimizer) is not bool(bad)
            loop.scaler.update() if _ == 0 else None
        assert torch.equal(loop.weight, before) == bool(bad)


def test_each_of_two_optimizers_has_its_own_answer():
    scaler = GradScaler("cpu")
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weights[0]], lr=0.1), torch.optim.AdamW([weights[1]], lr=0.1, fused=True)]
    for bad in (0, 1):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(sum(weight.sum() for weight in weights)).backward()
        weights[bad].grad.fill_(INF)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert [scaler.step_applied(optimizer) for optimizer in optimizers] == [bad == 1, bad == 0]
        assert scaler.last_step_applied is (bad == 0)
    assert scaler.get_scale() == 2.0**14
    assert scaler.step_applied(torch.optim.SGD(weights, lr=0.1)) is None


def test_parameters_at_fault_are_named():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Embedding(4, 2, sparse=True))
    optimizer = torch.optim.SGD(
        [{"params": list(model[0].named_parameters())}, {"params": list(model[1:].named_parameters())}], lr=0.1
    )
    scaler = GradScaler("cpu", init_scale=4.0)
    assert scaler.parameters_at_fault(optimizer) == []
    scaler.scale(model[1](model[0](torch.ones(1, 2))).sum() + model[2](torch.tensor([1, 1])).sum()).backward()
    model[0].bias.grad[2] = NAN
    model[1].weight.grad[0, 1] = -INF
    assert scaler.parameters_at_fault(optimizer) == ["bias (shape (3,))", "1.weight (shape (1, 3))"]
    model[2].weight.grad = model[2].weight.grad * INF
    assert scaler.parameters_at_fault(optimizer)[2:] == ["2.weight (shape (4, 2))"]
    plain = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.1)
    assert scaler.parameters_at_fault(plain) == [
        "parameter 1 of group 0 (shape (3,))",
        "parameter 0 of group 1 (shape (1, 3))",
    ]


def test_a_large_gradient_is_not_at_fault():
    """Its norm overflows, its elements are finite."""
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), 3e38)
    assert GradScaler("cpu").parameters_at_fault(torch.optim.SGD([weight], lr=0.1)) == []


# --- errors --------------------------------------------------------------------------------------------------------


def both(cls, exception):
    """Who catches what torch raises, or a HalfstepError, catches it."""
    assert issubclass(cls, exception)
    assert issubclass(cls, HalfstepError)
    return True


def test_fp16_weights_are_named_with_the_cure():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 8.0)
    for _ in range(2):  # nothing was changed, so that it says the same again
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients") as caught:
            scaler.unscale_(optimizer)
        assert both(caught.type, ValueError)
        assert contains(caught.value, "gradients of 1.weight (shape (2, 2)), 1.bias (shape (2,)): ")
        assert contains(caught.value, "model.float()")
    assert model[0].weight.grad.eq(8.0).all()


def test_a_value_error_of_another_kind_stays():
    class Odd(GradScaler):
        pass

    loop = Loop(Odd)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TORCH, "_unscale_grads_", lambda *args: (_ for _ in ()).throw(ValueError("odd")))
        with pytest.raises(ValueError, match=r"^odd$"):
            loop.step()


@pytest.mark.parametrize("method", ["unscale_", "step", "update"])
@pytest.mark.parametrize("optimizer", ["sgd", "fused adamw"])
def test_a_loss_that_was_never_scaled(method, optimizer):
    loop = Loop(optimizer=optimizer)
    loop.weight.sum().backward()
    args = () if method == "update" else (loop.optimizer,)
    with pytest.raises(AssertionError, match="before any loss was scaled") as caught:
        getattr(loop.scaler, method)(*args)
    assert both(caught.type, AssertionError)
    assert torch.equal(loop.weight, torch.ones(3))


@every_stage
def test_an_optimizer_without_gradients(unscales):
    loop = Loop()
    loop.scaler.scale(torch.ones((), requires_grad=True)).backward()
    if unscales:
        loop.scaler.unscale_(loop.optimizer)  # torch says nothing here, and neither do we
    with pytest.raises(AssertionError, match="step\\(\\) of SGD without gradients: a loss was scaled") as caught:
        loop.scaler.step(loop.optimizer)
    assert both(caught.type, AssertionError)


def test_gradients_that_came_after_unscale_are_not_taken_for_unscaled():
    loop = Loop()
    loss = loop.scaler.scale(loop.weight.sum())
    loop.scaler.unscale_(loop.optimizer)
    loss.backward()
    with pytest.raises(AssertionError, match="before unscale_"):
        loop.scaler.step(loop.optimizer)
    assert torch.equal(loop.weight, torch.ones(3))


def test_update_without_a_step():
    loop = Loop()
    loop.scaler.scale(loop.weight.sum())
    with pytest.raises(AssertionError, match="update\\(\\) without a step") as caught:
        loop.scaler.update()
    assert both(caught.type, AssertionError)
    loop.run([False])
    with pytest.raises(AssertionError, match="update\\(\\) without a step"):
        loop.scaler.update()


@every_optimizer
def test_the_order_that_torch_refuses_is_refused(optimizer):
    loop = Loop(optimizer=optimizer)
    loop.step(unscales=True)
    with pytest.raises(RuntimeError, match="step\\(\\) has already been called"):
        loop.scaler.step(loop.optimizer)
    with pytest.raises(RuntimeError, match="called after step"):
        loop.scaler.unscale_(loop.optimizer)
    loop.scaler.update()
    with pytest.raises(RuntimeError, match="Closure use is not"):
        loop.scaler.step(loop.optimizer, closure=lambda: 0.0)
    loop.step()
    loop.scaler.update()
    loop.weight.sum().backward()
    loop.scaler.unscale_(loop.optimizer)
    with pytest.raises(RuntimeError, match="unscale_\\(\\) has already been called"):
        loop.scaler.unscale_(loop.optimizer)


# --- state ---------------------------------------------------------------------------------------------------------

PATIENT = {"init_scale": 2.0**9, "growth_interval": 5, "hysteresis": 3, "floor": 0.25, "ceiling": 2.0**12}


@pytest.mark.parametrize("num", [0, 1, 7, 30])
@pytest.mark.parametrize("how", ["state", "pickle", "deepcopy", "state into a running one"])
def test_a_round_trip_goes_on_the_same(num, how):
    loop, other = Loop(**PATIENT), Loop()
    loop.run(draws(num, 0.5, num))
    if how == "pickle":
        other.scaler = pickle.loads(pickle.dumps(loop.scaler))
        assert other.scaler.last_step_applied == loop.scaler.last_step_applied
    elif how == "deepcopy":
        other.scaler = copy.deepcopy(loop.scaler)
    else:
        if how.endswith("one"):
            other.run([True, False])
        file = io.BytesIO()
        torch.save(loop.scaler.state_dict(), file)
        file.seek(0)
        other.scaler.load_state_dict(torch.load(file, weights_only=True))
    assert other.scaler.state_dict() == loop.scaler.state_dict()
    verdicts = draws("on", 0.5, 60)
    assert other.run(verdicts) == loop.run(verdicts)
    assert other.scaler.state_dict() == loop.scaler.state_dict()


@pytest.mark.parametrize("is_running", [False, True])
def test_states_travel_to_torch_and_back(is_running):
    ours, theirs = Loop(growth_interval=4), Loop(TORCH)
    ours.run([False, False, True, False, False, False])
    if is_running:
        theirs.run([False])
    theirs.scaler.load_state_dict(ours.scaler.state_dict())
    verdicts = [False, False, True, True, False]
    assert theirs.run(verdicts) == ours.run(verdicts)
    back = Loop()
    back.scaler.load_state_dict(theirs.scaler.state_dict())
    assert (back.scaler.floor, back.scaler.ceiling, back.scaler.hysteresis) == (1.0, 2.0**24, 1)
    assert back.run(verdicts) == theirs.run(verdicts)


@pytest.mark.parametrize("scale", [2.0**-30, 2.0**40])
def test_a_state_of_torch_beyond_the_bounds_widens_them(scale):
    loop = Loop()
    loop.scaler.load_state_dict(TORCH("cpu", init_scale=scale).state_dict())
    assert loop.run([False]) == [scale]


def test_states_that_cannot_be_loaded():
    loop = Loop()
    loop.run([True])
    before = loop.scaler.state_dict()
    with pytest.raises(RuntimeError, match="an empty state: it was saved by a scaler that was not enabled") as caught:
        loop.scaler.load_state_dict({})
    assert both(caught.type, RuntimeError)
    with pytest.raises(HalfstepError, match="a state without growth_interval, _growth_tracker"):
        loop.scaler.load_state_dict({k: before[k] for k in ("scale", "growth_factor", "backoff_factor")})
    for scale in (0.0, NAN, INF, -1.0):
        with pytest.raises(HalfstepError, match="the scale of a state="):
            loop.scaler.load_state_dict(before | {"scale": scale})
    assert loop.scaler.state_dict() == before


def test_pickling_inside_an_iteration_is_refused_as_in_torch():
    loop = Loop()
    loop.step()
    with pytest.raises(AssertionError, match="may only be pickled"):
        pickle.dumps(loop.scaler)


def test_a_scaler_keeps_no_optimizer_alive():
    loop = Loop()
    loop.run([False])
    loop.optimizer = None
    assert list(loop.scaler._verdicts) == []
