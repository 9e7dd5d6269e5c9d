"""A checkpoint of the Trainer carries the plugin's state: a run that goes on has the bits of one that never stopped."""

import pytest
import torch
from lightning import Callback, Trainer
from reference.lightning_net import FILTERS, QUIET, Net, data, fit, weights
from test_integrations_lightning_manual import Gan

from halfstep import HalfstepError, StepReport
from halfstep.integrations.lightning import Precision

pytestmark = [pytest.mark.usefixtures("kernels_stay"), *map(pytest.mark.filterwarnings, FILTERS)]


class Save(Callback):
    """Saves once, at the end of a batch of the run."""

    def __init__(self, path, at):
        self.path, self.at = path, at

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if module.seen == self.at:
            trainer.save_checkpoint(self.path)


class Remembers:
    """A loader that goes on where it was, as Lightning asks of one for a checkpoint in the middle of an epoch."""

    def __init__(self):
        self.batches, self.num = list(data()), 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        self.num %= len(self.batches)
        for batch in self.batches[self.num :]:
            self.num += 1
            yield batch

    def state_dict(self):
        return {"num": self.num}

    def load_state_dict(self, state):
        self.num = state["num"]


POLICIES = [
    "bf16",
    "bf16 master=split16",
    "bf16 master=stochastic",
    "fp16 on_overflow=skip scale.interval=3",
    "fp16 on_overflow=skip scale.hysteresis=2 master=split16",
]


@pytest.mark.parametrize("at", [7, 9, 10], ids=["epoch's end", "in a window", "window's end"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_that_goes_on_has_the_bits_of_one_that_never_stopped(policy, at, tmp_path):
    def run(num_epochs, checkpoint=None, **settings):
        module = Net(interval="step", factors=dict.fromkeys((2, 3, 8), 1e6) if "fp16" in policy else {})
        module.seen = at if checkpoint else 0
        reports = []
        plugin = Precision(
            policy, sinks=[lambda event: reports.append(event) if isinstance(event, StepReport) else None]
        )
        settings |= {"max_epochs": num_epochs, "accumulate_grad_batches": 3, "gradient_clip_val": 0.3}
        trainer = fit(module, plugin, Remembers(), checkpoint, **settings)
        return weights(module), [report.to_dict() for report in reports], trainer

    path = tmp_path / "run.ckpt"
    whole, reports, trainer = run(3, callbacks=[Save(path, at)])
    resumed, later, again = run(3, path)
    assert len(reports) == 9
    assert str(later) == str(reports[-len(later) :])  # a NaN is not equal to itself
    assert torch.equal(whole, resumed)
    assert trainer.precision_plugin.state_dict()["scale"] == again.precision_plugin.state_dict()["scale"]
    assert trainer.optimizers[0].param_groups[0]["lr"] == again.optimizers[0].param_groups[0]["lr"]


def test_the_state_loads_with_weights_alone(tmp_path):
    """No class of ours is pickled, so that torch.load may be strict."""
    trainer = fit(Net(), Precision("fp16 on_overflow=skip"), accumulate_grad_batches=4)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    state = torch.load(tmp_path / "run.ckpt", weights_only=True)["Precision"]
    assert state["policy"] == "fp16 on_overflow=skip"
    assert state["scale"]["value"] == 65536


def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path):
    class Two(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            pass

        def configure_optimizers(self):
            return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 2)]

    trainer = fit(Net(), Precision("bf16"))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    with pytest.raises(HalfstepError, match="the state of 1 optimizers"):
        fit(Two(), Precision("bf16"), checkpoint=tmp_path / "run.ckpt", max_epochs=2)


def test_a_checkpoint_without_our_state_starts_the_scale_afresh(tmp_path):
    trainer = Trainer(max_epochs=1, enable_checkpointing=False, **QUIET)
    trainer.fit(Net(), data())
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    plugin = Precision("fp16 on_overflow=skip")
    fit(Net(), plugin, checkpoint=tmp_path / "run.ckpt", max_epochs=2)
    assert (plugin.report.step, plugin.report.scale) == (7, 65536)


def test_a_run_of_16_mixed_goes_on_with_its_scale(tmp_path):
    trainer = Trainer(max_epochs=1, enable_checkpointing=False, **QUIET)
    trainer.fit(Net(), data())
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    checkpoint = torch.load(tmp_path / "run.ckpt", weights_only=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    checkpoint["MixedPrecision"] = scaler.state_dict()
    torch.save(checkpoint, tmp_path / "run.ckpt")
    plugin = Precision("fp16 on_overflow=skip")
    fit(Net(), plugin, checkpoint=tmp_path / "run.ckpt", max_epochs=2)
    assert plugin.report.scale == 1024


@pytest.mark.parametrize("policy", ["bf16 master=split16", "fp16 on_overflow=skip scale.interval=3"])
def test_two_optimizers_go_on_together(policy, tmp_path):
    """The scale is one, and the gradient that the second loss left in the first model is part of the state."""
    straight, stopped, resumed = (Gan(bad=(2,) if "fp16" in policy else ()) for _ in range(3))
    plugins = [Precision(policy) for _ in range(3)]
    fit(straight, plugins[0], max_epochs=2)
    fit(stopped, plugins[1]).save_checkpoint(tmp_path / "run.ckpt")
    fit(resumed, plugins[2], checkpoint=tmp_path / "run.ckpt", max_epochs=2)
    assert torch.equal(weights(straight), weights(resumed))
    assert plugins[0].report.to_dict() == plugins[2].report.to_dict()
    assert plugins[0].report.step == 14
