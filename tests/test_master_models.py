"""Master weights over unusual parameters and optimizers, and in the model's forward pass."""

import gc
import warnings

import pytest
import torch
from reference.master_mlp import POLICY, X, adamw, build, named, net, step
from reference.master_net import assert_same, exact
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep import HalfstepError, Stepper, chunks
from halfstep.layouts import LAYOUTS

pytestmark = pytest.mark.usefixtures("kernels_stay")


# Parameters.


class Odd(nn.Module):
    def __init__(self, parameter):
        super().__init__()
        self.layer, self.odd = nn.Linear(8, 8), nn.Parameter(parameter)

    def forward(self, x):
        return self.layer(x) + self.odd.abs().sum()


@pytest.mark.parametrize(
    ("parameter", "dtype"),
    [
        (torch.zeros(0, 4), torch.bfloat16),
        (torch.ones(()), torch.float32),
        (torch.ones(2, 2, dtype=torch.complex64), torch.complex64),
        (torch.ones(2, 2, dtype=torch.float64), torch.float64),
        (torch.ones(2, 3).t(), torch.bfloat16),
        (torch.ones(3, 4)[:, ::2], torch.bfloat16),
    ],
    ids=["empty", "scalar", "complex", "fp64", "transposed", "strided"],
)
def test_odd_parameters_take_the_steps_of_a_twin(parameter, dtype):
    model, stepper = build(Odd(parameter.clone()))
    assert model.odd.dtype == dtype
    twin = Odd(parameter.clone())
    twin.load_state_dict(stepper.fp32_state_dict())
    optimizer, seen = adamw(twin.parameters()), {}
    stepper.optimizer.register_step_pre_hook(
        lambda *_: seen.update({n: p.grad.to(dict(twin.named_parameters())[n].dtype) for n, p in named(model)})
    )
    for _ in range(3):
        assert step(stepper).applied
        for name, other in twin.named_parameters():
            other.grad = seen[name].clone()
        optimizer.step()
    assert_same(exact(stepper), {name: p.detach() for name, p in twin.named_parameters()})


def test_a_fp64_model_stays_fp64_as_under_autocast():
    model, stepper = build(net().double())
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert step(stepper, X.double()).applied


def test_parameters_over_one_memory_are_refused():
    model = net(8, 8, 8)
    model[2].weight = nn.Parameter(model[0].weight)  # another Parameter over the same memory
    before = model[0].weight.clone()
    with pytest.raises(HalfstepError, match=r"0\.weight and 2\.weight, which share memory.*as one Parameter"):
        build(model)
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.dtype == torch.float32
    # So is one that the optimizer does not train; parts of one memory beside each other may part.
    with pytest.raises(HalfstepError, match="share memory"):
        Stepper(model, adamw(model[0].parameters()), POLICY)
    # And one inside a larger one, after a third that lies there too.
    store = torch.randn(64)
    model[0].weight, model[2].weight = nn.Parameter(store.view(8, 8)), nn.Parameter(store[32:].view(4, 8))
    model.register_parameter("inner", nn.Parameter(store[8:16].view(1, 8)))
    with pytest.raises(HalfstepError, match="share memory"):
        Stepper(model, adamw([model[2].weight]), POLICY)
    del model.inner
    with pytest.raises(HalfstepError, match="share memory"):
        Stepper(model, adamw([model[0].weight]), POLICY)
    Stepper(model, adamw([model[0].bias]), POLICY)  # which stays fp32, as all of these do
    flat = torch.randn(128)
    model[0].weight, model[2].weight = (nn.Parameter(half.view(8, 8)) for half in flat.chunk(2))
    _, stepper = build(model)
    assert step(stepper).applied


def test_a_refused_model_is_left_in_fp32():
    model = net()
    with torch.no_grad():
        model[2].weight[0, 0] = 70000.0
    with pytest.raises(HalfstepError, match=r"2\.weight with a weight of 70000"):
        build(model, "fp16 master=split16")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_an_embedding_that_scales_its_rows_stays_fp32():
    """``max_norm`` changes the table in every forward pass, in place: the rest would be lost each time."""
    model, stepper = build(nn.Sequential(nn.Embedding(8, 8, max_norm=1.0), nn.Linear(8, 8)))
    assert [p.dtype for p in model.parameters()] == [torch.float32, torch.bfloat16, torch.float32]
    assert step(stepper, torch.arange(8)).applied


# Optimizers.


def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "_SMALLEST_BYTES", 0)
    monkeypatch.setattr(chunks, "_FIRST_CHUNKS", 10**9)


def test_slices_use_the_settings_of_their_group(monkeypatch):
    small_chunks(monkeypatch)

    def make(model):
        first, second = model[0], model[2]
        return torch.optim.AdamW(
            [
                {"params": [first.weight], "lr": 1e-2, "weight_decay": 0.5},
                {"params": [first.bias, second.weight], "lr": torch.tensor(1e-3), "foreach": False, "weight_decay": 0},
                {"params": [second.bias], "lr": 0.1},
            ]
        )

    model, twin = net(100, 120, 100), net(100, 120, 100)
    stepper, optimizer, seen = Stepper(model, make(model), POLICY), make(twin), {}
    stepper.optimizer.register_step_pre_hook(lambda *_: seen.update({n: p.grad.float() for n, p in named(model)}))
    for number in range(5):
        step(stepper, torch.randn(4, 100, generator=torch.Generator().manual_seed(number)))
        for name, parameter in twin.named_parameters():
            parameter.grad = seen[name].clone()
        optimizer.step()
    assert_same(exact(stepper), {name: p.detach() for name, p in twin.named_parameters()})


class Counting(torch.optim.Optimizer):
    """Counts its steps in the group and divides by the norm over the model, as Prodigy and LAMB do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.float().norm() for p in parameters]).norm()
        for group in self.param_groups:
            group["k"] += 1
        for p in parameters:
            p.sub_(p.grad / norm, alpha=0.01)


def test_an_unknown_optimizer_steps_once_over_all(monkeypatch):
    small_chunks(monkeypatch)
    model, stepper = build(net(100, 120, 100), make=Counting)
    before, gradients = exact(stepper), {}
    stepper.optimizer.register_step_pre_hook(lambda *_: gradients.update({n: p.grad.float() for n, p in named(model)}))
    for number in range(3):
        before = exact(stepper)
        step(stepper, torch.randn(4, 100, generator=torch.Generator().manual_seed(number)))
    assert stepper.optimizer.param_groups[0]["k"] == 3
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert_same(exact(stepper), {n: before[n].sub(gradients[n] / norm, alpha=0.01) for n in before})


def test_states_that_were_saved_in_another_order_of_memory_are_not_sliced(monkeypatch):
    small_chunks(monkeypatch)
    x = torch.randn(1, 32, 5, 5)
    source, stepper = build(nn.Conv2d(32, 32, 3).to(memory_format=torch.channels_last))
    step(stepper, x)
    model, resumed = build(nn.Conv2d(32, 32, 3))
    model.load_state_dict(source.state_dict())
    resumed.optimizer.load_state_dict(stepper.optimizer.state_dict())
    resumed.load_state_dict(stepper.state_dict())
    assert not resumed.optimizer.state[model.weight]["exp_avg"].is_contiguous()
    assert step(resumed, x).applied
    assert resumed.optimizer.state[model.weight]["exp_avg"].shape == model.weight.shape


def test_hooks_for_every_optimizer_and_schedulers_outside_run_without_a_warning():
    _, stepper = build()
    scheduler = torch.optim.lr_scheduler.StepLR(stepper.optimizer, 1)
    calls = []
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    for _ in range(2):
        step(stepper)
        scheduler.step()
    handle.remove()
    assert len(calls) == 2  # one chunk each


# The model's forward pass.


def test_a_compiled_model_sees_every_new_weight_and_compiles_once():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    results = []
    for is_compiled in (True, False):
        model = net(8, 120, 8)
        _, stepper = build(model, make=lambda ps: adamw(ps, lr=0.1))
        run = torch.compile(model, backend=counter) if is_compiled else model
        for _ in range(10):
            step(stepper, model=run)
        results.append(exact(stepper))
    assert counter.frame_count == 1
    assert_same(*results)


def test_a_checkpoint_computes_again_with_the_same_weights():
    results = []
    for is_checkpointed in (True, False):
        model, stepper = build()
        run = (lambda x, m=model: checkpoint(m, x, use_reentrant=False)) if is_checkpointed else model
        for _ in range(3):
            step(stepper, model=run)
        results.append(exact(stepper))
    assert_same(*results)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_evaluation_in_the_middle_of_a_window_changes_nothing(layout):
    results = []
    for evaluates in (True, False):
        model, stepper = build(policy=f"bf16 master={layout}", accumulate=2)
        for _ in range(4):
            step(stepper)
            if evaluates:
                with stepper.inference():
                    assert model(X).dtype == torch.bfloat16
        results.append(exact(stepper))
    assert_same(*results)


def test_a_model_cast_for_inference_holds_the_exact_weights_rounded_once():
    model, stepper = build()
    for _ in range(3):
        step(stepper)
    weights = exact(stepper)
    halfstep.cast_for_inference(model.eval(), "bf16")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name].bfloat16()), name


def test_an_embedding_cast_for_inference_keeps_what_it_needs_when_the_stepper_goes():
    model, stepper = build(nn.Sequential(nn.Embedding(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)))
    step(stepper, torch.arange(8))
    halfstep.cast_for_inference(model.eval(), "bf16")
    before = model(torch.arange(8))
    del stepper
    gc.collect()
    assert torch.equal(model(torch.arange(8)), before)
    assert model[0](torch.arange(8)).dtype == torch.float32


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_exhausted_scale_promotes_a_module_with_16_bit_weights(layout, accumulate):
    """``hot`` has a gradient beyond fp16 at every scale, until it computes in fp32."""

    class Hot(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body, self.hot, self.head = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 1)
            nn.init.constant_(self.hot.weight, 2.0**-13)
            nn.init.ones_(self.head.weight)

        def forward(self, x):
            return self.head(self.hot(self.body(x).tanh() * 2.0**13))

    policy = f"fp16 master={layout} on_exhausted=promote scale.init=4"
    model, stepper = build(Hot(), policy, lambda ps: adamw(ps, lr=1e-5), accumulate=accumulate)
    reports = [stepper.step(lambda: (model(X).float() - 10).square().sum()) for _ in range(6 * accumulate)]
    assert stepper.policy.format_of("hot") == "fp32"
    assert model.hot.weight.dtype == torch.float32
    assert model.head.weight.dtype == torch.float16
    assert reports[-1].applied
    before = exact(stepper)["hot.weight"]
    assert [stepper.step(lambda: (model(X).float() - 10).square().sum()) for _ in range(accumulate)][-1].applied
    assert not torch.equal(exact(stepper)["hot.weight"], before)


def test_nothing_of_ours_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, stepper = build()
        for _ in range(3):
            step(stepper)
