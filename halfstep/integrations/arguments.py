"""What a Trainer's arguments say about precision, and which of them cannot be had together with a Stepper."""

from __future__ import annotations

import logging

import transformers

from halfstep.errors import HalfstepError
from halfstep.policy import Policy

logger = logging.getLogger(__name__)


def policy_of(args: transformers.TrainingArguments, policy: str | Policy | None) -> str | Policy:
    """The policy that is asked for: ``policy``, else what the flags say, and ``auto`` without a flag."""
    said = str(args.mixed_precision)  # of the flags, or of accelerate launch
    if policy is None:
        return "auto" if said == "no" else said
    if (args.fp16 or args.bf16) and Policy.parse(policy).compute not in (said, "auto"):
        logger.warning("The policy %s is in effect, and the argument %s=True is not used.", policy, said)
    return policy


def check_arguments(args: transformers.TrainingArguments) -> None:
    """Refuse what a Stepper cannot do, before anything is built."""
    if args.n_gpu > 1:
        raise HalfstepError(
            f"{args.n_gpu} GPUs in one process",
            "nn.DataParallel copies the model in every step, past its master weights and module rules",
            f"Start one process a GPU (torchrun --nproc_per_node {args.n_gpu}), or set CUDA_VISIBLE_DEVICES=0.",
        )
    if (name := str(args.optim.value)) in ("lomo", "adalomo") or name.endswith("_layerwise"):
        raise HalfstepError(
            f"optim={name!r}",
            "it moves weights during the backward pass, before anybody can know whether the gradient is finite",
            "Use an optimizer that steps after it, such as adamw_torch, or one with small states, adamw_bnb_8bit.",
        )
    for name in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name):
            raise HalfstepError(
                f"{name}=True",
                "evaluate() would round the weights themselves, and training would go on from those",
                "Leave it out: evaluation computes in the formats of the policy.",
            )
