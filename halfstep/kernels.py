"""Python kernels laid over torch's own on one dispatch key, in place only while somebody uses them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])

_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def untraced(function: F) -> F:
    """Keep torch.compile out of ``function`` and what it calls.

    What ``torch.compiler.disable`` does, without its import of the compiler and its cost in each call.
    """
    eval_frame.set_code_exec_strategy(function.__code__, _SKIP)  # where it is called by what runs uncompiled
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # where it is called by what is compiled
    return function


class Kernels:
    """A set of kernels on one dispatch key. The first user puts them in place, the last one takes them out.

    key:  dispatch key, such as ``CPU`` or ``AutocastCUDA``.
    fill: called with this object when the first user comes, to :meth:`add` the kernels.
    """

    def __init__(self, key: str, fill: Callable[[Kernels], None]) -> None:
        self.key = key
        self._fill = fill
        self._names: set[str] = set()
        self._num_users = 0
        self._library: torch.library.Library | None = None

    def acquire(self) -> None:
        """Begin to use the kernels; every call needs its :meth:`release`."""
        if self._library is None:
            self._library = torch.library.Library("aten", "IMPL")
            try:
                self._fill(self)
            except BaseException:
                self._take_out()
                raise
        self._num_users += 1

    def release(self) -> None:
        """End one use. After the last one torch's own kernels are back."""
        assert self._num_users > 0, "a release without its acquire"
        self._num_users -= 1
        if self._num_users == 0:
            self._take_out()

    def _take_out(self) -> None:
        assert self._library is not None
        self._library._destroy()
        self._library = None
        self._names.clear()

    def add(self, name: str, kernel: Callable[..., Any]) -> None:
        """Lay ``kernel(keyset, *args, **kwargs)`` over the overload ``aten::name``; a name already there stays."""
        assert self._library is not None, "kernels are added by a user"
        if name in self._names:
            return
        # Where torch.compile runs a part of a model uncompiled, it would look into the kernels of its operations.
        untraced(kernel)
        with warnings.catch_warnings():
            # torch says once that a kernel is overridden, which is the purpose.
            warnings.simplefilter("ignore")
            self._library.impl(name.removeprefix("aten::"), kernel, self.key, with_keyset=True, allow_override=True)
        self._names.add(name)
