"""Small runs over several ranks, for tests of what ranks agree on."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep import HalfstepError
from halfstep.distributed.replication import replicate
from halfstep.hardware import Hardware

A100 = Hardware.of("cuda", "NVIDIA A100-SXM4-80GB", capability=(8, 0))
V100 = Hardware.of("cuda", "Tesla V100-SXM2-16GB", capability=(7, 0))
PASCAL = Hardware.of("cuda", "NVIDIA GeForce GTX 1080", capability=(6, 1))


class OddAdamW(torch.optim.AdamW):
    """It draws from torch's generator when it rounds, or says so as torchao's optimizers do."""

    bf16_stochastic_round = True


def make(
    engine="ddp",
    optimizer=torch.optim.AdamW,
    lr=0.001,
    wire="fp32",
    frozen=(),
    thawed=(),
    frozen_dtype=torch.float32,
    is_reversed=False,
    schedule=False,
    **kwargs,
):
    """A model under an engine, its optimizer, and what a Stepper is built with.

    ``thawed`` and ``frozen_dtype`` act behind the engine's back.
    """
    torch.default_generator.manual_seed(0)
    model = net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    for name in frozen:
        net.get_parameter(name).requires_grad_(False)
    if engine == "ddp":
        model = replicate(net, wire=wire)
        assert isinstance(model, DistributedDataParallel)
    for name in frozen:
        net.get_parameter(name).data = net.get_parameter(name).data.to(frozen_dtype)
    for name in thawed:
        net.get_parameter(name).requires_grad_(True)
    parameters = list(net.parameters())
    kwargs = {"policy": "bf16", "watch": False, **kwargs}
    made = optimizer(parameters[::-1] if is_reversed else parameters, lr=lr)
    if schedule:
        kwargs["scheduler"] = torch.optim.lr_scheduler.StepLR(made, 10)
    return model, made, kwargs


def stopped(call):
    """The text of the error that ``call`` ends with, None if it does not."""
    try:
        call()
    except HalfstepError as error:
        return str(error)
    return None


def bits_of(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()


def flip(tensor, element=3, bit=0):
    """One bit of one element."""
    integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    mask = torch.tensor([1 << bit], dtype=torch.int64).to(integers)
    tensor.detach().view(-1)[element : element + 1].view(integers).bitwise_xor_(mask)
