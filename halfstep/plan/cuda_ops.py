"""What CUDA does in another way than the CPU, for fake CPU tensors that stand for CUDA ones.

Besides autocast's lists, which a Region follows anywhere, these move memory: dropout keeps a mask of one byte, softmax
of fp16 into fp32 is one kernel, the kernel of attention depends on the card, and optimizers and clipping work on lists
(``foreach``) where nobody says otherwise.

The same on both, and so left to torch: batch norm and layer norm keep two fp32 numbers a channel or row, losses,
embeddings and convolutions keep their inputs. Not known, and in no figure: what cuDNN's kernels take as workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer

from halfstep.dtypes import FORMAT_OF
from halfstep.kernels import Kernels
from halfstep.plan.attention import CUDNN, EFFICIENT, FLASH, KERNELS, MATH, AttentionCall, choose
from halfstep.plan.attention_kernels import RUN
from halfstep.plan.target import Target

aten = torch.ops.aten
_optimizer: Any = optimizer  # some of what is patched here is not exported

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
RECURRENT_NOTE = (
    "recurrent layers are planned step by step; cuDNN's kernel keeps a reserve instead, whose size only the card tells"
)


class CudaOps:
    """While it is open, fake CPU tensors are computed with as on ``target``.

    ``attention`` tells the kernels that were chosen, with their reasons, each with the names of the modules that
    called it; ``notes`` what is not as on the card. ``module_now`` names the module that runs; who walks a model sets
    it.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.module_now: Callable[[], str | None] = lambda: None
        self.notes: list[str] = []
        self._attention: dict[str, list[str]] = {}
        self._kernels = Kernels("AutogradCPU", self._fill)
        self._devices: Any = None

    @property
    def attention(self) -> Mapping[str, Sequence[str]]:
        return self._attention

    def __enter__(self) -> Self:
        self._kernels.acquire()
        self._devices = _optimizer._get_foreach_kernels_supported_devices
        _optimizer._get_foreach_kernels_supported_devices = lambda: ["cpu"]
        _optimizer._foreach_supported_types.append(FakeTensor)
        return self

    def __exit__(self, *exception: object) -> None:
        _optimizer._foreach_supported_types.remove(FakeTensor)
        _optimizer._get_foreach_kernels_supported_devices = self._devices
        self._kernels.release()

    def _fill(self, kernels: Kernels) -> None:
        kernels.add("aten::dropout", _dropout)
        kernels.add("aten::softmax.int", _softmax)
        kernels.add("aten::log_softmax.int", _log_softmax)

        def attention(keyset: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self._attend(*args, **kwargs)

        kernels.add("aten::scaled_dot_product_attention", attention)
        for name in RECURRENT:
            kernels.add(f"aten::{name}.input", self._recurrent(getattr(aten, name).input))
            kernels.add(f"aten::{name}.data", self._recurrent(getattr(aten, name).data))

    def _recurrent(self, operation: Any) -> Callable[..., Any]:
        """``operation`` taken apart; the CPU would run one of its own kernels."""

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if RECURRENT_NOTE not in self.notes:
                self.notes.append(RECURRENT_NOTE)
            enabled = torch._C._get_mkldnn_enabled()
            torch._C._set_mkldnn_enabled(False)
            try:
                return operation.decompose(*args, **kwargs)
            finally:
                torch._C._set_mkldnn_enabled(enabled)

        return kernel

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        tensors = [query, key, value]
        call = AttentionCall(
            format=_name_of(query.dtype),
            query=query.shape,
            key=key.shape,
            value=value.shape,
            mask=None if attn_mask is None else attn_mask.shape,
            mask_needs_grad=attn_mask is not None and attn_mask.requires_grad,
            is_causal=is_causal,
            dropout=dropout_p,
            enable_gqa=enable_gqa,
            needs_grad=torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
            is_dense=all(t.stride(-1) == 1 for t in (query, key, value, attn_mask) if t is not None),
        )
        choice = choose(call, self.target.capability, _enabled())
        modules = self._attention.setdefault(str(choice), [])
        module = self.module_now()
        if module is not None and module not in modules:
            modules.append(module)
        return RUN[choice.kernel](query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _name_of(dtype: torch.dtype) -> str:
    return FORMAT_OF[dtype].name if dtype in FORMAT_OF else str(dtype).removeprefix("torch.")


def _enabled() -> set[str]:
    """The kernels of attention that are switched on."""
    cuda = torch.backends.cuda
    enabled = {
        FLASH: cuda.flash_sdp_enabled(),
        EFFICIENT: cuda.mem_efficient_sdp_enabled(),
        MATH: cuda.math_sdp_enabled(),
        CUDNN: cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled(),
    }
    return {kernel for kernel in KERNELS if enabled[kernel]}


def _dropout(keyset: Any, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """As ATen/native/Dropout.cpp does where the fused kernel serves: a mask of one byte an element is kept."""
    if train and 0 < p < 1 and input.numel():
        kept: torch.Tensor = aten.native_dropout(input, p, True)[0]
        return kept
    return input * (0 if train and p == 1 else 1) if train and p > 0 else input


def _softmax(keyset: Any, input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """As ATen/native/SoftMax.cpp: of fp16 into fp32 in one kernel, of anything else through a cast."""
    return _softmax_as(aten._softmax.default, input, dim, dtype)


def _log_softmax(keyset: Any, input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _softmax_as(aten._log_softmax.default, input, dim, dtype)


def _softmax_as(kernel: Any, input: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
    is_fused = dtype is torch.float32 and input.dtype is torch.float16
    result: torch.Tensor = kernel(input if dtype is None or is_fused else input.to(dtype), dim, is_fused)
    return result
