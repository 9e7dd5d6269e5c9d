"""SFT, DPO and KTO whose log-probabilities come from :mod:`halfstep.train.log_probs`: mixins for TRL's trainers.

    class Trainer(ChunkedDPO, trl.DPOTrainer): ...

TRL's trainers ask the model for one value a token (``model(..., labels=..., fused_lm_head=True)``) and make every loss
out of these: the losses, the metrics and the reference model stay TRL's. The mixin answers that call with fp32 tiles;
every other call of the model, and every case that it cannot serve, is TRL's own, and :attr:`ChunkedHead.log_probs_note`
says which.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.region import rule_of
from halfstep.train.log_probs import CHUNK_BYTES, STATISTICS, TokenStatistics, token_statistics

_log = logging.getLogger(__name__)

_TRL_NAMES = {"mean_logit": "mean_logits", "log_sum_squares": "log_sum_sq_probs"}
_NONE: frozenset[str] = frozenset()


class ChunkedHead:
    """What the three have in common. ``chunk_bytes`` may be set on the class: what a tile of fp32 logits takes."""

    chunk_bytes: int = CHUNK_BYTES
    statistics: frozenset[str] = _NONE
    log_probs_note: str = "No log-probability was computed yet."
    """Which path the last forward pass took, and why where it is not ours."""

    accelerator: Any
    model: Any
    ref_model: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._serve_both()

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        # Runs inside TRL's __init__: policy and reference have to be rounded alike.
        self._serve_both()
        return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]

    def _serve_both(self) -> None:
        # WPO weighs tokens by one more statistic, which costs a pass over the tile.
        asked = self.statistics if getattr(self, "use_weighting", False) else self.statistics - {"log_sum_squares"}
        self._serve(self.model, asked)
        if self.ref_model is not None:
            self._serve(self.ref_model, _NONE)

    def _serve(self, model: Any, asked: frozenset[str]) -> None:
        """Put our answer in front of TRL's."""
        inner = self.accelerator.unwrap_model(model)
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        theirs = inner.forward
        if getattr(theirs, "is_chunked", False):
            return
        # Accelerate opens its autocast around the forward that it found, TRL's: inside ours, if it came before us.
        region = self.accelerator.autocast if hasattr(inner, "_original_forward") else contextlib.nullcontext
        inner.forward = types.MethodType(self._answer(theirs, asked, region), inner)

    def _answer(
        self, theirs: Callable[..., Any], asked: frozenset[str], region: Callable[[], AbstractContextManager[Any]]
    ) -> Callable[..., Any]:
        # generate() reads the signature of the model's own forward through the wraps.
        @functools.wraps(theirs)
        def forward(model: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
            if not fused_lm_head:
                return theirs(*args, **kwargs)
            reason = _not_ours(model, kwargs)
            self._note(reason)
            if reason is not None:
                return theirs(*args, fused_lm_head=True, **kwargs)
            with region():
                return _forward(model, args, kwargs, asked, self.chunk_bytes)

        forward.is_chunked = True  # type: ignore[attr-defined]
        return forward

    def _note(self, reason: str | None) -> None:
        note = f"Log-probabilities are fp32, in tiles of {self.chunk_bytes / 2**20:g} MiB."
        if reason is not None:
            note = f"Log-probabilities come from TRL's own head, since {reason}."
            if note != self.log_probs_note:
                _log.warning(note)
        self.log_probs_note = note


class ChunkedSFT(ChunkedHead):
    """In front of ``trl.SFTTrainer``: losses nll and dft."""

    statistics = frozenset({"entropy", "is_top1"})


class ChunkedDPO(ChunkedHead):
    """In front of ``trl.DPOTrainer``: every loss it has."""

    statistics = frozenset(STATISTICS)


class ChunkedKTO(ChunkedHead):
    """In front of ``trl.KTOTrainer``: every loss it has."""

    statistics = frozenset({"entropy", "mean_logit"})


def _not_ours(model: Any, kwargs: dict[str, Any]) -> str | None:
    """Why TRL's head has to answer this call, or None."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return f"the output layer is a {type(head).__name__} without a weight in floating point"
    if hasattr(weight, "ds_id"):
        return "the weight of the output layer is in shards (ZeRO-3)"
    if type(weight) not in (Tensor, nn.Parameter):
        return f"the weight of the output layer is a {type(weight).__name__}"  # shards of FSDP2, torchao's formats
    if not isinstance(_inside(head), nn.Linear):
        return f"the output layer is a {type(head).__name__}, which may do more than multiply by its weight"
    if kwargs.get("output_router_logits") or getattr(model.config.get_text_config(), "output_router_logits", False):
        return "the model's experts add a loss of their own"
    return None


def _inside(head: Any) -> Any:
    """The layer that PEFT trains as a whole, with modules_to_save; its wrapper does nothing but choose it."""
    saved, active = getattr(head, "modules_to_save", None), getattr(head, "active_adapters", ())
    if saved is None or head.__class__.__name__ != "ModulesToSaveWrapper":
        return head
    return saved[active[0]] if active and not head.disable_adapters else head.original_module


def _forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asked: frozenset[str], chunk_bytes: int) -> Any:
    from trl.trainer.utils import FusedCausalLMOutput

    kwargs = dict(kwargs)
    labels, shifted = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
    num_items = kwargs.pop("num_items_in_batch", None)
    hidden = model.base_model(*args, **{**kwargs, "use_cache": False}).last_hidden_state
    num_places = hidden.shape[1] if shifted is not None else hidden.shape[1] - 1
    if shifted is None:
        # The last place predicts nothing. Labels move, since to slice the hidden states would copy them.
        shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    outer = model.get_output_embeddings()
    head = _inside(outer)
    weight, bias = head.weight, head.bias
    multiplier, soft_cap = _transform(model.config.get_text_config())
    with contextlib.ExitStack() as stack:
        # The head is not called, so what a policy says about it is looked up.
        rule = rule_of(outer) or rule_of(head)
        if rule is not None:
            is_low, dtype = rule
            stack.enter_context(torch.autocast(weight.device.type, dtype=dtype if is_low else None, enabled=is_low))
            if not is_low:
                hidden, weight, bias = hidden.float(), weight.float(), bias if bias is None else bias.float()
        found = token_statistics(
            hidden.to(weight.device),
            weight,
            shifted.to(weight.device),
            bias,
            also=asked,
            scale=multiplier,
            soft_cap=soft_cap,
            chunk_bytes=chunk_bytes,
        )
    values = {_TRL_NAMES.get(name, name): value for name, value in _fields(found).items()}
    values = {name: value[:, :num_places] for name, value in values.items()}
    mask = (shifted != -100)[:, :num_places].to(weight.device)
    divisor = mask.sum().clamp(min=1) if num_items is None else num_items
    return FusedCausalLMOutput(loss=-values["log_probs"].sum() / divisor, label_mask=mask, **values)


def _fields(found: TokenStatistics) -> dict[str, Tensor]:
    return {name: value for name in ("log_probs", *STATISTICS) if (value := getattr(found, name)) is not None}


def _transform(config: Any) -> tuple[float, float | None]:
    """What a model does to its logits after the product: a factor, then a cap."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (value := getattr(config, name, None)) is not None:
            break
    else:
        value = getattr(config, "logits_scaling", None)
        if value is not None and config.model_type != "hyperclovax":
            value = 1 / value  # Granite and MiniCPM3 divide by it
    return 1.0 if value is None else float(value), getattr(config, "final_logit_softcapping", None)
