"""A model that is made on the spot: a small Llama and a tokenizer trained on the very data, the same in every run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 1024
CONTEXT = 4096
"""Tokens; positions are rotations, so that a long context costs nothing until it is used."""

_NUM_CHARACTERS = 2_000_000  # of the data that the tokenizer is trained on
_CHAT = """\
{{- bos_token }}
{%- for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + eos_token }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""


def tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most 1024 tokens, trained on the first two million characters of ``texts``.

    It can write any text, since every byte is a token. A text gets ``<s>`` in front, as Llama's do; TRL adds ``</s>``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        _first(texts, _NUM_CHARACTERS),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(special.values()),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    bos = special["bos_token"]
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, made.token_to_id(bos))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=_CHAT, padding_side="right", **special)


def model(words: PreTrainedTokenizerFast, seed: int = 0) -> LlamaForCausalLM:
    """A Llama of 0.9 million fp32 parameters and sizes that tensor cores like, with weights that ``seed`` chooses."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _first(texts: Iterable[str], num: int) -> Iterator[str]:
    for text in texts:
        yield text[:num]
        num -= len(text)
        if num <= 0:
            return
