"""What code asks of CUDA itself while a plan runs it, on a machine that has none or another card.

A tensor that is moved to a CUDA device is on the target already; a tensor that is moved to the CPU stays counted as on
the target, and a plan says so. ``torch.autocast("cuda")`` opens the autocast of the fake device. ``torch.cuda`` answers
for the target. ``torch.compile`` gives back what it was given, since a plan runs every model uncompiled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import autocast_mode

from halfstep.errors import HalfstepError, and_more
from halfstep.plan.asker import asker
from halfstep.plan.target import Target

_NOT_HERE = "not linked with support for cuda devices: the plan is for a CPU"
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_BY_DEVICE_TYPE = (
    (autocast_mode.autocast, "__init__", 1),
    (autocast_mode, "_cast", 1),
    (torch, "is_autocast_enabled", 0),
    (torch, "get_autocast_dtype", 0),
)
"""Functions that take a device type, each with its position; without it ``is_autocast_enabled`` asks about CUDA."""


class CudaCalls:
    """Stands for CUDA while code of the user's is built and run on ``target``.

    offloads, questions, compiled: the lines that move tensors to the CPU, ask whether one is on CUDA, and compile.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.offloads: set[str] = set()
        self.questions: set[str] = set()
        self.compiled: set[str] = set()

    @contextlib.contextmanager
    def answered(self) -> Iterator[None]:
        """``torch.cuda`` and autocast answer for the target meanwhile, and nothing is compiled or scripted."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.object(torch, "compile", self._uncompiled))
            stack.enter_context(patch.object(torch.jit, "script", self._uncompiled))
            if self.target.is_cuda:
                for name, function in self._functions().items():
                    stack.enter_context(patch.object(torch.cuda, name, function))
                for name in ("range_push", "range_pop", "mark"):
                    stack.enter_context(patch.object(torch.cuda.nvtx, name, lambda *_: None))
                for owner, name, position in _BY_DEVICE_TYPE:
                    stack.enter_context(patch.object(owner, name, _on_fake_device(getattr(owner, name), position)))
            yield

    def rewritten(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """A torch function and its arguments, with the fake device in place of a CUDA one.

        A plan for a CPU has none: a build of torch with CUDA would go on until the backward pass.
        """
        if not self.target.is_cuda:
            if func is torch.Tensor.cuda or _is_cuda(kwargs.get("device")):
                raise RuntimeError(_NOT_HERE)
            if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
                raise RuntimeError(_NOT_HERE)
            return func, args, kwargs
        if func is torch.Tensor.cuda:
            return torch.Tensor.to, (args[0], "cpu"), {}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            return func, (args[0], "cpu", *args[2:]), kwargs
        if func is torch.Tensor.cpu or (func is torch.Tensor.to and "cpu" in (*args[1:2], kwargs.get("device"))):
            if isinstance(args[0], FakeTensor) and args[0].numel() > 1:
                self._note(self.offloads)
        elif func == _IS_CUDA:
            self._note(self.questions)
        elif "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = kwargs | {"device": "cpu"}
        return func, args, kwargs

    def notes(self) -> list[str]:
        """What a plan says of them."""
        texts = {
            "Tensors that the model moves to the CPU ({}) are counted as still on the device.": self.offloads,
            "Code that asks whether a tensor is on CUDA ({}) was told that it is not.": self.questions,
            "What is compiled ({}) is planned uncompiled: fusing saves temporaries, so the figure is too high.": (
                self.compiled
            ),
        }
        return [text.format(and_more(sorted(lines))) for text, lines in texts.items() if lines]

    def _note(self, lines: set[str]) -> None:
        asking = asker()
        if asking.place is not None and asking.is_users:
            lines.add(asking.place)

    def _uncompiled(self, model: Any = None, **options: Any) -> Any:
        self.compiled.add(asker().place or "torch")
        return (lambda function: function) if model is None else model

    def _functions(self) -> dict[str, Callable[..., Any]]:
        hardware, memory_gib = self.target.hardware, self.target.memory_gib
        known: dict[str, Any] = {"name": hardware.name}
        if memory_gib is not None:
            known["total_memory"] = int(memory_gib * 2**30)
        if hardware.capability is not None:
            known["major"], known["minor"] = hardware.capability

        def capability(device: Any = None) -> tuple[int, int]:
            if hardware.capability is None:
                raise HalfstepError(
                    "torch.cuda.get_device_capability()",
                    f"the catalogue has no CUDA capability for {hardware.name}",
                    "Leave the question out of the model for a plan.",
                )
            return hardware.capability

        return {
            "synchronize": lambda device=None: None,
            "set_device": lambda device: None,
            "current_device": lambda: 0,
            "device_count": lambda: 1,
            "get_device_name": lambda device=None: hardware.name,
            "get_device_capability": capability,
            "get_device_properties": lambda device=None: SimpleNamespace(**known),
            "is_bf16_supported": lambda including_emulation=True: "bf16" in hardware.native,
        }


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return (isinstance(device, int) and not isinstance(device, bool)) or (
        isinstance(device, str) and device.partition(":")[0] == "cuda"
    )


def _on_fake_device(function: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_fake_device(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], "cpu" if args[position] == "cuda" else args[position], *args[position + 1 :])
        elif kwargs.get("device_type", "cuda") == "cuda":
            kwargs["device_type"] = "cpu"
        return function(*args, **kwargs)

    return on_fake_device
