"""What CUDA does in another way than the CPU, for fake CPU tensors that stand for CUDA ones.

Besides autocast's lists, which a Region follows anywhere, these move memory: dropout keeps a mask of one byte, softmax
of fp16 into fp32 is one kernel, the kernel of attention depends on the card, and optimizers and clipping work on lists
(``foreach``) where nobody says otherwise.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer

from halfstep.kernels import Kernels
from halfstep.plan.target import Target

aten = torch.ops.aten
_optimizer: Any = optimizer  # some of what is patched here is not exported


class CudaOps:
    """While it is open, fake CPU tensors are computed with as on ``target``."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._kernels = Kernels("AutogradCPU", self._fill)
        self._devices: Any = None

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
