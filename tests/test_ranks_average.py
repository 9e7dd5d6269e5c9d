"""WeightAverage over ranks: the average of the weights that each step left, and the model with it."""

import pytest
import torch
from torch import nn

from halfstep import Stepper, WeightAverage
from halfstep.distributed import replicate, shard
from halfstep.gradients import local_of


def average_of_steps(engine):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    model = replicate(net) if engine == "ddp" else shard(net, "fp32")
    stepper = Stepper(model, torch.optim.SGD(net.parameters(), lr=0.1), "fp32", watch=False)
    average = WeightAverage(stepper, decay=None)
    seen = []
    for step in range(4):
        x = torch.full((3, 4), 0.1 * step + torch.distributed.get_rank())
        average.update(stepper.step(lambda x=x: model(x).square().mean()))
        seen.append([local_of(parameter.detach()).clone() for parameter in net.parameters()])
    with average.swapped():
        swapped = [local_of(parameter.detach()).clone() for parameter in net.parameters()]
    after = [local_of(parameter.detach()).clone() for parameter in net.parameters()]
    return seen, swapped, after


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_ranks_average_what_each_step_left(world2, engine):
    for seen, swapped, after in world2.run(average_of_steps, engine):
        for *steps, mean, end in zip(*seen, swapped, after, strict=True):
            assert not torch.equal(steps[0], steps[-1]) or not steps[0].numel()
            # Four running means in fp32, each with a rounding or two of 2^-24 of the weight, which is below 1.
            assert torch.allclose(mean.double(), torch.stack(steps).double().mean(0), rtol=0, atol=8 * 2.0**-24)
            assert torch.equal(end, steps[-1])
