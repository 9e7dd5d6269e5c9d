"""DeepSpeed engines that the tests of its stepper share: a small net, its batches, and the engine over it."""

from __future__ import annotations

import functools
import os
import sys
from unittest import mock

import torch
from reference.nets import CPU
from torch import nn

from halfstep.distributed import DeepSpeedStepper, deepspeed_config


class Net(nn.Module):
    """Without biases and norms that are trained, which DeepSpeed keeps in 16 bit and ``master=copy`` in fp32.

    Weights are numbers that every format holds, since DeepSpeed makes its fp32 copy of what the 16-bit ones hold.
    """

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 32, bias=False), nn.Linear(32, 4, bias=False)
        self.norm = nn.LayerNorm(32, elementwise_affine=False)
        for weight in self.parameters():
            weight.data = (weight.data * 2**7).round() / 2**7

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.body(x.to(self.body.weight.dtype))))).softmax(-1)


def make_net():
    torch.manual_seed(0)
    return Net()


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=2.0**-6, momentum=0.5)


@functools.cache
def import_deepspeed():
    """For CPUs, without what it does at once and no test needs; half of the time of its import and its first engine."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    is_new = sys.modules.setdefault("mlflow", None) is None
    import deepspeed

    if is_new:
        del sys.modules["mlflow"]
    with mock.patch("torch.compile", lambda function: function):
        import deepspeed.runtime.zero.muon.original_muon  # compiles when it is imported
    # A collective of its own for CPUs, compiled for many seconds.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Four collections of garbage for lines in a log.
    deepspeed.runtime.bf16_optimizer.see_memory_usage = lambda *_, **__: None
    return deepspeed


def make_engine(config, optimizer=make_optimizer):
    deepspeed = import_deepspeed()
    model = make_net()
    config = {"zero_allow_untested_optimizer": True, **config}
    return deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)[0]


def make_stepper(policy, stage, *, accumulate=1, max_norm=None, optimizer=make_optimizer, **settings):
    config = deepspeed_config(policy, stage=stage, accumulate=accumulate, max_norm=max_norm, hardware=CPU)
    settings = {"watch": False, **settings}
    return DeepSpeedStepper(make_engine(config, optimizer), hardware=CPU, **settings)


def warm_up():
    """The first engine of a process, with all that it imports."""
    make_stepper("fp32", 2)


def weights_of(engine):
    """The fp32 weights, by name; all ranks ask for them."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}


def batches(num_micro, owner=None):
    """Micro-batches of 1 to 5 samples, those of one of two ranks or of both, and a factor that now and then spikes."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(num_micro):
        for rank in range(2):
            num = int(torch.randint(1, 6, (), generator=generator))
            x, y = torch.randn(num, 8, generator=generator), torch.randn(num, 4, generator=generator)
            spike = float(torch.rand((), generator=generator) < 0.1)
            if owner in (rank, None):
                yield x, y, 1.0 + 2.0**12 * spike


def sum_of_loss(model, x, y, factor=1.0):
    """(sum, count), as a closure returns them."""
    return (model(x).float() - y).square().sum() * factor, len(x)


def numbers_of(report):
    return report.loss, report.grad_norm, report.scale, report.applied, report.reason
