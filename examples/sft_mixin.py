"""Fine-tuning with TRL, without the mixin and with it: the same losses in bf16, and fp16 that loses no batch.

Everything is made on the spot: a small Llama, its tokenizer, and sentences that count upwards.
"""

import contextlib
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is asked for, and no telemetry sent

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from halfstep.integrations.transformers import PrecisionMixin


class PreciseSFTTrainer(PrecisionMixin, SFTTrainer):
    pass


WORDS = ["[PAD]", "[EOS]", *(f"n{i}" for i in range(30))]


def make_tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[PAD]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]")


def make_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=32, **tokens, **sizes))


def train(kind, **more):
    """What ``kind`` logs in 40 steps."""
    rows = [" ".join(f"n{(start + i) % 30}" for i in range(10)) for start in range(30)]
    args = SFTConfig(
        output_dir="sft",
        max_steps=40,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        max_grad_norm=100.0,  # where clipping acts, torch rounds in another place
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        activation_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
    )
    data = datasets.Dataset.from_dict({"text": rows})
    trainer = kind(make_model(), args=args, train_dataset=data, processing_class=make_tokenizer(), **more)
    with contextlib.redirect_stdout(None):
        trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


datasets.disable_progress_bars()
plain, bf16 = train(SFTTrainer), train(PreciseSFTTrainer, policy="bf16")
print("the same losses in bf16:", [entry["loss"] for entry in bf16] == [entry["loss"] for entry in plain])
fp16 = train(PreciseSFTTrainer, policy="fp16 scale.init=16777216")
replays, skipped = sum(entry["replays"] for entry in fp16), sum(entry["skipped_steps"] for entry in fp16)
print(f"fp16: {replays} replays, {skipped} steps skipped, loss {fp16[0]['loss']:.1f} to {fp16[-1]['loss']:.1f}")
