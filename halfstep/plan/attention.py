"""Which kernel a card takes for ``scaled_dot_product_attention``, and why.

The rule is that of torch 2.11 to 2.13, ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` and
``sdp_utils_cpp.h``: the kernels are tried in an order, and the first one that takes the call gets it. On capability 9.0
and 10.x cuDNN comes first; then flash, memory-efficient, and math, which takes everything. The kernels give the same
result up to rounding and keep very different amounts of memory.

What no rule can tell without the card is said: the version of cuDNN, and everything about an AMD card, whose kernels
come from a library that torch asks at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from halfstep.errors import HalfstepError

FLASH, EFFICIENT, CUDNN, MATH = "flash", "memory-efficient", "cuDNN", "math"
KERNELS = (CUDNN, FLASH, EFFICIENT, MATH)

Capability = tuple[int, int]


@dataclass(frozen=True)
class AttentionCall:
    """One call, as the rule sees it.

    format: of query, key and value, such as ``bf16``; another name than those of halfstep.formats for other dtypes.
    query, key, value: shapes, (batch, heads, tokens, head size) where there are four dimensions.
    mask: shape of the mask, None without one. mask_needs_grad: whether it is trained.
    is_dense: whether the last stride of query, key, value and mask is 1.
    needs_grad: whether query, key or value is trained.
    """

    format: str
    query: Sequence[int]
    key: Sequence[int]
    value: Sequence[int]
    mask: Sequence[int] | None = None
    mask_needs_grad: bool = False
    is_causal: bool = False
    dropout: float = 0.0
    enable_gqa: bool = False
    needs_grad: bool = True
    is_dense: bool = True


@dataclass(frozen=True)
class AttentionChoice:
    """kernel: one of KERNELS. reason: why this one. assumed: what the reason rests on that is not known, or None."""

    kernel: str
    reason: str
    assumed: str | None = None

    def __str__(self) -> str:
        return f"{self.kernel} ({self.reason}{f'; assumed: {self.assumed}' if self.assumed else ''})"


def choose(
    call: AttentionCall, capability: Capability | None, enabled: Collection[str] = frozenset(KERNELS)
) -> AttentionChoice:
    """The kernel that ``call`` gets on a card of this compute capability; None is an AMD card.

    enabled: the kernels that are switched on (``torch.backends.cuda``, ``torch.nn.attention.sdpa_kernel``). If none of
    them takes the call, torch raises, and so does this: a HalfstepError.
    """
    takes_cudnn_first = capability is not None and capability[0] in (9, 10)
    order = KERNELS if takes_cudnn_first else KERNELS[1:]
    refusals: list[str] = []
    for kernel in order:
        refusal = f"{kernel} is switched off" if kernel not in enabled else _REFUSALS[kernel](call, capability)
        if refusal is None:
            return AttentionChoice(kernel, _reason(call, capability, kernel, refusals), _assumed(capability, kernel))
        refusals.append(refusal)
    raise HalfstepError(
        "scaled_dot_product_attention",
        f"no kernel that is switched on takes this call: {', '.join(refusals)}",
        "Switch math on: torch.backends.cuda.enable_math_sdp(True).",
    )


def _reason(call: AttentionCall, capability: Capability | None, kernel: str, refusals: Sequence[str]) -> str:
    card = "an AMD card" if capability is None else f"capability {capability[0]}.{capability[1]}"
    why = ", ".join(refusals) if refusals else f"it takes head size {call.query[-1]}"
    return f"{call.format} on {card}: {why}"


def _assumed(capability: Capability | None, kernel: str) -> str | None:
    if capability is None and kernel in (FLASH, EFFICIENT):
        return "the card's AOTriton library has this kernel"
    if kernel == CUDNN:
        return "cuDNN is newer than 9.15.0, as in the default wheels of torch 2.11 and 2.12"
    return None


# --- what each kernel refuses: the reason, or None if it takes the call ---------------------------------------------


def _flash(call: AttentionCall, capability: Capability | None) -> str | None:
    size, tokens = call.query[-1], call.query[-2]
    if capability is not None and not (8, 0) <= capability <= (12, 1):
        return "flash needs 8.0" if capability < (8, 0) else "flash is not for more than 12.1"
    if len(call.query) != 4:
        return "flash needs four dimensions"
    if call.mask is not None:
        return "flash takes no mask"
    if not size == call.key[-1] == call.value[-1] or size > 256:
        return "flash needs one head size up to 256"
    if _ends_flash_at_192(capability) and call.needs_grad and size > 192 and (call.dropout > 0 or size <= 224):
        return f"flash does not train head size {size}{' with dropout' if size > 224 else ''} here"
    if call.is_causal and tokens != call.key[-2]:
        return "flash takes is_causal over equal lengths only"
    if call.format not in ("fp16", "bf16"):
        return f"flash has no {call.format}"
    return _dense_refusal(FLASH, call, takes_groups=True)


def _ends_flash_at_192(capability: Capability | None) -> bool:
    return capability is not None and ((8, 6) <= capability <= (8, 9) or capability[0] == 12)


def _efficient(call: AttentionCall, capability: Capability | None) -> str | None:
    if capability is not None and not (5, 0) <= capability <= (12, 1):
        return f"memory-efficient is not for {'less than 5.0' if capability < (5, 0) else 'more than 12.1'}"
    if len(call.query) != 4:
        return "memory-efficient needs four dimensions"
    formats = ("fp16", "fp32") if capability is not None and capability < (8, 0) else ("fp16", "fp32", "bf16")
    if call.format not in formats:
        return f"memory-efficient has no {call.format}{' below 8.0' if call.format == 'bf16' else ''}"
    size, value_size = call.query[-1], call.value[-1]
    unit = _alignment(call, capability)
    if size != call.key[-1] or size % unit or value_size % unit or not size or not value_size:
        return f"memory-efficient needs head sizes in multiples of {unit} in {call.format}"
    if capability is None and (size != value_size or size > 256):
        return "memory-efficient needs one head size up to 256"
    return _dense_refusal(EFFICIENT, call, takes_groups=False)


def _alignment(call: AttentionCall, capability: Capability | None) -> int:
    """In elements: 16 bytes where tensor cores compute, one element else."""
    is_half = call.format in ("fp16", "bf16")
    if capability is None or capability >= (8, 0):
        return 8 if is_half else 4
    return 8 if is_half and capability >= (7, 0) else 1


def _cudnn(call: AttentionCall, capability: Capability | None) -> str | None:
    if len(call.query) != 4:
        return "cuDNN needs four dimensions"
    if call.format not in ("fp16", "bf16"):
        return f"cuDNN has no {call.format}"
    if call.mask is not None and (call.mask_needs_grad or not _is_plain_mask(call)):
        return "cuDNN does not take this mask"
    if call.dropout * 16 != int(call.dropout * 16):
        return "cuDNN takes dropout in multiples of 1/16"
    size, value_size = call.query[-1], call.value[-1]
    if size % 8 or value_size % 8:
        return "cuDNN needs head sizes in multiples of 8"
    if not (size <= 128 and value_size <= 128) and (size, value_size) != (192, 128):
        return "cuDNN needs head sizes up to 128"
    if max(call.query[:2]) > 65535:
        return "cuDNN takes batches and heads up to 65535"
    if call.key[-2] == 1 or (call.query[-2] == 1 and call.dropout > 0):
        return "cuDNN does not take a single token"
    return _dense_refusal(CUDNN, call, takes_groups=True)


def _is_plain_mask(call: AttentionCall) -> bool:
    """Whether the mask is (tokens, tokens) or (batch, heads, tokens, tokens), each of the call's size or 1."""
    assert call.mask is not None
    full = (*call.query[:3], call.key[-2])
    shape = tuple(call.mask)
    return len(shape) in (2, 4) and all(a in (1, b) for a, b in zip(shape, full[-len(shape) :], strict=True))


def _dense_refusal(kernel: str, call: AttentionCall, takes_groups: bool) -> str | None:
    """What every fused kernel asks of dense tensors."""
    if call.query[-2] == 0 or call.key[-2] == 0:
        return f"{kernel} takes no empty sequence"
    if not call.is_dense:
        return f"{kernel} needs a last stride of 1"
    if not call.query[0] == call.key[0] == call.value[0]:
        return f"{kernel} needs one batch size"
    heads, key_heads, value_heads = call.query[1], call.key[1], call.value[1]
    if heads == key_heads == value_heads:
        return None
    if not call.enable_gqa or key_heads != value_heads or heads % key_heads:
        return f"{kernel} needs as many heads in key and value as in query"
    return None if takes_groups else f"{kernel} takes no grouped heads"


def _math(call: AttentionCall, capability: Capability | None) -> str | None:
    return None


_REFUSALS: dict[str, Callable[[AttentionCall, Capability | None], str | None]] = {
    CUDNN: _cudnn,
    FLASH: _flash,
    EFFICIENT: _efficient,
    MATH: _math,
}
