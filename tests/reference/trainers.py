"""Tiny models, data and arguments for the Trainers of Transformers and TRL, all made on the spot."""

import os

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from halfstep.integrations.transformers import PrecisionMixin

transformers.logging.set_verbosity_error()

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "attention_dropout": 0.1,  # so that a random state that is not put back is seen
    "pad_token_id": 0,
}
ARGUMENTS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "learning_rate": 1e-2,
}


class Precise(PrecisionMixin, Trainer):
    pass


def net(kind=LlamaForCausalLM, **more):
    torch.manual_seed(0)
    return kind(LlamaConfig(**{**SIZES, **more}))


def rows(num=24):
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(1, 64, (num, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in drawn]


def arguments(folder, kind=TrainingArguments, **more):
    return kind(output_dir=str(folder), **{**ARGUMENTS, **more})


def logs(trainer, *keys):
    """What was logged at each step: one value a step, or a tuple where several keys are asked for."""
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [entry[keys[0]] if len(keys) == 1 else tuple(entry[key] for key in keys) for entry in steps]


def trained(trainer, **more):
    trainer.train(**more)
    return trainer


def same_weights(one, other):
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
