"""Manual optimization under the plugin: clipping, accumulation, and several optimizers that share a loss scale."""

import pytest
import torch
import torch.nn.functional as F
from lightning import LightningModule
from reference.lightning_net import FILTERS, Net, body, data, fit, loss_of, weights
from torch import nn

import halfstep
from halfstep import HalfstepError, StepReport
from halfstep.integrations.lightning import Precision

pytestmark = [pytest.mark.usefixtures("kernels_stay"), *map(pytest.mark.filterwarnings, FILTERS)]

FP16 = "fp16 on_overflow=skip"


class Manual(Net):
    """clip: of the true norm, as the docs of Lightning show it. accumulate: by hand."""

    def __init__(self, clip=None, accumulate=1, **settings):
        super().__init__(**settings)
        self.automatic_optimization = False
        self.clip, self.accumulate = clip, accumulate

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx) / self.accumulate)
        if (batch_idx + 1) % self.accumulate == 0:
            if self.clip:
                self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("policy", ["bf16", FP16])
def test_a_clip_after_manual_backward_is_of_true_gradients(policy, fused):
    """The twin scales, unscales, clips and steps by hand."""
    reports, module, net = [], Manual(clip=0.1, accumulate=2, fused=fused), body()
    fit(module, Precision(policy, sinks=[reports.append]))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    scale = 65536.0 if policy == FP16 else 1.0
    norms = []
    for i, batch in enumerate(data()):
        with halfstep.Region(net, policy.split()[0]):
            loss = loss_of(net, batch) / 2
        (loss * scale).backward()
        if i % 2:
            for parameter in net.parameters():
                parameter.grad /= scale
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1).item())
            optimizer.step()
            optimizer.zero_grad()
    assert [report.grad_norm for report in reports] == pytest.approx(norms, rel=1e-5)
    assert min(norms) > 0.1
    torch.testing.assert_close(weights(module), weights(net), rtol=1e-6, atol=1e-6)  # the order of one division


def test_a_clip_stays_where_a_hook_looks_at_the_gradients_between():
    norms = []

    class Looks(Manual):
        def on_before_optimizer_step(self, optimizer):
            norms.append(torch.cat([p.grad.flatten() for p in self.parameters()]).norm().item())

    runs = []
    for kind in (Looks, Manual):
        reports, module = [], kind(clip=0.1)
        fit(module, Precision(FP16, sinks=[reports.append]))
        runs.append((weights(module), [report.grad_norm for report in reports]))
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-6, atol=1e-6)
    assert norms == pytest.approx(runs[1][1], rel=1e-6)
    assert runs[0][1] == pytest.approx(runs[1][1], rel=1e-6)


def test_a_clip_is_for_its_own_window():
    class Once(Manual):
        def training_step(self, batch, batch_idx):
            self.clip = 1e-3 if batch_idx == 0 else None
            super().training_step(batch, batch_idx)

    settings = {"optimizer": torch.optim.SGD, "lr": 1.0}
    module, free = Once(**settings), Manual(**settings)
    for each in (module, free):
        fit(each, Precision("bf16"), limit_train_batches=2)
    assert weights(module).sub(weights(body())).norm() > 0.1  # lr x norm of the second batch, and not 2e-3


def test_zero_grad_forgets_what_was_there():
    class Drops(Manual):
        def training_step(self, batch, batch_idx):
            self.manual_backward(loss_of(self.net, batch, 100.0))
            self.optimizers().zero_grad()
            super().training_step(batch, batch_idx)

    runs = []
    for kind in (Drops, Manual):
        reports, module = [], kind()
        fit(module, Precision("bf16", sinks=[reports.append]))
        runs.append((weights(module), [report.loss for report in reports]))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


@pytest.mark.parametrize("fused", [True, False])
def test_an_overflow_is_skipped_and_said_so_that_a_scheduler_can_wait(fused):
    class Waits(Manual):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            if self.trainer.precision_plugin.report.applied:
                self.lr_schedulers().step()

    reports = []
    module = Waits(fused=fused, factors={2: 1e6}, interval="step")
    plugin = Precision(FP16, sinks=[lambda event: reports.append(event) if isinstance(event, StepReport) else None])
    trainer = fit(module, plugin)
    assert [report.applied for report in reports] == [True, True, False, True, True, True, True]
    assert [report.scale for report in reports] == [65536.0] * 3 + [32768.0] * 4
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1e-2 * 0.5**6
    assert plugin.report_of(module.optimizers()) is plugin.report


def test_backward_behind_the_back_of_the_plugin_is_refused():
    class Raw(Manual):
        def training_step(self, batch, batch_idx):
            loss_of(self.net, batch).backward()
            self.optimizers().step()

    with pytest.raises(HalfstepError, match=r"not seen.*manual_backward"):
        fit(Raw(), Precision("bf16"))


def test_a_promotion_that_cannot_be_is_refused():
    with pytest.raises(HalfstepError, match="on_exhausted=promote under manual optimization"):
        fit(Manual(), Precision(f"{FP16} on_exhausted=promote"))


def test_an_argument_of_backward_that_a_step_cannot_take_is_refused():
    class Inputs(Manual):
        def training_step(self, batch, batch_idx):
            self.manual_backward(loss_of(self.net, batch), inputs=list(self.net[0].parameters()))

    with pytest.raises(HalfstepError, match="inputs"):
        fit(Inputs(), Precision("bf16"))


# Two optimizers.


class Gan(LightningModule):
    """bad: the batches whose discriminator loss is too large for fp16. toggles: freezes the other half meanwhile."""

    def __init__(self, fused=False, bad=(), toggles=False, together=False):
        super().__init__()
        self.automatic_optimization = False
        torch.default_generator.manual_seed(0)
        self.g = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.d = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.fused, self.bad, self.toggles, self.together = fused, bad, toggles, together
        self.before = []

    def losses(self, x, batch_idx):
        z = x[:, :4]

        def of_d():
            loss = F.softplus(-self.d(x).float()).mean() + F.softplus(self.d(self.g(z).detach()).float()).mean()
            return loss * (1e7 if batch_idx in self.bad else 1.0)

        def of_g():
            return F.softplus(-self.d(self.g(z)).float()).mean()

        return of_d, of_g

    def training_step(self, batch, batch_idx):
        both = list(zip(self.losses(batch[0], batch_idx), self.optimizers(), strict=True))
        self.before.append((weights(self.d), weights(self.g)))
        if self.together:
            for loss, optimizer in both:
                optimizer.zero_grad()
                self.manual_backward(loss(), retain_graph=True)
        for loss, optimizer in both:
            if self.toggles:
                self.toggle_optimizer(optimizer)
            if not self.together:
                optimizer.zero_grad()
                self.manual_backward(loss())
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        fused = {"fused": True} if self.fused else {}
        return [torch.optim.AdamW(half.parameters(), lr=1e-2, **fused) for half in (self.d, self.g)]


def turns(policy, fused):
    """The same GAN by hand: a scale of 65536, gradients by autograd.grad, plain steps."""
    gan = Gan(fused)
    scale = 65536.0 if policy == FP16 else 1.0
    optimizers = gan.configure_optimizers()
    for i, batch in enumerate(data()):
        for loss, optimizer in zip(gan.losses(batch[0], i), optimizers, strict=True):
            with halfstep.Region(gan, policy.split()[0]):
                value = loss()
            parameters = optimizer.param_groups[0]["params"]
            gradients = torch.autograd.grad(value * scale, parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient / scale
            optimizer.step()
    return gan


@pytest.mark.parametrize("toggles", [False, True])
@pytest.mark.parametrize(("policy", "fused"), [("bf16", False), (FP16, False), (FP16, True)])
def test_two_optimizers_take_turns_as_by_hand(policy, fused, toggles):
    reports, module = [], Gan(fused, toggles=toggles)
    fit(module, Precision(policy, sinks=[reports.append]))
    assert torch.equal(weights(module), weights(turns(policy, fused)))
    assert [report.step for report in reports] == [step for step in range(1, 8) for _ in "dg"]


def test_held_casts_of_two_optimizers_are_those_of_their_weights_of_now():
    runs = []
    for keep_casts in (False, True):
        module = Gan(fused=True)
        fit(module, Precision("bf16", keep_casts=keep_casts), max_epochs=2)
        runs.append(weights(module))
    assert torch.equal(*runs)


def test_an_overflow_of_one_leaves_the_other_its_step():
    module = Gan(bad=(2,))
    events = []
    plugin = Precision(FP16, sinks=[events.append])
    trainer = fit(module, plugin)
    reports = [event for event in events if isinstance(event, StepReport)]
    assert [report.applied for report in reports] == [True] * 4 + [False] + [True] * 9
    assert [report.scale for report in reports] == [65536.0] * 5 + [32768.0] * 9
    (d2, g2), (d3, g3) = module.before[2:4]
    assert torch.equal(d2, d3)
    assert not torch.equal(g2, g3)
    assert [plugin.report_of(optimizer).step for optimizer in trainer.optimizers] == [7, 7]


def test_both_losses_before_either_step():
    """The scale falls in the first step; what the second optimizer holds was scaled by the old one."""
    module, plugin = Gan(bad=(0,), together=True), Precision(FP16)
    twin = Gan(together=True)
    fit(module, plugin, limit_train_batches=1)
    fit(twin, Precision(FP16), limit_train_batches=1)
    assert torch.equal(weights(module.d), weights(Gan().d))
    torch.testing.assert_close(weights(module.g), weights(twin.g), rtol=1e-6, atol=1e-7)


def test_each_optimizer_has_a_log(tmp_path):
    fit(Gan(), Precision("bf16", log=tmp_path / "gan"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gan", "gan-2"]
