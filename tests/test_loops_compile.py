"""torch.compile of the model, the loss and the optimizer's step: no graph break of ours, no recompilation by the step.

The backend is ``aot_eager``: dynamo and autograd trace as for any backend, and the operations stay torch's own, so that
the bits are those of eager wherever the same operations run.
"""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch._functorch.config
from reference.nets import CPU
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import halfstep.region
from halfstep.region import Region
from halfstep.stepper import Stepper

pytestmark = [
    pytest.mark.usefixtures("kernels_stay"),
    # Of torch's own, while it traces.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

X = torch.linspace(-2, 2, 48).reshape(6, 8).sin()
POLICIES = [
    "fp32",
    "bf16",
    "fp16 scale.init=1024 scale.interval=3",
    "fp16 on_overflow=skip scale.init=1024 scale.interval=3",
    "bf16 module:tail=fp32",
    "bf16 module:*.1=fp32 op:gelu=fp32",
    "fp32 module:body=bf16",
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU())
        self.tail = nn.Linear(16, 4)

    def forward(self, x):
        return torch.softmax(self.tail(self.body(x)), -1)


class Broken(Net):
    """What torch cannot trace splits it, and the rest of the frame runs uncompiled."""

    def forward(self, x):
        x = self.body(x)
        torch._dynamo.graph_break()
        return torch.softmax(self.tail(x), -1)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def make(policy, model=None, optimizer=None, **kwargs):
    model = Net() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01) if optimizer is None else optimizer
    return Stepper(model, optimizer, policy, hardware=CPU, **kwargs)


def loss_of(call, x=X):
    return call(x).float().square().sum()


def num_graphs():
    return counters["stats"]["unique_graphs"]


def assert_same_weights(a, b):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)


def train(stepper, call, num_steps=20):
    return [stepper.step(lambda: loss_of(call)) for _ in range(num_steps)]


# --- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["torch.compile(model)", "model.compile()"])
def test_a_compiled_model_is_one_graph_and_has_the_bits_of_eager(how, policy):
    """Over twenty steps, in which the scale changes; ``fullgraph`` and ``error_on_recompile`` raise at a fault."""
    stepper, twin = make(policy, max_norm=1.0), make(policy, max_norm=1.0)
    if how == "model.compile()":
        stepper.model.compile(backend="aot_eager", fullgraph=True)
        call = stepper.model
    else:
        call = torch.compile(stepper.model, backend="aot_eager", fullgraph=True)
    reports, expected = train(stepper, call), train(twin, twin.model)
    assert num_graphs() == 1
    assert not counters["graph_break"]
    assert_same_weights(stepper.model, twin.model)
    assert [report.grad_norm for report in reports] == [report.grad_norm for report in expected]
    if "fp16" in policy:
        assert len({report.scale for report in reports}) > 3


def test_a_stepper_over_the_compiled_model_names_modules_as_torch_does():
    stepper = make("bf16 module:_orig_mod.tail=fp32", torch.compile(Net(), backend="aot_eager", fullgraph=True))
    twin = make("bf16 module:tail=fp32")
    train(stepper, stepper.model, 4)
    train(twin, twin.model, 4)
    assert num_graphs() == 1
    assert_same_weights(stepper.model, twin.model)


def test_accumulation_and_replay_do_not_recompile():
    """The gradient of the third step overflows at the first scale; it runs again through the same graph."""

    def run(call, stepper):
        reports = []
        for number, factor in enumerate([1.0, 1.0, 512.0, 1.0, 1.0, 1.0]):
            x = X.roll(number, 0)
            reports.append(stepper.step(lambda x=x, f=factor: loss_of(call, x) * f))
        return [report for report in reports if report]

    policy = "fp16 scale.init=4096"
    stepper, twin = make(policy, accumulate=2), make(policy, accumulate=2)
    reports = run(torch.compile(stepper.model, backend="aot_eager", fullgraph=True), stepper)
    expected = run(twin.model, twin)
    assert sum(report.num_replays for report in reports) > 0
    assert num_graphs() == 1
    assert_same_weights(stepper.model, twin.model)
    assert [report.num_replays for report in reports] == [report.num_replays for report in expected]


def test_evaluation_compiles_once_more_and_training_goes_on():
    stepper = make("bf16")
    call = torch.compile(stepper.model, backend="aot_eager", fullgraph=True)
    train(stepper, call, 2)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for _ in range(3):
            with stepper.inference():
                out = call(X)
            train(stepper, call, 2)
    assert num_graphs() == 2  # torch's own: another graph without gradients
    with stepper.inference():
        assert torch.equal(call(X), stepper.model(X))
    assert out.dtype == torch.float32


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_that_torch_has_to_split_is_split_by_torch_alone(policy):
    """Its own frame runs uncompiled in parts, where dynamo would look into the kernels below; warnings are errors."""
    stepper, twin = make(policy, Broken()), make(policy, Broken())
    call = torch.compile(stepper.model, backend="aot_eager")
    train(stepper, call, 6)
    train(twin, twin.model, 6)
    assert num_graphs() == 2
    assert len(counters["graph_break"]) == 1
    assert_same_weights(stepper.model, twin.model)


def test_a_part_that_is_not_traced_keeps_the_kernels_untraced():
    class Partly(Net):
        @torch.compiler.disable(recursive=False)
        def middle(self, x):
            return torch.softmax(x @ x.T, -1) @ x

        def forward(self, x):
            return self.tail(self.middle(self.body(x)))

    stepper, twin = make("bf16", Partly()), make("bf16", Partly())
    call = torch.compile(stepper.model, backend="aot_eager")
    train(stepper, call, 4)
    train(twin, twin.model, 4)
    assert all("halfstep" not in reason for reason in counters["graph_break"])
    assert_same_weights(stepper.model, twin.model)


# --- gradients of what a rule keeps in fp32 --------------------------------------------------------------------------


def test_gradients_of_an_fp32_rule_stay_in_fp32_although_torch_would_round_them(monkeypatch):
    """torch traces backward under the autocast of forward; eager backward runs without one."""
    gradients = {}
    for how in ("eager", "region", "autocast"):
        torch._dynamo.reset()
        model = Net()
        region = Region(model, "bf16 module:tail=fp32", CPU)
        call = model if how == "eager" else torch.compile(model, backend="aot_eager")
        with monkeypatch.context() as patch:
            if how == "autocast":
                patch.setattr(halfstep.region, "_before_compiling", lambda _: None)
            with region:
                loss = loss_of(call)
            with region.backward():
                loss.backward()
        gradients[how] = model.tail.weight.grad
    assert torch.equal(gradients["region"], gradients["eager"])
    assert not torch.equal(gradients["autocast"], gradients["eager"])


def test_the_switch_of_torch_is_off_while_a_region_compiles_and_put_back():
    region, seen = Region(Net(), "bf16", CPU), []

    def backend(graph, inputs):
        def look(part, _):
            seen.append(torch._functorch.config.backward_pass_autocast)
            return part

        return aot_autograd(fw_compiler=look, bw_compiler=look)(graph, inputs)

    call = torch.compile(lambda x: x.sin() * 2, backend=backend)
    x = torch.randn(3, requires_grad=True)
    call(x)
    assert set(seen) == {"same_as_forward"}
    torch._dynamo.reset()
    seen.clear()
    with region:
        call(x)
        assert torch._functorch.config.backward_pass_autocast == "same_as_forward"
    assert "off" in seen
    torch._dynamo.reset()
    seen.clear()
    with region, torch._functorch.config.patch(backward_pass_autocast=[]):
        call(x)
        assert torch._functorch.config.backward_pass_autocast == []


# --- other things that are compiled ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["bf16", "fp16 scale.init=1024 scale.interval=3"])
def test_a_compiled_loss_is_one_graph(policy):
    stepper, twin = make(policy), make(policy)
    loss = torch.compile(lambda x: loss_of(stepper.model, x), backend="aot_eager", fullgraph=True)
    for _ in range(12):
        stepper.step(lambda: loss(X))
    train(twin, twin.model, 12)
    assert num_graphs() == 1
    assert_same_weights(stepper.model, twin.model)


@pytest.mark.parametrize("policy", ["bf16", "bf16 module:tail=fp32"])
@pytest.mark.parametrize("opens", ["training", "inference"])
def test_a_region_inside_a_compiled_function_is_where_the_graph_breaks(opens, policy):
    """dynamo cannot trace a change of autocast; the model inside is compiled all the same."""
    model, twin = Net(), Net()
    region, expected = Region(model, policy, CPU), Region(twin, policy, CPU)

    def through(region, model):
        with region if opens == "training" else region.inference():
            return model(X)

    compiled = torch.compile(through, backend="aot_eager")
    for _ in range(3):
        assert torch.equal(compiled(region, model), through(expected, twin))
    assert num_graphs() >= 1


@pytest.mark.parametrize("policy", ["bf16", "fp16 scale.init=1024 scale.interval=3"])
def test_a_compiled_function_around_the_step_leaves_the_step_as_it_is(policy):
    """It reads verdicts back. Nothing of it is traced, so that nothing recompiles; compile the model instead."""
    stepper, twin = make(policy), make(policy)
    step = torch.compile(lambda x: stepper.step(lambda: loss_of(stepper.model, x)), backend="aot_eager")
    for _ in range(8):
        step(X)
    train(twin, twin.model, 8)
    assert num_graphs() == 0
    assert_same_weights(stepper.model, twin.model)


@pytest.mark.parametrize("policy", ["bf16", "fp16 scale.init=1024 scale.interval=3"])
@pytest.mark.parametrize("form", ["foreach", "fused"])
def test_a_compiled_step_of_the_optimizer_is_that_of_a_loop_by_hand(form, policy):
    def optimizer_of(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **{form: True})
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        return optimizer

    def recompiles_of_torch():
        # The first step makes the states; torch compiles anew for the second.
        return torch._dynamo.config.patch(error_on_recompile=False)

    model = Net()
    stepper = make(policy, model, optimizer_of(model))
    reports = []
    for patch, num_steps in ((recompiles_of_torch(), 2), (torch._dynamo.config.patch(error_on_recompile=True), 10)):
        with patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, on its profiler and its lists
            reports += train(stepper, model, num_steps)
    assert len({report.scale for report in reports}) == (1 if policy == "bf16" else 4)
    twin = Net()
    region, optimizer = Region(twin, policy, CPU), optimizer_of(twin)
    with recompiles_of_torch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for report in reports:
            with region:
                loss = loss_of(twin)
            with region.backward():
                (loss * report.scale).backward()
            for p in twin.parameters():
                p.grad /= report.scale
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(model, twin)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["bf16", "fp16 scale.init=1024 scale.interval=3", "bf16 module:tail=fp32"])
def test_inductor(policy):
    """Compiled for real, which takes a C++ compiler: fused kernels keep fp32 between operations, so not the bits."""
    stepper, twin = make(policy), make(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reports = train(stepper, torch.compile(stepper.model, fullgraph=True), 20)
    expected = train(twin, twin.model, 20)
    assert num_graphs() == 1
    # A value that eager rounds to 16 bit between two operations differs by half a last place of bf16, 2^-9.
    for report, other in itertools.islice(zip(reports, expected, strict=True), 3):
        assert abs(report.loss - other.loss) <= 2**-8 * abs(other.loss)
