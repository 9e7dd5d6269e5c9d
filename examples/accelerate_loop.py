"""A plain Accelerate loop in fp16: windows of four batches, clipping, a scheduler, stopped and resumed.

python examples/accelerate_loop.py
torchrun --nproc-per-node 2 examples/accelerate_loop.py

The last batch of the first epoch is beyond fp16, in a window that is shorter than the others. The step is skipped, the
scheduler waits, and the loss scale halves.
"""

import tempfile

import torch
import torch.nn.functional as F
from accelerate.utils import broadcast_object_list
from torch.utils.data import DataLoader, TensorDataset

from halfstep.integrations.accelerate import Accelerator

accelerator = Accelerator(policy="fp16", gradient_accumulation_steps=4, cpu=not torch.cuda.is_available())


def begin():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
    x = torch.randn(720, 16)
    loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=40)
    return accelerator.prepare(model, optimizer, scheduler, loader)


def train(model, optimizer, scheduler, loader, epochs):
    for epoch in epochs:
        for i, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss * 1e8 if epoch == 0 and i == len(loader) - 1 else loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(optimizer.report)


model, *others = begin()
accelerator.print(accelerator.info.effective, "because", accelerator.info.reason)
train(model, *others, range(4))
weights = accelerator.unwrap_model(model)[0].weight.detach().clone()

with tempfile.TemporaryDirectory() as own:
    (folder,) = broadcast_object_list([own])  # that of the first rank
    accelerator.free_memory()
    train(*begin(), range(2))
    accelerator.save_state(folder)

    accelerator.free_memory()
    model, *others = begin()
    accelerator.load_state(folder)
    train(model, *others, range(2, 4))
    accelerator.print("the same bits:", torch.equal(accelerator.unwrap_model(model)[0].weight, weights))
    accelerator.end_training()
