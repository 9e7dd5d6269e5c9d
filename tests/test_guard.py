"""A model with 16-bit weights that is called outside of a region says so; every call that can work is let through."""

import copy
import io

import pytest
import torch
from torch import nn

from halfstep import HalfstepError, Stepper, cast_for_inference

pytestmark = pytest.mark.usefixtures("kernels_stay")

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def build(policy="bf16 master=split16"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, Stepper(model, torch.optim.AdamW(model.parameters(), lr=1e-2), policy)


def test_a_call_outside_is_refused_with_the_cure():
    model, _stepper = build()
    with pytest.raises(HalfstepError, match=r"outside of a region: .*with stepper\.inference\(\):"):
        model(X)


@pytest.mark.parametrize("layout", ["copy", "split8", "kahan", "stochastic"])
def test_so_it_is_in_every_layout(layout):
    model, _stepper = build(f"fp16 master={layout}")
    with pytest.raises(HalfstepError, match="outside of a region"):
        model(X)


def test_calls_that_work_are_let_through():
    model, stepper = build()
    assert stepper.step(lambda: model(X).float().square().mean()).applied
    with stepper.forward():
        loss = model(X).float().square().mean()
    assert stepper.backward(loss).applied
    with stepper.inference():
        inside = model(X)
    with stepper.region:
        assert torch.equal(model(X), inside)
    assert inside.dtype == torch.bfloat16


def test_fp32_weights_need_no_region():
    model, _stepper = build("bf16")
    assert model(X).dtype == torch.float32


def test_a_part_is_not_guarded():
    """A norm that is called by itself works; the whole model would not."""
    model, _stepper = build()
    assert model[1](X).dtype == torch.float32


def test_a_model_that_was_made_fp32_again_is_called_as_any():
    model, _stepper = build()
    assert model.float()(X).dtype == torch.float32


def test_a_model_that_was_cast_for_inference_opens_its_own_region():
    model, stepper = build()
    stepper.step(lambda: model(X).float().square().mean())
    with stepper.inference():
        expected = model(X)
    cast_for_inference(model.eval(), "bf16")
    assert torch.equal(model(X), expected)


def test_copies_and_pickles_are_not_guarded():
    model, _stepper = build()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert other.float()(X).dtype == torch.float32
        with pytest.raises(RuntimeError, match="dtype"):
            other.bfloat16()(X)


def test_the_guard_goes_with_the_stepper():
    model, stepper = build()
    num_hooks = len(model._forward_pre_hooks)
    del stepper
    assert len(model._forward_pre_hooks) < num_hooks
    with pytest.raises(RuntimeError, match="dtype"):
        model(X)


def test_it_breaks_no_graph():
    model, stepper = build()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    twin, by_hand = build()
    for _ in range(3):
        stepper.step(lambda: call(X).float().square().mean())
        by_hand.step(lambda: twin(X).float().square().mean())
    for (name, weight), (_, other) in zip(stepper.weights(), by_hand.weights(), strict=True):
        assert torch.equal(weight, other), name
