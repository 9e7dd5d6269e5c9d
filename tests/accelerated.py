"""What the tests of Accelerate's loops share: a fresh state of its singletons, small nets, and loops."""

import contextlib

import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep.integrations.accelerate import Accelerator


@contextlib.contextmanager
def fresh_state():
    """Accelerate keeps what it found in its process; each test finds it anew."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def net(width=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))


def adamw(model, fused=True):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)


def loader(num, size=6):
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(num * size, 8), torch.randint(4, (num * size,))), batch_size=size)


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def accelerator_for(policy, accumulate=1, **arguments):
    return Accelerator(cpu=True, policy=policy, gradient_accumulation_steps=accumulate, **arguments)


def train(accelerator, model, optimizer, batches, max_norm=None, scheduler=None):
    """The loop of Accelerate's guide; the reports of its windows."""
    reports = []
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if max_norm is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            reports.append(optimizer.report.to_dict())
    return reports
