"""Ragged batches weighted by their tokens: a closure that returns (sum, count), in fp16 with replay."""

import torch
import torch.nn.functional as F

import halfstep

PADDING = -100  # cross_entropy ignores these targets

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(32, 64), torch.nn.Linear(64, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
stepper = halfstep.Stepper(model, optimizer, "fp16", accumulate=2, max_norm=1.0)


def loss(tokens):
    """The sum of the loss over the real tokens, and how many there are."""
    targets = tokens[:, 1:].flatten()
    logits = model(tokens[:, :-1].clamp(min=0)).flatten(0, 1).float()
    return F.cross_entropy(logits, targets, ignore_index=PADDING, reduction="sum"), (targets != PADDING).sum()


for _ in range(40):
    tokens = torch.arange(12).repeat(8, 1) + torch.randint(20, (8, 1))  # each row counts up from somewhere
    for row, length in zip(tokens, torch.randint(4, 13, (8,)), strict=True):
        row[length:] = PADDING
    report = stepper.step(lambda tokens=tokens: loss(tokens))
    if report and report.step % 5 == 0:
        print(report)
