"""The log-probabilities of labels, slow and plain: all logits at once in fp64, a loop over tokens, and autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Twin:
    """Of each token that counts; 0 where the label is -100."""

    log_probs: Tensor
    entropy: Tensor
    mean_logit: Tensor
    log_sum_squares: Tensor
    is_top1: Tensor


def plain(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
) -> Twin:
    """In fp64, of inputs of any format. Gradients flow through the casts to the inputs."""
    rows = []
    for state, label in zip(hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).tolist(), strict=True):
        if label == -100:
            rows.append([torch.zeros((), dtype=torch.float64)] * 5)
            continue
        logits = weight.double() @ state.double()
        if bias is not None:
            logits = logits + bias.double()
        logits = logits * scale
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        log_p = torch.log_softmax(logits, 0)
        p = log_p.exp()
        finite = torch.where(p > 0, log_p, 0)
        is_top1 = torch.tensor(float(int(logits.argmax()) == label), dtype=torch.float64)
        rows.append([log_p[label], -(p * finite).sum(), logits.mean(), p.square().sum().log(), is_top1])
    columns = [torch.stack(column).view(labels.shape) for column in zip(*rows, strict=True)]
    return Twin(*columns[:4], columns[4].bool())
