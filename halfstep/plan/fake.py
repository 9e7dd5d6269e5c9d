"""A device that is not here: tensors with shapes and formats and no memory, on which a training step truly runs.

Parameters and buffers become fake the moment a module registers them, so that a model of any size is built in seconds
and a few hundred MiB, while data stay real: a loader reads files and draws indices as always. A batch becomes fake
where the step begins.

The tensors are fake CPU tensors, since fake CUDA tensors cannot run backward on a machine without a GPU. A Region on a
CPU follows CUDA's op lists; what else CUDA does in another way is in ``halfstep.plan.cuda_ops``.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo.config  # a FakeTensorMode imports it; here it is there before a step runs
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.autograd import graph
from torch.overrides import TorchFunctionMode

from halfstep.plan.answers import Answers
from halfstep.plan.build import mapped
from halfstep.plan.cuda_calls import CudaCalls
from halfstep.plan.cuda_ops import CudaOps
from halfstep.plan.target import Target
from halfstep.record.walk import eager

_swap: Callable[..., None] = torch.utils.swap_tensors
_engine: Callable[..., Any] = graph._engine_run_backward


class FakeDevice:
    """The target of a plan, as far as a training step needs it. One serves one model."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.answers = Answers(target.is_cuda)
        self.cuda_ops = CudaOps(target) if target.is_cuda else None
        self.cuda_calls = CudaCalls(target)
        self._calls = _Calls(self.answers, self.cuda_calls)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Modules that are built meanwhile hold fake parameters and buffers. Everything else is real."""
        register_parameter, register_buffer = nn.Module.register_parameter, nn.Module.register_buffer

        def fake_parameter(self_: nn.Module, name: str, param: Any) -> None:
            register_parameter(self_, name, self._fake(param))

        def fake_buffer(self_: nn.Module, name: str, tensor: Any, persistent: bool = True) -> None:
            register_buffer(self_, name, self._fake(tensor), persistent)

        with (
            patch.object(nn.Module, "register_parameter", fake_parameter),
            patch.object(nn.Module, "register_buffer", fake_buffer),
            self.answers,
            self._answered(),
        ):
            yield

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """What runs meanwhile runs on this device: new tensors are fake, and questions about values are answered."""
        self.answers.restart()
        with self.mode, self.answers, self.cuda_ops or contextlib.nullcontext(), eager(), self._answered():
            yield

    def batch(self, batch: Any) -> Any:
        """``batch`` with every tensor in it fake, each with memory of its own."""
        return mapped(batch, self._arrived)

    def others(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors of this device that are alive and share no memory with ``tensors``; not what autograd keeps."""
        gc.collect()
        known = {each.untyped_storage()._cdata for each in tensors}
        found = [each for each in gc.get_objects() if issubclass(type(each), FakeTensor)]
        others = [t for t in found if t.fake_mode is self.mode and t.untyped_storage()._cdata not in known]
        return sorted(others, key=lambda each: each.untyped_storage().nbytes())  # else in an order that varies

    def notes(self) -> list[str]:
        """What a plan that ran here rests on besides shapes."""
        return self.answers.notes() + self.cuda_calls.notes() + (self.cuda_ops.notes if self.cuda_ops else [])

    @contextlib.contextmanager
    def _answered(self) -> Iterator[None]:
        logger = logging.getLogger("torch._subclasses.fake_tensor")
        level = logger.level
        logger.setLevel(logging.CRITICAL)  # it logs each failure of an operation, which is raised as well
        try:
            with (
                self.cuda_calls.answered(),
                self._calls,
                patch.object(torch.autograd, "_engine_run_backward", self._calls.engine),
                patch.object(torch.utils, "swap_tensors", _swapped),
            ):
                yield
        finally:
            logger.setLevel(level)

    def _arrived(self, leaf: Any) -> Any:
        """As a copy onto the device: dense, whatever memory the original is a view of."""
        fake = self._fake(leaf)
        if not isinstance(fake, torch.Tensor) or fake.layout is not torch.strided:
            return fake
        with self.mode:
            return torch.empty_like(fake, requires_grad=fake.requires_grad)

    def _fake(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor):
            return tensor
        return self.mode.from_tensor(tensor)


class _Calls(TorchFunctionMode):
    """Calls that a fake tensor would not survive, before torch sees them."""

    def __init__(self, answers: Answers, cuda_calls: CudaCalls) -> None:
        super().__init__()
        self._cuda_calls = cuda_calls
        self._special: dict[Any, Callable[..., Any]] = {
            torch.Tensor.__deepcopy__: _copied,
            torch.Tensor.__format__: lambda tensor, spec: format(tensor if tensor.dim() else tensor.item(), spec),
            torch.Tensor.__array__: lambda tensor, *args, **kwargs: answers.zeros(
                tensor, lambda zeros: zeros.__array__(*args, **kwargs)
            ),
            torch.Tensor.numpy: lambda tensor, **kwargs: answers.zeros(tensor, torch.Tensor.numpy),
            torch.Tensor.tolist: lambda tensor: (
                answers.zeros(tensor, torch.Tensor.tolist) if tensor.dim() else tensor.item()
            ),
            torch._assert: lambda condition, message: None,
            F.one_hot: _one_hot,
            F.ctc_loss: _ctc_loss,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = self._special.get(func)
        if special is not None and isinstance(args[0], FakeTensor):
            return special(*args, **kwargs)
        func, args, kwargs = self._cuda_calls.rewritten(func, args, kwargs)
        return func(*args, **kwargs)

    def engine(self, *args: Any, **kwargs: Any) -> Any:
        """Autograd's engine under this mode, for backward functions of the user's and what a checkpoint runs again."""
        with self:
            return _engine(*args, **kwargs)


def _swapped(mine: torch.Tensor, other: torch.Tensor) -> None:
    """How a module converts its parameters; torch cannot swap a fake tensor, to which weak references exist."""
    if isinstance(mine, FakeTensor):
        mine.data = other.detach()
    else:
        _swap(mine, other)


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A deep copy; torch would copy the fake mode with it, and the process may die of that."""
    if id(tensor) not in memo:
        if not tensor.is_leaf:
            raise RuntimeError("Only leaves of the graph support deepcopy")
        with torch.no_grad():
            copy = tensor.detach().clone()
        copy = nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
        memo[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            copy.grad = _copied(tensor.grad, memo)
    copied: torch.Tensor = memo[id(tensor)]
    return copied


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if num_classes == -1:
        raise DataDependentOutputException(torch.ops.aten.one_hot.default)
    return F.one_hot(tensor, num_classes)


def _ctc_loss(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, **options: Any) -> Any:
    """With lengths as tensors: torch makes tensors of lists in a way that a fake device cannot follow."""
    lengths = torch.as_tensor(input_lengths), torch.as_tensor(target_lengths)
    return F.ctc_loss(log_probs, targets, lengths[0], lengths[1], **options)
