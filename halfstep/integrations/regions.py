"""Models that open a region by themselves whenever they are called, as Accelerate's ``prepare`` promises it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from accelerate.utils import convert_to_fp32
from torch import nn

from halfstep.errors import HalfstepError
from halfstep.kernels import untraced


class OpenRegions:
    """Two hooks on a model: its calls run in a region, and hand on fp32.

    region: gives the region of a call, when it begins.

    The hook that closes runs after an exception as well. Torch leaves it out after one that is no ``Exception``, as
    Ctrl-C is; :meth:`close` closes what that has left open.
    """

    def __init__(self, model: nn.Module, region: Callable[[], AbstractContextManager[Any]]) -> None:
        self.model = model
        self._region = region
        self._open: list[AbstractContextManager[Any] | None] = []
        self._handles = [
            model.register_forward_pre_hook(self._enter, prepend=True),  # before hooks that look at what is open
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenRegions:
        """A copy of the model, as for an average of its weights, opens the same region."""
        other = object.__new__(OpenRegions)
        memo[id(self)] = other
        other.model, other._region = copy.deepcopy(self.model, memo), self._region
        other._open, other._handles = [], []
        return other

    def __reduce__(self) -> NoReturn:
        raise HalfstepError(
            "a pickle of a prepared model",
            "it opens regions of the run that it belongs to",
            "Save its state_dict(), or accelerator.unwrap_model(model, keep_fp32_wrapper=False).",
        )

    @untraced
    def _enter(self, *_: Any) -> None:
        self._open.append(None)  # _leave is called even where the region fails to open
        opened = self._region()
        opened.__enter__()
        self._open[-1] = opened

    @untraced
    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._close_one()
        return convert_to_fp32(output)

    def _close_one(self) -> None:
        if (opened := self._open.pop()) is not None:
            opened.__exit__(None, None, None)

    def close(self) -> None:
        """Close what an interrupted call has left open. To be called where no call of the model is running."""
        while self._open:
            self._close_one()

    def remove(self) -> None:
        """Take the hooks back."""
        self.close()
        for handle in self._handles:
            handle.remove()
