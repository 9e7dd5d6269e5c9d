"""save_state and load_state of Accelerate with a Stepper: the run goes on to the bit."""

import accelerate
import pytest
import torch
from accelerated import accelerator_for, adamw, fresh_state, loader, net, train, weights

from halfstep import HalfstepError


@pytest.fixture(autouse=True)
def _state():
    with fresh_state():
        yield


POLICIES = [
    "bf16",
    "fp16 scale.init=65536 scale.interval=3",
    "bf16 master=split16",
    "bf16 master=stochastic",
    "fp16 master=split16 scale.init=1024",
]


def begin(policy, fused=True):
    model = net()
    accelerator = accelerator_for(policy, 2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer := adamw(model, fused), 2)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def state_of(accelerator, model, optimizer, scheduler):
    inner = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    exact = torch.cat([weight.flatten() for _, weight in accelerator.stepper.weights()])
    return [exact, *inner, torch.tensor(scheduler.get_last_lr())]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "loop"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("at", [4, 5], ids=["between", "inside"])
def test_a_run_goes_on_to_the_bit(policy, fused, at, tmp_path):
    """Also in the middle of a window, with its sums; the scale has fallen and counts its clean steps."""
    batches = list(loader(12))
    straight = begin(policy, fused)
    expected = train(*straight[:3], batches, 0.5, straight[3])
    run = begin(policy, fused)
    reports = train(*run[:3], batches[:at], 0.5, run[3])
    run[0].save_state(str(tmp_path))
    with fresh_state():
        torch.manual_seed(5)  # load_state brings the random state too
        accelerator, model, optimizer, scheduler = begin(policy, fused)
        train(accelerator, model, optimizer, batches[-1:], 0.5, scheduler)  # what it has done is gone
        accelerator.load_state(str(tmp_path))
        reports += train(accelerator, model, optimizer, batches[at:], 0.5, scheduler)
        assert reports == expected
        for now, then in zip(state_of(accelerator, model, optimizer, scheduler), state_of(*straight), strict=True):
            assert torch.equal(now, then)
    if "scale.interval" in policy:
        assert len({report["scale"] for report in expected}) > 1


def test_a_checkpoint_of_an_accelerator_of_another_kind(tmp_path):
    model, optimizer = net(), adamw(net())
    other = accelerate.Accelerator(cpu=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    other.register_for_checkpointing(torch.nn.Linear(1, 1))
    other.prepare(model, optimizer, scheduler)
    other.save_state(str(tmp_path))
    with fresh_state():
        accelerator, *_ = begin("bf16")
        with pytest.raises(HalfstepError, match="not that of halfstep"):
            accelerator.load_state(str(tmp_path))


def test_a_checkpoint_of_another_number_of_optimizers(tmp_path):
    model, accelerator = net(), accelerator_for("bf16")
    accelerator.prepare(model, *(torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)))
    accelerator.save_state(str(tmp_path))
    with fresh_state():
        model, accelerator = net(), accelerator_for("bf16")
        accelerator.prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
        with pytest.raises(HalfstepError, match="of 2 optimizers for 1"):
            accelerator.load_state(str(tmp_path))


def test_objects_of_the_user_come_after_ours(tmp_path):
    accelerator, model, optimizer, _ = begin("bf16")
    extra = torch.nn.Linear(1, 1)
    accelerator.register_for_checkpointing(extra)
    train(accelerator, model, optimizer, loader(2))
    accelerator.save_state(str(tmp_path))
    before, kept = extra.weight.detach().clone(), weights(model)
    torch.nn.init.zeros_(extra.weight)
    torch.nn.init.zeros_(model[0].weight)
    accelerator.load_state(str(tmp_path))
    assert torch.equal(extra.weight, before)
    assert torch.equal(weights(model), kept)
