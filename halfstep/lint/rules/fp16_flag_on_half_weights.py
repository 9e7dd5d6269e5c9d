"""HS173: a Trainer is asked for fp16 on weights that were loaded in fp16."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Const, Instance, Object
from halfstep.lint.weights import Formats


def check(script: Script) -> Iterator[Problem]:
    if script.names.imports("peft"):
        return  # its adapters are fp32 beside an fp16 base
    for path in script.paths:
        formats = Formats()
        for event in (*path.before, *path.events):
            formats.see(event)
            trainer = event.result
            if event.what != "make" or not isinstance(trainer, Object) or trainer.kind != "hf trainer":
                continue
            model, arguments = trainer.argument("model", 0), trainer.argument("args", 1)
            if not isinstance(model, Object | Instance) or not isinstance(arguments, Object):
                continue
            known = formats.cast_to_16_bit(model.ident)
            if known is not None and known[0] == {"fp16"} and arguments.argument("fp16") == Const(True):
                yield Problem(
                    known[1].node,
                    "these weights are fp16 and are trained below with fp16=True, whose scaler refuses fp16 gradients: "
                    "load them in fp32, or use bf16=True",
                )


RULE = Rule(
    code="HS173",
    name="fp16-flag-on-half-weights",
    severity="error",
    summary="A Hugging Face Trainer with fp16=True is given weights loaded in fp16.",
    why="""
`torch_dtype=torch.float16` decides what the weights are kept in, `fp16=True` turns on autocast and a `GradScaler`.
Together they stop in the first step with `ValueError: Attempting to unscale FP16 gradients.`, because a gradient has
the format of its weight and dividing an fp16 gradient by a scale of 65,536 would lose it below 6.0e-8.

The flag is made for fp32 weights: 4 bytes each, cast by autocast where a product needs it. Name the format when you
load: since transformers 5 the default is that of the checkpoint, which may be fp16. With frozen weights in fp16,
put the trained ones into fp32 afterwards. Adapters of PEFT are fp32 by default.
""",
    bad=(
        """\
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


def main(path, train_set):
    model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float16)  # HS173
    arguments = TrainingArguments("out", fp16=True, learning_rate=2e-5, max_grad_norm=1.0)
    Trainer(model=model, args=arguments, train_dataset=train_set).train()
""",
        """\
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer


def load(path):
    net = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    return net.half()  # HS173


def main(path, pairs):
    config = RewardConfig(output_dir="out", fp16=True)
    RewardTrainer(load(path), config, train_dataset=pairs).train()
""",
    ),
    good=(
        """\
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


def main(path, train_set):
    model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32)
    arguments = TrainingArguments("out", fp16=True, learning_rate=2e-5, max_grad_norm=1.0)
    Trainer(model=model, args=arguments, train_dataset=train_set).train()
""",
        """\
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


def main(path, train_set):
    model = AutoModelForCausalLM.from_pretrained(path)
    arguments = TrainingArguments("out", fp16=True, learning_rate=2e-5, max_grad_norm=1.0)
    Trainer(model=model, args=arguments, train_dataset=train_set).train()
""",
        """\
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


def main(path, train_set):
    base = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float16)
    model = get_peft_model(base, LoraConfig(r=16))
    Trainer(model=model, args=TrainingArguments("out", fp16=True), train_dataset=train_set).train()
""",
    ),
    check=check,
)
