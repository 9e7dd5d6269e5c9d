"""A device that is not here: tensors with shapes and formats and no memory, on which a training step truly runs.

Parameters and buffers become fake the moment a module registers them, so that a model of any size is built in seconds
and a few hundred MiB, while data stay real: a loader reads files and draws indices as always. A batch becomes fake
where the step begins.

The tensors are fake CPU tensors, since fake CUDA tensors cannot run backward on a machine without a GPU. A Region on a
CPU follows CUDA's op lists; what else CUDA does in another way is in ``halfstep.plan.cuda_ops``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from halfstep.plan.answers import Answers
from halfstep.plan.cuda_ops import CudaOps
from halfstep.plan.target import Target


class FakeDevice:
    """The target of a plan, as far as a training step needs it. One serves one model."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.answers = Answers()
        self.cuda_ops = CudaOps(target) if target.is_cuda else None

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Modules that are built meanwhile hold fake parameters and buffers. Everything else is real."""
        register_parameter, register_buffer = nn.Module.register_parameter, nn.Module.register_buffer

        def fake_parameter(self_: nn.Module, name: str, param: Any) -> None:
            register_parameter(self_, name, self._fake(param))

        def fake_buffer(self_: nn.Module, name: str, tensor: Any, persistent: bool = True) -> None:
            register_buffer(self_, name, self._fake(tensor), persistent)

        nn.Module.register_parameter = fake_parameter  # type: ignore[assignment, method-assign]
        nn.Module.register_buffer = fake_buffer  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
            nn.Module.register_buffer = register_buffer  # type: ignore[method-assign]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """What runs meanwhile runs on this device: new tensors are fake, and questions about values are answered."""
        with self.mode, self.answers, self.cuda_ops or contextlib.nullcontext():
            yield

    def batch(self, batch: Any) -> Any:
        """``batch`` with every tensor in it fake, each with memory of its own."""
        return tree_map_only(torch.Tensor, self._fake, batch)

    def _fake(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor):
            return tensor
        return self.mode.from_tensor(tensor)
