"""The model that is trained, with its tokenizer: made on the spot, from a folder, or by the name it has on a hub.

Its weights are read last: what its configuration and its tokenizer tell is checked, and planned, before.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.errors import HalfstepError, and_more
from halfstep.train import tiny
from halfstep.train.dataset import Data
from halfstep.train.four_bit import check_kernels
from halfstep.train.held import Held

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Pretrained:
    """A causal language model whose weights are not read yet, and its tokenizer, which has a pad token.

    skeleton: the model by its configuration, with weights on the meta device. That of ``tiny`` has its weights.
    context: the number of tokens that the model takes, None where its configuration doesn't say.
    """

    source: str
    skeleton: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context: int | None
    notes: tuple[str, ...] = ()

    def load(self, held: Held | None = None) -> PreTrainedModel:
        """The model with its weights, on the CPU: in fp32, or at once as ``held`` says. HalfstepError without them.

        That takes the memory of what is held and of one weight beside it; files that are mapped are not counted, as
        the system takes their memory back when it needs it.
        """
        return self.skeleton if self.source == "tiny" else _filled(self.source, self.skeleton.config, held)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.skeleton.parameters())

    def __str__(self) -> str:
        return f"{self.source}: {type(self.skeleton).__name__}, {self.num_parameters:,} parameters"


def find(name: str, data: Data, seed: int = 0) -> Pretrained:
    """The model ``name``: ``tiny``, a folder that transformers wrote, or a name on the hub.

    ``data`` is what the tokenizer of ``tiny`` is trained on; ``seed`` chooses its weights. A conversation needs a
    tokenizer with a chat template. HalfstepError in one line for whatever cannot be trained; no weights are read.
    """
    if name == "tiny":
        words = tiny.tokenizer(data.texts())
        return Pretrained(name, tiny.model(words, seed), words, tiny.CONTEXT)
    config = _config(name)
    words = _tokenizer(name)
    skeleton = _skeleton(name, config)
    notes = []
    if words.eos_token is None:
        raise HalfstepError(f"model {name}", "its tokenizer has no eos token, which ends an answer", "Set eos_token.")
    if words.pad_token is None:
        words.pad_token = words.eos_token
        # TRL masks padding by its place, not by its token, so that an eos which ends an answer is still learned.
        notes.append(f"The tokenizer has no pad token: its eos token {words.eos_token!r} pads, which changes no loss.")
    rows = skeleton.get_input_embeddings().weight.shape[0]
    if len(words) > rows:
        why = f"its tokenizer has {len(words)} tokens and the model {rows} embeddings"
        raise HalfstepError(f"model {name}", why, "Use the tokenizer that belongs to the model.")
    if data.is_conversational and not words.chat_template:
        why = f"its tokenizer has no chat template, and {data.source} has messages"
        raise HalfstepError(f"model {name}", why, "Use a chat model's tokenizer, or data of prompt + completion.")
    return Pretrained(name, skeleton, words, getattr(config, "max_position_embeddings", None), tuple(notes))


def _config(name: str) -> Any:
    from transformers import AutoConfig

    path = Path(name)
    if path.is_file():
        raise HalfstepError(
            f"model {name}", "it is a file, not a folder", "Give the folder that save_pretrained wrote."
        )
    if path.is_dir() and not (path / "config.json").is_file():
        is_adapter = (path / "adapter_config.json").is_file()
        why = "the folder has no config.json" + (" but an adapter's, which is no model by itself" if is_adapter else "")
        fix = "Merge it into its base model first." if is_adapter else "Give the folder that save_pretrained wrote."
        raise HalfstepError(f"model {name}", why, fix)
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        raise _refused(name, path, "its configuration", error) from None


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    path = Path(name)
    known = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json", "spiece.model")
    if path.is_dir() and not any((path / file).is_file() for file in known):
        fix = "Write it there with tokenizer.save_pretrained."
        raise HalfstepError(f"model {name}", "the folder has no tokenizer", fix)
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        raise _refused(name, path, "its tokenizer", error) from None


def _skeleton(name: str, config: Any) -> Any:
    import torch
    from accelerate import init_empty_weights
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        why = f"it is a {config.model_type} model, which has no causal language model"
        raise HalfstepError(f"model {name}", why, "Give one that writes text, as Llama, Qwen or GPT-2.")
    try:
        with init_empty_weights():
            skeleton = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
        skeleton.tie_weights()  # each stands for itself until here
    except Exception as error:
        raise _refused(name, Path(name), "its configuration", error) from None
    return skeleton


def _filled(name: str, config: Any, held: Held | None) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    given: dict[str, Any] = {}
    is_quantized = getattr(config.get_text_config(), "quantization_config", None) is not None
    if held is not None and not is_quantized:  # whose file says how it is read
        from halfstep.train.filling import Filling

        if held.in_4_bit:
            check_kernels(held.device)
        given["quantization_config"] = Filling(held)
    try:
        # What is trained is kept in fp32; the policy chooses what is computed in 16 bit.
        model, info = AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=torch.float32, output_loading_info=True, trust_remote_code=False, **given
        )
    except Exception as error:
        raise _refused(name, Path(name), "its weights", error) from None
    if missing := sorted(info["missing_keys"]):
        # transformers fills them with random numbers, with a warning.
        why = f"its files lack the weights {and_more(missing)}"
        raise HalfstepError(f"model {name}", why, "Give a folder with all weights of a causal language model.")
    return model


def _refused(name: str, path: Path, part: str, error: Exception) -> HalfstepError:
    said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    if path.is_dir():
        return HalfstepError(f"model {name}", f"{part} cannot be loaded: {said}", "Look at its files.")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        fix = "Give tiny, or a folder that save_pretrained wrote."
        return HalfstepError(f"model {name}", "there is no such folder", fix)
    why = f"there is no such folder, and the hub did not give it: {said}"
    fix = "Give tiny, a folder that save_pretrained wrote, or a name of the hub while it can be reached."
    return HalfstepError(f"model {name}", why, fix)
