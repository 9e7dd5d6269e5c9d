"""Models of Transformers and timm, built from a class or a configuration alone: nothing is downloaded."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.errors import HalfstepError
from halfstep.plan.bare_model import (
    OUTPUT_LOSS,
    batch_size_of,
    given_batch,
    output_loss,
    workload_of,
    zeros,
)
from halfstep.plan.subject import Input, Subject
from halfstep.workload import Workload, seed_everything, signature_of

MAX_TOKENS = 1024
"""Tokens of a sample, where the configuration allows as many."""
IMAGE_SIZE = 224
"""Pixels along a side of an image, where a configuration does not say."""

_OFFLINE = "A plan builds from a class or a configuration and downloads nothing"


def library_workload(subject: Subject) -> tuple[Workload, list[str]] | None:
    """The workload of ``transformers:...``, a ``config.json`` or ``timm:...``; None if ``subject`` is none of these."""
    library, _, name = subject.spec.partition(":")
    if library == "timm":
        return _timm(subject, name)
    if library == "transformers":
        return _transformers(subject, name)
    if Path(subject.spec).name == "config.json":
        return _transformers(subject, subject.spec)
    return None


def _imported(library: str, spec: str, name: str | None = None) -> Any:
    """The module ``library``, or what it calls ``name``, None if nothing; it may import more to give that."""
    try:
        with patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}):
            module = importlib.import_module(library)
            return module if name is None else getattr(module, name, None)
    except ImportError as error:
        missing = (error.name or library).partition(".")[0]
        why = f"{library} cannot be imported" + ("" if missing == library else f", since {missing} is not installed")
        raise HalfstepError(spec, why, f"Run: pip install {missing}") from None
    except Exception as error:  # as of packages that were built for another torch
        raise HalfstepError(
            spec,
            f"{library} cannot be imported ({_first_line(error)})",
            f"Install a {library} that fits torch, and what it imports.",
        ) from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _built(spec: str, make: Callable[[], Any]) -> Any:
    """What ``make`` gives; what it raises becomes one line."""
    try:
        return make()
    except HalfstepError:
        raise
    except Exception as error:
        raise HalfstepError(
            spec,
            f"it cannot be built from its configuration alone ({_first_line(error)})",
            "Build it in a function workload(seed), and plan that.",
        ) from None


# --- Transformers --------------------------------------------------------------------------------------------------


def _transformers(subject: Subject, name: str) -> tuple[Workload, list[str]]:
    spec = subject.spec
    transformers = _imported("transformers", spec)
    path = Path(name)
    folder = path.parent if path.name == "config.json" else path
    if (folder / "config.json").is_file():
        config = _built(
            spec,
            lambda: transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False),
        )
        named = (getattr(config, "architectures", None) or [None])[0]
        if named is None:
            raise HalfstepError(
                spec, "the configuration does not name its class (architectures)", "Add it, as GPT2LMHeadModel."
            )
        kind = _class(transformers, named, spec)
    else:
        if folder.is_dir() or path.name == "config.json":
            raise HalfstepError(spec, f"there is no config.json in {folder}", "Name the folder that holds it.")
        kind = _class(transformers, name, spec)
        config = _built(spec, kind.config_class)
    seed_everything(0)
    model: nn.Module = _built(spec, lambda: kind(config))
    notes = ["Weights are in fp32 and random; only the configuration is read."]
    if getattr(config, "use_cache", False):
        config.use_cache = False
        notes.append("No cache of keys and values is kept (use_cache=False), as Transformers' Trainer trains.")
    batch, said = _text_or_image(subject, model, config)
    labels, how = _labels(model, config, batch, batch_size_of(subject))
    if labels:
        notes += [*said, f"The loss is the model's own, of {how}."]
    else:
        notes += [*said, OUTPUT_LOSS]
    return workload_of(subject, model, batch | labels, output_loss, notes)


def _class(transformers: ModuleType, name: str, spec: str) -> Any:
    kind = _imported("transformers", spec, name) if name.isidentifier() else None
    if kind is None:
        close = difflib.get_close_matches(name, [n for n in dir(transformers) if "Model" in n or "For" in n], 3)
        raise HalfstepError(
            spec,
            f"Transformers has no class {name!r}, and there is no such folder. {_OFFLINE}",
            f"Name a class ({', '.join(close) or 'GPT2LMHeadModel'}), or a folder with its config.json.",
        )
    if not (isinstance(kind, type) and issubclass(kind, nn.Module) and getattr(kind, "config_class", None)):
        raise HalfstepError(
            spec, f"{name} is not a model with a configuration of its own", "Name one, as transformers:GPT2LMHeadModel."
        )
    return kind


def _text_or_image(subject: Subject, model: Any, config: Any) -> tuple[dict[str, Tensor], list[str]]:
    """The batch by argument names, and what it is."""
    size, main = batch_size_of(subject), model.main_input_name
    names = list(_parameters(model))
    if subject.inputs is not None:
        given = given_batch(subject)
        order = [main, *(name for name in names if name != main)] if len(given) == 1 else names
        batch = dict(zip(order, given, strict=False))
        return batch, [f"The batch is {size} x {subject.inputs} ({', '.join(batch)}), as given."]
    if main == "input_ids":
        num_tokens = _num_tokens(model, config)
        batch = {main: zeros(size, Input("int", (num_tokens,)))}
        if config.is_encoder_decoder and "labels" not in names:
            batch["decoder_input_ids"] = zeros(size, Input("int", (num_tokens,)))
        return batch, [f"A sample is {num_tokens} tokens without padding."]
    if main == "pixel_values":
        side = getattr(config, "image_size", None) or IMAGE_SIZE
        height, width = side if isinstance(side, list | tuple) else (side, side)
        channels = getattr(config, "num_channels", 3)
        return {main: zeros(size, Input("float", (channels, height, width)))}, [
            f"A sample is an image of {channels} x {height} x {width}."
        ]
    raise HalfstepError(
        subject.spec,
        f"nothing says how long its {main} are",
        "Give the inputs of one sample, as 80x3000 or 16000.",
    )


def _num_tokens(model: nn.Module, config: Any) -> int:
    """The context of the configuration, up to MAX_TOKENS."""
    longest = getattr(config, "max_position_embeddings", None) or MAX_TOKENS
    for name, module in model.named_modules():
        # Positions that begin after the padding's, as in RoBERTa: that many are never used.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            longest = min(longest, module.num_embeddings - module.padding_idx - 1)
    return min(longest, MAX_TOKENS)


def _parameters(model: nn.Module) -> list[str]:
    signature = signature_of(model.forward)
    return [] if signature is None else list(signature.parameters)


_PER_TOKEN = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification")
_PER_SAMPLE = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")


def _labels(model: nn.Module, config: Any, batch: dict[str, Tensor], size: int) -> tuple[dict[str, Tensor], str]:
    """Labels by argument names for a head that computes a loss, and what they are."""
    name, ids = type(model).__name__, next(iter(batch.values()))
    num_targets: int | None = getattr(config, "max_target_positions", None)
    if name.endswith(_PER_TOKEN) and (num_targets or not ids.is_floating_point()):
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 0  # the decoder's inputs are the labels, moved by this one
        shape = (num_targets,) if num_targets and ids.is_floating_point() else tuple(ids.shape[1:])
        return {"labels": zeros(size, Input("int", shape))}, "a label for each token"
    if name.endswith(_PER_SAMPLE):
        if getattr(config, "pad_token_id", 0) is None:
            config.pad_token_id = 0  # a decoder looks for the last token that is none
        return {"labels": zeros(size, Input("int", ()))}, f"{config.num_labels} classes"
    if name.endswith("ForQuestionAnswering"):
        return {key: zeros(size, Input("int", ())) for key in ("start_positions", "end_positions")}, "two positions"
    return {}, ""


# --- timm ----------------------------------------------------------------------------------------------------------


def _timm(subject: Subject, name: str) -> tuple[Workload, list[str]]:
    spec = subject.spec
    if ":" in name or "/" in name:
        raise HalfstepError(spec, f"it is on the hub. {_OFFLINE}", "Name one of timm's own, as timm:resnet50.")
    timm = _imported("timm", spec)
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), 3)
        raise HalfstepError(
            spec, "timm has no model of this name", f"Use {' or '.join(close) or 'one of timm.list_models()'}."
        )
    seed_everything(0)
    model: Any = _built(spec, lambda: timm.create_model(name, pretrained=False))
    size = batch_size_of(subject)
    if subject.inputs is not None:
        images, what = given_batch(subject)[0], f"The batch is {size} x {subject.inputs}, as given."
    else:
        shape = tuple(model.default_cfg["input_size"])
        images = zeros(size, Input("float", shape))
        what = f"A sample is an image of {' x '.join(map(str, shape))}."
    batch = (images, zeros(size, Input("int", ())))
    notes = ["Weights are in fp32 and random.", what, f"The loss is the cross entropy of {model.num_classes} classes."]
    return workload_of(subject, model, batch, _classification_loss, notes)


def _classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images).float(), labels)
