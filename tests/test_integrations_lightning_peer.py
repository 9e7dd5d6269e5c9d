"""What docs/lightning.md says of Lightning's own plugins, held against the Lightning that is installed."""

import pytest
import torch
from lightning import Callback, Fabric
from lightning.fabric.plugins.precision import MixedPrecision as FabricPrecision
from lightning.pytorch.plugins.precision import MixedPrecision
from reference.lightning_net import FILTERS, Net, body, data, fit, loss_of, weights
from test_integrations_lightning_manual import Manual

from halfstep.integrations.lightning import Precision

pytestmark = [pytest.mark.usefixtures("kernels_stay"), *map(pytest.mark.filterwarnings, FILTERS)]


def fp16():
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


class Norms(Callback):
    """The norm of the gradient that each step gets."""

    def __init__(self):
        self.norms = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.norms.append(torch.cat([p.grad.flatten() for p in module.parameters()]).norm().item())


def test_it_refuses_to_clip_with_a_fused_optimizer():
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Net(fused=True), fp16(), gradient_clip_val=0.1)


def test_its_scheduler_advances_on_a_skipped_step():
    trainer = fit(Net(fused=False, factors={2: 1e6}, interval="step"), fp16())
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1e-2 * 0.5**7


def test_it_writes_a_nan_into_the_weights():
    module = Net(fused=False, factors={2: float("nan")})
    fit(module, MixedPrecision("bf16-mixed", "cpu"))
    assert weights(module).isnan().any()


def test_it_divides_a_short_window_by_a_whole_ones_length():
    theirs, ours = Norms(), Norms()
    fit(Net(fused=False), MixedPrecision("bf16-mixed", "cpu"), accumulate_grad_batches=4, callbacks=[theirs])
    fit(Net(fused=False), Precision("bf16"), accumulate_grad_batches=4, callbacks=[ours])
    assert theirs.norms[0] == pytest.approx(ours.norms[0], rel=2.0**-8)
    assert theirs.norms[1] == pytest.approx(ours.norms[1] * 3 / 4, rel=2.0**-8)


def test_its_clip_after_manual_backward_is_of_scaled_gradients():
    norms = Norms()
    fit(Manual(clip=0.1, fused=False), fp16(), limit_train_batches=1, callbacks=[norms])
    assert norms.norms == pytest.approx([0.1 / 65536], rel=1e-3)


def test_its_clip_under_fabric_raises_on_an_overflow():
    fabric = Fabric(
        accelerator="cpu", devices=1, plugins=FabricPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    )
    net = body()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    fabric.backward(loss_of(model, next(iter(data())), 1e6))
    with pytest.raises(RuntimeError, match="non-finite"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)


def test_its_fp16_on_a_cpu_is_bf16():
    with pytest.warns(UserWarning, match="fp16 is not supported on CPU"):
        fabric = Fabric(accelerator="cpu", devices=1, precision="16-mixed")
    assert fabric._precision.precision == "bf16-mixed"
