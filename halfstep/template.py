"""The file that ``halfstep new FILE`` writes: a workload to fill in, which runs as it stands."""

from __future__ import annotations

from pathlib import Path

from halfstep.errors import HalfstepError

TEMPLATE = '''\
"""My workload for halfstep: what to train, built anew from a seed.

It runs as it stands, on a small model and random data. Replace the parts marked YOURS, then try it:

    halfstep compare {file}

A command takes path/to/file.py:function; the function is called workload unless you say otherwise.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep

DEFAULT_STEPS = 100  # how many optimizer steps a command runs when you do not say
DEFAULT_SEEDS = 5  # how many seeds halfstep compare runs


def workload(seed: int) -> halfstep.Workload:
    """Called once for each run. Python, NumPy and torch are already seeded with ``seed``."""
    # YOURS: your model, on the CPU and in fp32. halfstep moves it, and chooses the formats; call no autocast.
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    # YOURS: your data. The same data for every seed, in an order that depends on the seed alone.
    fixed = torch.Generator().manual_seed(0)
    inputs = torch.randn(640, 16, generator=fixed)
    targets = inputs[:, :4].sum(dim=1, keepdim=True)

    # A DataLoader or a list starts again at its end. A generator works too, but it must be endless.
    batches = DataLoader(
        TensorDataset(inputs[:512], targets[:512]),
        batch_size=32,
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),  # its own generator: nothing else can change the order
    )

    def loss(model, batch):
        """The mean loss over the batch. Leave it in fp32: cast what the model returns with .float() first."""
        x, y = batch  # already on the model's device
        return F.mse_loss(model(x).float(), y)
        # When batches hold different numbers of tokens or samples, return (sum, count), so that each one counts once:
        #   return F.mse_loss(model(x).float(), y, reduction="sum"), y.numel()

    def optimizer(parameters):
        """Any torch optimizer; fused=True saves a pass over the gradients where it has one."""
        return torch.optim.AdamW(parameters, lr=1e-2, fused=True)

    @torch.no_grad()
    def evaluate(model):
        """Optional: the loss on data that was held out, lower is better. Without it the training loss is compared."""
        device = next(model.parameters()).device
        model.eval()
        held_out_loss = F.mse_loss(model(inputs[512:].to(device)).float(), targets[512:].to(device))
        model.train()
        return held_out_loss

    def scheduler(optimizer):
        """Optional: the learning rate over the steps. It moves on after each applied step, and only then."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

    return halfstep.Workload(
        model=model,
        batches=batches,
        loss=loss,
        optimizer=optimizer,
        evaluate=evaluate,
        scheduler=scheduler,
        max_norm=1.0,  # optional: clip the gradient to this 2-norm; None never clips
        accumulate=1,  # micro-batches in one optimizer step
    )
'''


def write_template(path: str | Path) -> Path:
    """Writes the template to ``path``, a new ``.py`` file in a directory that exists, and returns the path."""
    path = Path(path)
    if path.suffix != ".py":
        raise HalfstepError(
            f"new workload file {path}", "its name does not end in .py", f"Use {path.stem or 'train'}.py."
        )
    if not path.parent.is_dir():
        raise HalfstepError(
            f"new workload file {path}",
            f"there is no directory {path.parent}",
            f"Create it first: mkdir -p {path.parent}.",
        )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE.replace("{file}", path.name))
    except FileExistsError:
        raise HalfstepError(
            f"new workload file {path}", "it exists already, and would be overwritten", "Choose another name."
        ) from None
    except OSError as error:
        raise HalfstepError(
            f"new workload file {path}", f"it cannot be written ({error.strerror})", "Choose another directory."
        ) from None
    return path
