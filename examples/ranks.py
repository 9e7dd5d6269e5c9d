"""Train a classifier of handwritten digits on one device, or over ranks, with the same losses.

python examples/ranks.py
torchrun --nproc-per-node 2 examples/ranks.py            # DDP: every rank holds the whole model
torchrun --nproc-per-node 2 examples/ranks.py fsdp2      # FSDP2: every rank holds a part of each weight
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import halfstep
from halfstep.distributed import replicate, shard, start

rank, num_ranks = start()  # 0 of 1 without torchrun
device = "cuda" if torch.cuda.is_available() else "cpu"

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16
labels = torch.tensor(digits.target, device=device)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(device)
model = shard(model) if "fsdp2" in sys.argv else replicate(model)  # one device can leave out this line
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
stepper = halfstep.Stepper(model, optimizer, "auto", accumulate=4 // num_ranks, max_norm=1.0)

order = torch.Generator().manual_seed(0)  # the same on every rank, which takes its share
for _ in range(5):
    batches = torch.randperm(1536, generator=order).split(64)
    for batch in batches[rank::num_ranks]:
        report = stepper.step(lambda batch=batch: F.cross_entropy(model(images[batch]).float(), labels[batch]))
    if rank == 0:
        print(report)

with stepper.inference():
    accuracy = (model(images[1536:]).argmax(dim=1) == labels[1536:]).float().mean().item()
if rank == 0:
    print(f"accuracy {accuracy:.2f}")
