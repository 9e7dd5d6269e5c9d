"""A rank of a job that goes wrong as it is told: torchrun runs this file, tests import ``train``.

python elastic.py FOLDER FAULT     FAULT: none, or what rank 1 does in step 10, the first time
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.ranks import progress

NUM_STEPS = 14
EVERY = 4
"""Steps between two checkpoints."""


def batch(step, rank):
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 8, generator=g), torch.randn(4, 2, generator=g)


def train(folder, fault, rank):
    """All steps from the last checkpoint on; losses by step, and the weights at the end."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stepper = halfstep.Stepper(model, optimizer, "fp16", accumulate=2, log=f"{folder}/log")
    halfstep.distributed.load(f"{folder}/checkpoints", stepper)
    losses = {}
    while stepper.num_steps < NUM_STEPS:
        step = stepper.num_steps + 1
        if fault == "hang" and step == 10 and rank == 1:
            time.sleep(100)
        for micro in range(2):
            x, y = batch(2 * step + micro, rank)

            def loss(x=x, y=y, step=step):
                out = model(x)
                if step == 10 and rank == 1 and not Path(folder, "was").exists():
                    go_wrong(folder, fault)
                return (out.float() - y).square().sum(), float(len(x))

            report = stepper.step(loss)
        losses[step] = report.loss
        if step % EVERY == 0:
            halfstep.distributed.save(f"{folder}/checkpoints", stepper)
    stepper.close()
    return losses, {name: weight.detach().clone() for name, weight in net.named_parameters()}


def go_wrong(folder, fault):
    if fault == "kill":
        Path(folder, "was").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "raise":
        raise ValueError("no such token")
    if fault == "leave":
        sys.exit(0)
    if fault == "wait":
        Path(folder, "waits").touch()
        time.sleep(100)


if __name__ == "__main__":
    torch.set_num_threads(1)
    progress.BEAT_S = 0.3
    folder, fault = sys.argv[1:]
    rank, num = halfstep.distributed.start(timeout_s=4.0 if fault == "hang" else 60.0)
    assert halfstep.distributed.start() == (rank, num) == (int(os.environ["RANK"]), 2)
    losses, weights = train(folder, fault, rank)
    if rank == 0:
        torch.save(weights, f"{folder}/weights.pt")
        Path(folder, "losses.json").write_text(json.dumps(losses))
