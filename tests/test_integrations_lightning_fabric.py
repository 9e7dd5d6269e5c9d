"""The same plugin under Fabric, where optimizers show themselves when they step."""

import pytest
import torch
import torch.nn.functional as F
from lightning import Fabric
from reference.lightning_net import FILTERS, body, data, loss_of, weights
from torch import nn

import halfstep
from halfstep import HalfstepError, ScaleExhausted, Stepper, StepReport
from halfstep.integrations.lightning import Precision

pytestmark = [pytest.mark.usefixtures("kernels_stay"), *map(pytest.mark.filterwarnings, FILTERS)]

FP16 = "fp16 on_overflow=skip"
POLICIES = ["fp32", "bf16", FP16]


def start(policy, fused=True, **settings):
    plugin = Precision(policy, **settings)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
    net = body()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    model, optimizer = fabric.setup(net, optimizer)
    return fabric, plugin, model, optimizer


def steps(fabric, model, optimizer, max_norm=None, accumulate=1, factors=(), loader=None):
    for i, batch in enumerate(loader or data()):
        loss = loss_of(model, batch, 1e6 if i in factors else 1.0)
        fabric.backward(loss / accumulate)
        if (i + 1) % accumulate == 0:
            if max_norm:
                fabric.clip_gradients(model, optimizer, max_norm=max_norm)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_is_that_of_a_stepper_to_the_bit(policy, fused):
    reports, expected = [], []
    fabric, plugin, model, optimizer = start(policy, fused, sinks=[reports.append])
    steps(fabric, model, optimizer)
    net = body()
    stepper = Stepper(net, torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused), policy)
    for batch in data():
        expected.append(stepper.step(lambda batch=batch: loss_of(net, batch)))
    assert [report.to_dict() for report in reports] == [report.to_dict() for report in expected]
    assert torch.equal(weights(model), weights(net))
    assert plugin.info.effective == policy


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("policy", ["bf16", FP16])
def test_clipping_and_accumulation_are_the_plain_ones(policy, fused):
    """Lightning refuses to clip with a fused optimizer under fp16. The twin does all of it by hand."""
    reports, norms = [], []
    fabric, _, model, optimizer = start(policy, fused, sinks=[reports.append])
    steps(fabric, model, optimizer, max_norm=0.1, accumulate=2)
    net = body()
    plain = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    scale = 65536.0 if policy == FP16 else 1.0
    for i, batch in enumerate(data()):
        with halfstep.Region(net, policy.split()[0]):
            output = net(batch[0])
        (F.cross_entropy(output.float(), batch[1]) / 2 * scale).backward()
        if i % 2:
            for parameter in net.parameters():
                parameter.grad /= scale
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1).item())
            plain.step()
            plain.zero_grad()
    assert [report.grad_norm for report in reports] == pytest.approx(norms, rel=1e-6)
    assert torch.equal(weights(model), weights(net))


@pytest.mark.parametrize("fused", [True, False])
def test_an_overflow_is_skipped_also_where_it_is_clipped(fused):
    """With Lightning's plugin the clip raises."""
    events = []
    fabric, plugin, model, optimizer = start(FP16, fused, sinks=[events.append])
    steps(fabric, model, optimizer, max_norm=0.1, factors=(2,))
    reports = [event for event in events if isinstance(event, StepReport)]
    assert [report.applied for report in reports] == [True, True, False, True, True, True, True]
    assert [report.scale for report in reports] == [65536.0] * 3 + [32768.0] * 4
    assert weights(model).isfinite().all()
    assert plugin.report_of(optimizer) is plugin.report


def test_an_overflow_in_the_first_step_of_all():
    events = []
    fabric, _, model, optimizer = start(FP16, sinks=[events.append])
    steps(fabric, model, optimizer, factors=(0,))
    assert [event.scale for event in events if isinstance(event, StepReport)][:2] == [65536.0, 32768.0]


def test_a_scale_at_its_floor_ends_the_run():
    fabric, _, model, optimizer = start(f"{FP16} scale.floor=16384", fused=False)
    with pytest.raises(ScaleExhausted, match="floor of 16384"):
        steps(fabric, model, optimizer, factors=range(1, 7))


@pytest.mark.parametrize("policy", POLICIES)
def test_two_models_that_train_against_each_other(policy):
    def losses(d, g, x):
        yield lambda: F.softplus(-d(x)).mean() + F.softplus(d(g(x[:, :4]).detach())).mean()
        yield lambda: F.softplus(-d(g(x[:, :4]))).mean()

    def nets():
        torch.default_generator.manual_seed(0)
        return nn.Linear(8, 1), nn.Linear(4, 8)

    plugin = Precision(policy)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
    models, optimizers = [], []
    for net in nets():
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        models.append(model)
        optimizers.append(optimizer)
    plain = nets()
    others = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in plain]
    scale = 65536.0 if policy == FP16 else 1.0
    region = halfstep.Region(nn.ModuleList(plain), policy.split()[0])

    def within(net):
        def call(x):
            with region:
                return net(x).float()

        return call

    for (x, _), _ in zip(data(), range(4), strict=False):
        for loss, optimizer in zip(losses(*models, x), optimizers, strict=True):
            optimizer.zero_grad()
            fabric.backward(loss())
            optimizer.step()
        for loss, optimizer in zip(losses(*map(within, plain), x), others, strict=True):
            parameters = optimizer.param_groups[0]["params"]
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss() * scale, parameters), strict=True):
                parameter.grad = gradient / scale
            optimizer.step()
    for model, net in zip(models, plain, strict=True):
        assert torch.equal(weights(model), weights(net))
    assert [plugin.report_of(optimizer).step for optimizer in optimizers] == [4, 4]


def test_evaluation_between_steps_changes_nothing():
    runs = []
    for evaluates in (False, True):
        fabric, _, model, optimizer = start("bf16", keep_casts=True)
        for batch in data():
            loss = loss_of(model, batch)
            fabric.backward(loss)
            if evaluates:
                with torch.no_grad():
                    assert model(batch[0]).dtype == torch.float32  # for a loss outside of the region
            optimizer.step()
            optimizer.zero_grad()
        runs.append(weights(model))
    assert torch.equal(*runs)


def test_a_model_to_evaluate_has_the_formats():
    plugin = Precision("bf16")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
    net = body().requires_grad_(False)
    dtypes = []
    net[0].register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    fabric.setup(net)(torch.randn(2, 8))
    assert dtypes == [torch.bfloat16]
    assert plugin.info.effective == "bf16"


@pytest.mark.parametrize("policy", ["bf16", f"{FP16} scale.interval=3"])
def test_a_checkpoint_carries_the_state_to_the_bit(policy, tmp_path):
    batches = list(data())
    fabric, plugin, model, optimizer = start(policy)
    steps(fabric, model, optimizer, max_norm=0.3, factors=(1,), loader=batches[:4])
    fabric.save(tmp_path / "state.ckpt", {"model": model, "optimizer": optimizer, "precision": plugin})
    steps(fabric, model, optimizer, max_norm=0.3, loader=batches[4:])
    again = start(policy)
    for name, value in zip(("precision", "model", "optimizer"), (again[1], *again[2:]), strict=True):
        again[0].load(tmp_path / "state.ckpt", {name: value}, strict=False)
    steps(again[0], *again[2:], max_norm=0.3, loader=batches[4:])
    assert torch.equal(weights(model), weights(again[2]))
    assert plugin.report.to_dict() == again[1].report.to_dict()
    assert plugin.report.step == 7


def test_what_cannot_work_is_one_line():
    fabric, _, model, _ = start("bf16 master=split16")
    with pytest.raises(HalfstepError, match="master=split16 under Fabric"):
        model(torch.randn(2, 8))
    fabric, _, model, _ = start(f"{FP16} on_exhausted=promote")
    with pytest.raises(HalfstepError, match="on_exhausted=promote under Fabric"):
        model(torch.randn(2, 8))
    fabric, _, model, _ = start("bf16")
    with pytest.raises(RuntimeError, match=r"fabric\.backward"):
        loss_of(model, next(iter(data()))).backward()
    fabric, _, model, _ = start("bf16")
    loss = F.cross_entropy(model.module(torch.randn(2, 8)), torch.zeros(2, dtype=torch.long))
    with pytest.raises(HalfstepError, match="before the first forward pass"):
        fabric.backward(loss)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=Precision("bf16"))
    net = body()
    model, lbfgs = fabric.setup(net, torch.optim.LBFGS(net.parameters()))
    model(torch.randn(2, 8))
    with pytest.raises(HalfstepError, match="LBFGS under Lightning"):
        lbfgs.step(lambda: None)
    with pytest.raises(ValueError, match=r"Received both.*halfstep.*Choose one"):
        Fabric(accelerator="cpu", precision="bf16-mixed", plugins=Precision("bf16"))
