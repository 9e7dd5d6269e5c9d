"""The precision plugin under the Trainer: a loop's steps are those of a Stepper."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from lightning import Callback, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from reference.lightning_net import FILTERS, QUIET, Net, body, data, fit, loss_of, weights

import halfstep
from halfstep import HalfstepError, ScaleExhausted, Stepper, StepReport
from halfstep.events import Promotion
from halfstep.integrations.lightning import Precision

pytestmark = [pytest.mark.usefixtures("kernels_stay"), *map(pytest.mark.filterwarnings, FILTERS)]

FP16 = "fp16 on_overflow=skip"


def twin(policy, fused=True, accumulate=1, max_norm=None, epochs=1):
    """The same training as a loop over a Stepper: its model and its reports."""
    net = body()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    stepper = Stepper(net, optimizer, policy, accumulate=accumulate, max_norm=max_norm)
    reports = []
    for _ in range(epochs):
        for batch in data():
            reports.append(stepper.step(lambda batch=batch: loss_of(net, batch)))
        reports.append(stepper.flush())
    return net, [report for report in reports if report]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("policy", ["fp32", "bf16", FP16, "bf16 module:net.2=fp32", "bf16 master=split16"])
def test_a_run_is_that_of_a_stepper_to_the_bit(policy, fused):
    """7 batches in windows of 4: the second window of an epoch is short, and weighted by the 3 that it holds."""
    reports, module = [], Net(fused)
    plugin = Precision(policy, sinks=[reports.append])
    fit(module, plugin, max_epochs=2, accumulate_grad_batches=4, gradient_clip_val=0.3)
    net, expected = twin(policy.replace("net.2", "2"), fused, 4, 0.3, epochs=2)
    assert [report.to_dict() for report in reports] == [report.to_dict() for report in expected]
    assert len(reports) == 4
    assert torch.equal(weights(module), weights(net))
    assert max(report.grad_norm for report in reports) > 0.3  # it did clip


def test_a_window_length_that_is_no_power_of_two_rounds_each_loss_once():
    reports, module = [], Net()
    fit(module, Precision("fp32", sinks=[reports.append]), accumulate_grad_batches=3)
    net, expected = twin("fp32", accumulate=3)
    assert [r.loss for r in reports] == pytest.approx([r.loss for r in expected], rel=1e-6)
    assert [r.grad_norm for r in reports] == pytest.approx([r.grad_norm for r in expected], rel=1e-6)
    # An update of Adam is about lr whatever the gradient: its rounding is that of the gradient, 1e-7, times 1e-2.
    torch.testing.assert_close(weights(module), weights(net), rtol=1e-6, atol=1e-6)


def test_clipping_with_a_fused_optimizer_under_fp16_is_the_plain_one():
    """Lightning refuses this. The twin scales, unscales, clips and steps by hand."""
    module, net = Net(fused=True), body()
    fit(module, Precision(FP16), gradient_clip_val=0.1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    for batch in data():
        with halfstep.Region(net, "fp16"):
            loss = loss_of(net, batch)
        (loss * 65536).backward()
        for parameter in net.parameters():
            parameter.grad /= 65536
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(weights(module), weights(net), rtol=1e-6, atol=1e-6)  # the order of one division


class Trace(Callback):
    """Learning rate and weights at the end of each batch."""

    def __init__(self):
        self.rates, self.weights = [], []

    def on_train_batch_end(self, trainer, module, *_):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.weights.append(weights(module))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("policy", "factor"), [(FP16, 1e6), ("bf16", float("nan")), ("fp32", float("inf"))])
def test_a_gradient_that_is_not_finite_moves_nothing_and_holds_the_scheduler(policy, factor, fused):
    reports, trace = [], Trace()
    module = Net(fused, factors={2: factor}, interval="step")
    fit(module, Precision(policy, sinks=[reports.append]), callbacks=[trace], gradient_clip_val=0.3)
    reports = [report for report in reports if isinstance(report, StepReport)]
    assert [report.applied for report in reports] == [True, True, False, True, True, True, True]
    assert torch.equal(trace.weights[1], trace.weights[2])
    assert trace.weights[-1].isfinite().all()
    assert trace.rates == [1e-2 * 0.5**n for n in (1, 2, 2, 3, 4, 5, 6)]
    scales = [report.scale for report in reports]
    assert scales == ([65536.0] * 3 + [32768.0] * 4 if policy == FP16 else [1.0] * 7)
    assert not reports[2].grad_norm < float("inf")


def test_a_scheduler_by_epochs_is_not_held():
    module = Net(factors={6: float("nan")}, interval="epoch")
    trainer = fit(module, Precision("bf16"))
    assert not trainer.precision_plugin.report.applied
    assert trainer.optimizers[0].param_groups[0]["lr"] == 5e-3


def test_the_hook_of_the_scheduler_is_given_back():
    module = Net(interval="step")
    fit(module, Precision("bf16"))
    assert "lr_scheduler_step" not in vars(module)


class Hot(Net):
    """What its first layer makes is beyond fp16 whatever the scale, and no trouble for fp32."""

    def __init__(self, **settings):
        super().__init__(**settings)
        with torch.no_grad():
            self.net[0].weight *= 1e6

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net[2](self.net[0](batch[0]) * 1e-6).float(), batch[1])


def test_a_scale_at_its_floor_ends_the_run_with_the_module_at_fault():
    module = Hot(fused=False)
    before = weights(module)
    with pytest.raises(ScaleExhausted, match=r"floor of 16384, step 3.*module:net\.0=fp32"):
        fit(module, Precision(f"{FP16} scale.floor=16384"))
    assert torch.equal(weights(module), before)


def test_a_module_at_fault_can_go_on_in_fp32():
    reports = []
    plugin = Precision(f"{FP16} scale.init=2 on_exhausted=promote", sinks=[reports.append])
    trainer = fit(Hot(fused=False), plugin)
    assert [report.module for report in reports if isinstance(report, Promotion)] == ["net.0"]
    assert [r.applied for r in reports if isinstance(r, StepReport)] == [False, False] + [True] * 5
    assert "module:net.0=fp32" in plugin.info.effective
    assert trainer.precision == plugin.info.effective


@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`")
@pytest.mark.parametrize("left_out", [1, 3])
def test_a_step_that_returns_nothing_weighs_nothing(left_out):
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == left_out else super().training_step(batch, batch_idx)

    reports, module, net = [], Skips(), body()
    fit(module, Precision("bf16", sinks=[reports.append]), accumulate_grad_batches=4, limit_train_batches=4)
    stepper = Stepper(net, torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True), "bf16", accumulate=3)
    for i, batch in enumerate(data()):
        if i < 4 and i != left_out:
            expected = stepper.step(lambda batch=batch: loss_of(net, batch))
    assert reports[0].loss == pytest.approx(expected.loss, rel=1e-6)
    torch.testing.assert_close(weights(module), weights(net), rtol=1e-6, atol=1e-6)


class Formats(Net):
    def note(self, batch):
        self.formats.append(self.net(batch[0]).dtype)

    def validation_step(self, batch, batch_idx):
        self.note(batch)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        self.note(batch)
        return self.formats[-1]


@pytest.mark.parametrize("policy", ["bf16", FP16, "fp32"])
def test_evaluation_is_in_the_formats_of_the_policy(policy):
    dtype = {"bf16": torch.bfloat16, FP16: torch.float16, "fp32": torch.float32}[policy]
    module, plugin = Formats(), Precision(policy)
    module.formats = []
    trainer = fit(module, plugin, validation=data(10))
    assert module.formats == [dtype] * 2  # the sanity check, and the epoch
    trainer.test(module, data(10), verbose=False)
    trainer.predict(module, data(10))
    alone = Trainer(plugins=Precision(policy), **QUIET)
    alone.validate(module, data(10), verbose=False)
    assert module.formats == [dtype] * 5
    assert (alone.precision, alone.precision_plugin.info.effective) == (policy, policy)


@pytest.mark.parametrize("kind", ["module", "callback"])
@pytest.mark.parametrize("policy", ["bf16", FP16])
def test_a_hook_before_the_step_sees_true_gradients(policy, kind):
    norms, reports = [], []

    def look(self, *args):
        module = self if kind == "module" else args[1]
        norms.append(torch.cat([p.grad.flatten() for p in module.parameters()]).norm().item())

    owner = type("Owner", (Net if kind == "module" else Callback,), {"on_before_optimizer_step": look})
    module = owner() if kind == "module" else Net()
    callbacks = [] if kind == "module" else [owner()]
    plugin = Precision(policy, sinks=[reports.append])
    fit(module, plugin, callbacks=callbacks, accumulate_grad_batches=2, gradient_clip_val=0.1)
    net, expected = twin(policy, accumulate=2, max_norm=0.1)
    assert norms == pytest.approx([report.grad_norm for report in expected], rel=1e-6)
    assert [r.grad_norm for r in reports] == pytest.approx([r.grad_norm for r in expected], rel=1e-6)
    torch.testing.assert_close(weights(module), weights(net), rtol=1e-6, atol=1e-6)


def test_a_clip_by_value_is_of_true_gradients():
    module, net = Net(), body()
    fit(module, Precision(FP16), gradient_clip_val=0.01, gradient_clip_algorithm="value")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    for batch in data():
        with halfstep.Region(net, "fp16"):
            loss = loss_of(net, batch)
        gradients = torch.autograd.grad(loss * 65536, list(net.parameters()))
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter.grad = (gradient / 65536).clamp(-0.01, 0.01)
        optimizer.step()
    assert torch.equal(weights(module), weights(net))


def test_an_own_clip_gets_true_gradients_and_an_overflow_is_skipped_all_the_same():
    class Clips(Net):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)

    reports = []
    fit(Clips(factors={2: 1e6}), Precision(FP16, sinks=[reports.append]))
    assert [report.applied for report in reports] == [True, True, False, True, True, True, True]


@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`")
def test_a_step_without_a_loss_does_not_move_the_scheduler():
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 2 else super().training_step(batch, batch_idx)

    trace = Trace()
    fit(Skips(interval="step"), Precision("bf16"), callbacks=[trace])
    assert trace.rates == [1e-2 * 0.5**n for n in (1, 2, 2, 3, 4, 5, 6)]


@pytest.mark.parametrize("policy", ["bf16", FP16])
def test_attention_is_evaluated_in_the_formats_too_and_its_values_can_be_used(policy):
    """Its fast path knows no autocast; what a validation makes is no tensor of inference mode."""

    class Attends(Net):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
            self.seen_in_validation = []

        def validation_step(self, batch, batch_idx):
            self.seen_in_validation.append(self.layer(batch[0][None]))

    module = Attends()
    fit(module, Precision(policy), validation=data(10), num_sanity_val_steps=0)
    (seen,) = module.seen_in_validation
    with halfstep.Region(module, policy.split()[0]).inference():
        expected = module.layer.eval()(next(iter(data(10)))[0][None])
    assert torch.equal(seen, expected)
    assert not seen.is_inference()


def test_held_casts_change_nothing_with_a_validation_inside_of_a_window():
    modules = [Formats(), Formats()]
    for module, keep in zip(modules, (True, False), strict=True):
        module.formats = []
        plugin = Precision("bf16", keep_casts=keep)
        fit(module, plugin, validation=data(10), accumulate_grad_batches=4, val_check_interval=2)
        assert len(module.formats) == 4
    assert torch.equal(weights(modules[0]), weights(modules[1]))


def test_a_pass_without_gradients_in_a_training_step_takes_none_from_the_next():
    class Looks(Net):
        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                self.net(batch[0])
            return super().training_step(batch, batch_idx)

    module = Looks()
    fit(module, Precision("bf16"))
    assert torch.equal(weights(module), weights(twin("bf16")[0]))


# What the plugin says.


def test_replay_that_cannot_be_is_said_once():
    plugin = Precision("fp16")
    with pytest.warns(UserWarning, match="on_overflow=replay is skip"):
        fit(Net(), plugin)
    trainer = fit(Net(), plugin)  # a second warning would be an error
    assert (plugin.info.requested, plugin.info.effective) == ("fp16", FP16)
    assert "runs a training step once" in plugin.info.reason
    assert trainer.precision == FP16


def test_auto_says_why():
    plugin = Precision()
    assert plugin.precision == "auto"
    fit(Net(), plugin)
    assert plugin.info.requested == "auto"
    assert plugin.info.effective == str(halfstep.Policy.parse(plugin.precision))
    assert len(plugin.info.reason) > 10


def test_a_run_has_a_log_and_a_guard(tmp_path):
    plugin = Precision("bf16", log=tmp_path / "run")
    fit(Net(), plugin)
    text = "".join(path.read_text() for path in (tmp_path / "run").iterdir() if path.suffix != ".lock")
    assert text.count("grad_norm") >= 7
    assert plugin.report.step == 7


# What it refuses.


def test_what_cannot_work_is_one_line():
    with pytest.raises(HalfstepError, match="bf17"):
        Precision("bf17")
    with pytest.raises(Exception, match=r"precision=16-mixed.*halfstep.*Precision\('bf16'\).*Choose one"):
        Trainer(precision="16-mixed", plugins=Precision("bf16"), **QUIET)
    with pytest.raises(HalfstepError, match=r"LBFGS under Lightning.*stepper.step\(closure\)"):
        fit(Net(fused=False, optimizer=torch.optim.LBFGS), Precision("bf16"))
    with pytest.raises(HalfstepError, match="before there is a model"):
        _ = Precision("bf16").info
    with pytest.raises(HalfstepError, match="no module"):
        fit(Net(), Precision("bf16 module:nowhere=fp32"))


def test_a_machine_without_lightning_is_told_what_to_install():
    program = "import sys; sys.modules['lightning'] = None; import halfstep.integrations.lightning"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "it needs lightning, which is not installed. Run: pip install 'halfstep[lightning]'" in result.stderr


def test_a_module_without_an_optimizer_is_refused():
    class Bare(Net):
        def configure_optimizers(self):
            return None

    with pytest.warns(UserWarning, match="no optimizer"), pytest.raises(HalfstepError, match="without an optimizer"):
        fit(Bare(), Precision("bf16"))


def test_a_module_with_its_own_backward_is_refused():
    class Own(Net):
        def backward(self, loss):
            loss.backward()

    with pytest.raises(HalfstepError, match=r"Own\.backward.*manual_backward"):
        fit(Own(), Precision("bf16"))


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"])
def test_a_strategy_that_does_it_by_itself_is_refused(name):
    strategy = type(name, (SingleDeviceStrategy,), {})(torch.device("cpu"))
    settings = {key: value for key, value in QUIET.items() if key not in ("accelerator", "devices")}
    trainer = Trainer(plugins=Precision("bf16"), strategy=strategy, max_epochs=1, **settings)
    with pytest.raises(HalfstepError, match=f"{name} with halfstep.*halfstep.distributed"):
        trainer.fit(Net(), data())
