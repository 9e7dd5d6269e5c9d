"""A captured micro-batch does what the step did, to the bit, as often as it is asked to, and leaves nothing behind."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from reference.loop import Gate, assert_same
from torch import nn

from halfstep.diagnosis.capture import Capture
from halfstep.errors import HalfstepError
from halfstep.hardware import Hardware
from halfstep.policy import Policy
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")

X = torch.linspace(-2, 2, 96).reshape(12, 8).sin()
Y = X.mean(1, keepdim=True) + 0.5


class Net(nn.Module):
    """BatchNorm, dropout, an embedding, a gate, and a buffer that each forward pass replaces by another tensor."""

    def __init__(self):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.table = nn.Embedding(12, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3))
        self.gate, self.head = Gate(), nn.Linear(16, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("positions", torch.arange(12).expand(3, -1), persistent=False)
        self.register_buffer("mask", None)

    def forward(self, x):
        if self.training:
            self.seen = self.seen + 1
            self.mask = torch.ones(2)
        x = x + self.table(self.positions[0, : len(x)])
        return self.head(self.gate(self.body(x)))


def mean_loss(model, x=X):
    return (model(x).float() - Y[: len(x)]).square().mean()


def sum_loss(model):
    return (model(X).float() - Y).square().sum(), len(X)


def tensor_count(model):
    return (model(X).float() - Y).square().sum(), torch.tensor(len(X))


def low_loss(model):
    return (model(X) - Y.to(model.head.weight)).square().mean().to(torch.bfloat16)


LOSSES = {"mean": mean_loss, "sum": sum_loss, "tensor": tensor_count, "16 bit": low_loss}
POLICIES = [
    "fp32",
    "bf16",
    "fp16 scale.init=256",
    "fp16 on_overflow=skip scale.init=256",
    "fp32 scale=static scale.init=256",
    "fp16 module:body=fp32 op:tanh=fp32 scale.init=256",
    "bf16 module:head=fp16",
    "bf16 master=split16",
    "fp16 master=copy scale.init=256",
]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def everything(model):
    """Weights, buffers and gradients, which tensors hold them, who trains, and the random state."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [
        {name: tensor.detach().clone() for name, tensor in tensors.items()},
        {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        {name: id(tensor) for name, tensor in tensors.items()},
        {name: id(p.grad) for name, p in model.named_parameters()},
        [module.training for module in model.modules()],
        torch.get_rng_state(),
    ]


def with_gradients(model):
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.25)
    return model


# --- as the step itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_is_the_steppers_own_micro_batch_to_the_bit(policy, loss):
    model, loss = Net(), LOSSES[loss]
    stepper = Stepper(model, sgd(model), policy, accumulate=3)
    stepper.step(lambda: loss(model))  # fixes the unit, and leaves sums
    earlier = {name: p.grad.clone() for name, p in model.named_parameters()}
    loss_before, count_before = stepper._window.loss_sum, stepper._window.count
    torch.manual_seed(7)
    scale, unit = stepper.scale.value.item(), stepper._unit
    capture = Capture(model, lambda: loss(model), stepper.policy, scale=scale, unit=unit)
    outcomes = [capture.run(), capture.run()]

    for p in model.parameters():
        p.grad = None
    torch.manual_seed(7)
    stepper.step(lambda: loss(model))
    own = {name: p.grad for name, p in model.named_parameters()}
    count = float(stepper._window.count - count_before)
    for outcome in outcomes:
        assert_same({name: g.to(own[name].dtype) for name, g in outcome.gradients.items()}, own)
        assert outcome.loss == pytest.approx((stepper._window.loss_sum - loss_before).item() / count, rel=1e-6)
        # fp32 sums of a hundred squares
        norm = math.sqrt(sum(g.double().square().sum().item() for g in own.values())) / (scale * count / unit)
        assert outcome.grad_norm == pytest.approx(norm, rel=1e-5)
        assert outcome.is_finite
    assert earlier.keys() == own.keys()


def test_runs_of_other_policies_and_scales_in_between_change_nothing():
    model = Net()
    capture = Capture(model, lambda: mean_loss(model), Policy("fp16"), scale=256.0)
    first = capture.run()
    for policy in ("fp32", "bf16", "fp16 module:body=fp32", "fp16 op:tanh=fp32"):
        assert capture.run(Policy.parse(policy)).loss != first.loss
    halved = capture.run(scale=128.0)
    assert halved.loss == first.loss
    for name, gradient in capture.run().gradients.items():
        assert torch.equal(gradient, first.gradients[name])
        assert torch.allclose(halved.gradients[name] * 2, gradient, rtol=2**-8, atol=2**-12)  # one has subnormals


def test_a_capture_stays_what_it_was_while_training_goes_on():
    model = Net()
    model.body[1].momentum = None
    capture = Capture(model, lambda: mean_loss(model), Policy("fp32"))
    first = capture.run()
    with torch.no_grad():
        model(X)  # other statistics, another count, a mask, another random state
    model.eval()
    again = capture.run()
    assert again.loss == first.loss
    assert model.seen == 1
    assert not model.training


def test_a_micro_batch_that_counts_nothing_is_finite():
    model = Net()
    outcome = Capture(model, lambda: (model(X).sum() * 0, 0), Policy("fp32")).run()
    assert (outcome.loss, outcome.grad_norm, outcome.is_finite) == (0.0, 0.0, True)


def test_what_is_not_finite_is_said():
    model = Net()
    model.gate.where, model.gate.value = "gradient", math.inf
    outcome = Capture(model, lambda: mean_loss(model), Policy("fp32")).run()
    assert math.isfinite(outcome.loss)
    assert not outcome.is_finite


@pytest.mark.parametrize("grad", [True, False])
def test_it_runs_where_gradients_are_off(grad):
    model = Net()
    with torch.set_grad_enabled(grad):
        capture = Capture(model, lambda: mean_loss(model), Policy("bf16"))
        assert capture.run().grad_norm > 0
        assert torch.is_grad_enabled() is grad


# --- nothing left behind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fp16", "bf16", "fp32", "fp16 module:head=fp32"])
@pytest.mark.parametrize("what", ["run", "find_producer"])
def test_a_run_leaves_nothing_behind(what, policy):
    model = with_gradients(Net())
    capture = Capture(model, lambda: mean_loss(model), Policy("fp16"), scale=2.0)
    before = everything(model)
    getattr(capture, what)(Policy.parse(policy))
    assert_same(everything(model), before)
    del capture
    assert_same(everything(model), before)
    assert "forward" not in model.head.__dict__


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["output", "gradient", "under"])
@pytest.mark.parametrize("policy", ["fp16", "fp32"])
def test_an_exception_leaves_nothing_behind(policy, where, error):
    model = with_gradients(Net())
    capture = Capture(model, lambda: mean_loss(model), Policy("fp16"))
    first = capture.run().loss
    before = everything(model)
    model.gate.where, model.gate.raises = where, error

    class Under:
        def __enter__(self):
            if where == "under":
                raise error

        def __exit__(self, *_):
            pass

    with pytest.raises(error):
        capture.run(Policy.parse(policy), under=[Under()])
    model.gate.where = "nowhere"
    assert_same(everything(model), before)
    assert capture.run().loss == first


def test_a_policy_that_the_device_refuses_changes_nothing():
    model = with_gradients(Net())
    capture = Capture(model, lambda: mean_loss(model), Policy("fp32"), hardware=Hardware.of("cuda", "Tesla T4"))
    before = everything(model)
    with pytest.raises(HalfstepError, match="cannot compute bf16"):
        capture.run(Policy("bf16"))
    assert_same(everything(model), before)


@pytest.mark.parametrize("policy", ["bf16", "fp16 scale.init=256", "bf16 master=split16"])
def test_a_live_stepper_goes_on_as_if_there_had_been_no_capture(policy):
    models = Net(), Net()
    steppers = [Stepper(m, sgd(m), policy, accumulate=2, keep_casts=True, max_norm=1.0) for m in models]
    for number in range(6):
        for model, stepper in zip(models, steppers, strict=True):
            torch.manual_seed(number)
            if stepper is steppers[0]:
                capture = Capture(model, lambda model=model: mean_loss(model), stepper.policy, scale=256.0)
                capture.run()
                capture.run(Policy("fp32"))
                capture.run(stepper.policy.with_module("head", "fp32"))
                capture.find_producer()
            stepper.step(lambda model=model: mean_loss(model))
    assert_same(models[0].state_dict(), models[1].state_dict())
    assert_same(steppers[0].state_dict(), steppers[1].state_dict())


# --- weights in 16 bit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["copy", "split16", "split8", "kahan", "stochastic"])
def test_any_policy_can_be_tried_on_weights_in_16_bit(layout):
    """Widened, they are the fp32 model that holds the same numbers."""
    model = Net()
    stepper = Stepper(model, sgd(model), f"bf16 master={layout}")
    twin = copy.deepcopy(Net())
    twin.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    assert model.head.weight.dtype == torch.bfloat16
    torch.manual_seed(3)
    capture = Capture(model, lambda: mean_loss(model), stepper.policy)
    before = everything(model)
    exact = {name: weight.clone() for name, weight in stepper.weights()}
    torch.manual_seed(3)
    plain = Capture(twin, lambda: mean_loss(twin), Policy("bf16"))
    for policy in ("fp32", "bf16", "fp16", "bf16 module:head=fp32", "bf16 op:tanh=fp32"):
        outcome, expected = capture.run(Policy.parse(policy)), plain.run(Policy.parse(policy))
        assert outcome.loss == expected.loss
        assert_same(outcome.gradients, expected.gradients)
    assert_same(everything(model), before)
    assert_same({name: weight.clone() for name, weight in stepper.weights()}, exact)
    assert stepper.step(lambda: mean_loss(model)).applied


def test_a_frozen_base_in_16_bit_can_be_tried_in_fp32():
    model = nn.Sequential(nn.Linear(8, 8).half().requires_grad_(False), nn.Linear(8, 1))
    data = model[0].weight.data_ptr()
    capture = Capture(model, lambda: mean_loss(model), Policy("fp16"))
    assert capture.run().loss == pytest.approx(capture.run(Policy("fp32")).loss, rel=1e-2)
    assert list(capture.run(Policy("fp32")).gradients) == ["1.weight", "1.bias"]
    assert (model[0].weight.dtype, model[0].weight.data_ptr()) == (torch.float16, data)


def test_a_compiled_model_runs_as_it_is():
    model = Net().body
    compiled = torch.compile(model, backend="eager")
    capture = Capture(model, lambda: compiled(X).float().square().mean(), Policy("bf16"))
    before = everything(model)
    first = capture.run()
    assert first.loss == capture.run().loss
    assert capture.run(Policy("fp32")).loss == pytest.approx(first.loss, rel=2e-2)  # bf16 has 8 bits
    assert_same(everything(model), before)
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16 scale.init=256"])
def test_a_run_on_cuda_repeats_its_dropout(policy):
    model = Net().cuda()
    x, y = X.cuda(), Y.cuda()
    capture = Capture(model, lambda: (model(x).float() - y).square().mean(), Policy.parse(policy))
    random = torch.cuda.get_rng_state()
    first, again = capture.run(), capture.run()
    assert first.loss == again.loss
    assert torch.equal(torch.cuda.get_rng_state(), random)
