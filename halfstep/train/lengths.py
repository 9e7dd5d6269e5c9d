"""Whether examples fit the context of a model, counted in its own tokens before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halfstep.errors import HalfstepError
from halfstep.train.dataset import Data

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_BATCH = 256  # rows that are tokenized at once


@dataclass(frozen=True)
class Lengths:
    """Tokens of the examples: of the longest one, of all together, and how many examples are cut at ``max_length``."""

    max_length: int
    longest: int
    num_tokens: int
    num_cut: int

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.num_cut:
            return ()
        are = "1 example is" if self.num_cut == 1 else f"{self.num_cut} examples are"
        is_cut = "is cut" if self.num_cut == 1 else "are cut"
        longest = f"the longest has {self.longest} tokens"
        return (f"{are} longer than --max-length {self.max_length} and {is_cut} there; {longest}.",)


def check_lengths(
    data: Data, tokenizer: PreTrainedTokenizerBase, max_length: int, context: int | None = None
) -> Lengths:
    """Count the tokens of every example; HalfstepError if a prompt leaves no room for any token of its answer.

    TRL leaves such an example out without a word. An answer that is too long is cut at ``max_length``, and counted.
    A text to pretrain on is packed into the context and never cut. ``context`` is what the model takes at most.
    """
    if context is not None and max_length > context:
        why = f"the model takes {context} tokens"
        raise HalfstepError(f"--max-length {max_length}", why, f"Use {context} or less.")
    longest = num_tokens = num_cut = num_full = longest_prompt = 0
    first: tuple[str, int] | None = None
    for part in (data.train, data.evaluation):
        for line, num_prompt, num in _counted(part, data, tokenizer) if part is not None else ():
            longest, num_tokens = max(longest, num), num_tokens + num
            longest_prompt = max(longest_prompt, num_prompt)
            num_cut += num > max_length and data.task != "pretrain"
            if num_prompt >= max_length:
                first, num_full = first or (line, num_prompt), num_full + 1
    if first is not None:
        line, num = first
        more = num_full - 1
        others = f", as {more} more {'has' if more == 1 else 'have'} too many" if more else ""
        why = f"its prompt has {num} tokens{others}, and --max-length {max_length} leaves none for the answer"
        needed = longest_prompt + 1
        fix = f"Use --max-length {needed} or more, shorten such prompts, or leave the lines out."
        if context is not None and needed > context:
            fix = f"Shorten such prompts or leave the lines out: one needs {needed}, and the model takes {context}."
        raise HalfstepError(_where(line), why, fix)
    return Lengths(max_length, longest, num_tokens, num_cut)


def _where(line: str) -> str:
    file, _, number = line.rpartition(":")
    return f"{file} line {number}"


def _counted(part: Dataset, data: Data, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, int, int]]:
    """Of each example: its line, the tokens of its prompt (0 without one), and those of its longest answer with it."""
    answers = [column for column in data.columns if column not in ("prompt", "label")]
    for start in range(0, len(part), _BATCH):
        rows: dict[str, list[Any]] = part[start : start + _BATCH]
        prompts = [0] * len(rows["line"])
        if "prompt" in data.columns:
            prompts = _num_tokens(tokenizer, rows["prompt"], is_prompt=True)
        whole = [0] * len(prompts)
        for column in answers:
            texts = rows[column]
            if "prompt" in data.columns:
                texts = [prompt + text for prompt, text in zip(rows["prompt"], texts, strict=True)]
            nums = _num_tokens(tokenizer, texts, is_prompt=False)
            whole = [max(pair) for pair in zip(whole, nums, strict=True)]
        # TRL ends a text with the eos token; a chat template ends its messages by itself.
        ends = not data.is_conversational
        yield from ((line, num, all_ + ends) for line, num, all_ in zip(rows["line"], prompts, whole, strict=True))


def _num_tokens(tokenizer: PreTrainedTokenizerBase, texts: list[Any], is_prompt: bool) -> list[int]:
    encoded: Any
    if isinstance(texts[0], str):
        encoded = tokenizer(texts, verbose=False)
    else:
        encoded = tokenizer.apply_chat_template(texts, return_dict=True, add_generation_prompt=is_prompt)
    return [len(ids) for ids in encoded["input_ids"]]
