"""One step of a training job on tensors without memory, for ``planned.py``. Runs in a worker.

It is the plan's own: the model from its configuration, the plan's adapters, weights and states in few bits, and the
task's loss over the same tiles of logits. TRL, PEFT and bitsandbytes are not in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.formats import SIXTEEN_BIT
from halfstep.plan import lora, quantized
from halfstep.plan.checkpointing import checkpoint_blocks
from halfstep.plan.fake_step import fake_step
from halfstep.plan.step_trace import StepTrace
from halfstep.plan.subject import Subject
from halfstep.plan.target import Target
from halfstep.policy import Policy
from halfstep.train.log_probs import token_statistics
from halfstep.train.losses import ChunkedDPO, ChunkedKTO, ChunkedSFT
from halfstep.workload import Workload


@dataclass(frozen=True)
class Job:
    """What a job holds in memory, as a worker is told it.

    kind, config: the model's class and configuration. policy: text of the effective one.
    batch, length: samples of a micro-batch, and tokens of each; accumulate: micro-batches of a step.
    rank, targets: of the adapters, rank None where all weights train, targets None for all linear layers.
    """

    task: str
    kind: Any
    config: Any
    policy: str
    batch: int
    length: int
    accumulate: int
    max_norm: float
    optimizer: str
    checkpointing: bool
    rank: int | None
    targets: tuple[str, ...] | None
    in_4_bit: bool


def job_step(job: Job, target: Target) -> StepTrace:
    """The trace of a step of ``job`` on ``target``, with what tells of other batches."""
    subject = Subject(f"halfstep train {job.task}", job.batch)
    return fake_step(subject, job.policy, target, finds_growth=True, make=lambda subject, assumed: _workload(job))


def _workload(job: Job) -> Workload:
    policy = Policy.parse(job.policy)
    model = job.kind(job.config)
    if job.checkpointing:
        checkpoint_blocks(model)
    if job.rank is not None:
        lora.adapt(model, job.rank, job.targets)
        if policy.compute in SIXTEEN_BIT:
            quantized.hold_base_in_16_bit(model, policy)
        if job.in_4_bit:
            quantized.hold_base_in_4_bit(model, is_adapted_alone=False)
    num = {"dpo": 2, "kto": 2}.get(job.task, 1)  # chosen and rejected; a completion and another prompt's
    ids = torch.zeros((job.batch, num, job.length), dtype=torch.long)
    return Workload(
        model,
        # A batch is padded to its longest sample, so that there is a mask.
        [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros_like(ids)}],
        _LOSSES[job.task](_reference(job, policy, model)),
        lambda parameters: _optimizer(job, model, list(parameters)),
        max_norm=job.max_norm or None,
        accumulate=min(job.accumulate, 2),  # each further micro-batch is like the second
    )


# --- losses --------------------------------------------------------------------------------------------------------

Reference = Callable[[], contextlib.AbstractContextManager[Any]]
"""Inside, what it gives is the model to compare with."""


def _reference(job: Job, policy: Policy, model: nn.Module) -> Reference:
    if job.task in ("dpo", "kto") and job.rank is None:
        reference = job.kind(job.config).requires_grad_(False)
        if policy.compute in SIXTEEN_BIT:
            quantized.hold_base_in_16_bit(reference, policy)
        return lambda: contextlib.nullcontext(reference)
    return lambda: _switched_off(model)


@contextlib.contextmanager
def _switched_off(model: nn.Module) -> Iterator[nn.Module]:
    layers = lora.adapted_layers(model)
    adapted = [layer.forward for layer in layers]
    for layer in layers:
        layer.forward = layer.base_forward
    try:
        yield model
    finally:
        for layer, forward in zip(layers, adapted, strict=True):
            layer.forward = forward


def _log_probs(model: Any, batch: dict[str, Tensor], statistics: frozenset[str]) -> Tensor:
    """As ``losses.py`` has them: of each token but the first, with the same statistics beside them."""
    mask = batch["attention_mask"]
    hidden = model.base_model(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False).last_hidden_state
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    head = model.get_output_embeddings()
    return token_statistics(hidden, head.weight, labels, head.bias, also=statistics).log_probs[:, :-1]


def _sft(reference: Reference) -> Callable[[nn.Module, Any], Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return -_log_probs(model, _rows(batch), ChunkedSFT.statistics).mean()

    return loss


def _dpo(reference: Reference) -> Callable[[nn.Module, Any], Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        rows = _rows(batch)
        sums = _log_probs(model, rows, ChunkedDPO.statistics - {"log_sum_squares"}).sum(1)
        with torch.no_grad(), reference() as other:
            before = _log_probs(other, rows, frozenset()).sum(1)
        chosen, rejected = (sums - before).chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()

    return loss


def _kto(reference: Reference) -> Callable[[nn.Module, Any], Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        rows, others = ({name: tensor[:, at] for name, tensor in batch.items()} for at in (0, 1))
        with torch.no_grad():
            divergence = _log_probs(model, others, ChunkedKTO.statistics).sum(1)
        sums = _log_probs(model, rows, ChunkedKTO.statistics).sum(1)
        with torch.no_grad(), reference() as other:
            divergence = (divergence - _log_probs(other, others, frozenset()).sum(1)).mean()
            before = _log_probs(other, rows, frozenset()).sum(1)
        return (1 - torch.sigmoid(sums - before - divergence)).mean()

    return loss


_LOSSES = {"pretrain": _sft, "sft": _sft, "dpo": _dpo, "kto": _kto}


def _rows(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.flatten(0, 1) for name, tensor in batch.items()}


# --- optimizers ----------------------------------------------------------------------------------------------------


def _optimizer(job: Job, model: nn.Module, parameters: list[nn.Parameter]) -> Optimizer:
    if job.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3)
    if job.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        factored: Optimizer = Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)
        return factored
    adamw = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    if job.optimizer == "adamw8bit":
        embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
        return quantized.in_8_bit(adamw, embeddings)
    return quantized.in_4_bit(adamw) if job.optimizer == "adamw4bit" else adamw
