"""Every operation of a forward and backward pass, one by one, with its place in the model and in the user's source.

A dispatch mode sees what autograd and autocast have made of the user's calls: casts, decompositions, and the backward
pass. Which module is running comes from hooks, what the user called from a function mode, the line from the stack. A
backward operation has the place of the forward operation that made its autograd node: the two share a sequence number.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Site(NamedTuple):
    """Where an operation runs.

    module:   qualified name of the innermost module that is running; ``""`` is the model itself, None is outside it, as
              a loss function is. Of a backward operation, that of its forward one.
    function: the torch function that the user called, such as ``matmul`` or ``cross_entropy``; None if it was none.
    phase:    ``forward`` or ``backward``. What a checkpoint computes again is forward.
    file, line: of the innermost call outside torch and halfstep.
    """

    module: str | None
    function: str | None
    phase: str
    file: str | None
    line: int | None


class Visitor(Protocol):
    """Who runs the operations of a walk; it has to call ``func(*args, **kwargs)`` and return what that gives."""

    sees_views: bool
    """Whether it also gets operations whose result shares the memory of an input, such as a transpose."""

    def visit(self, site: Site, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class Walk(TorchDispatchMode):
    """While it is open, every operation goes through ``visitor``. Compiled models run uncompiled meanwhile.

    Operations that the visitor runs itself, on tensors of its own, are not seen.
    """

    def __init__(self, model: nn.Module, visitor: Visitor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self._visitor = model, visitor
        self._running: list[tuple[str, nn.Module, bool]] = []
        self._functions = _Functions()
        self._sites: dict[int, Site] = {}
        self._owners: dict[int, str] = {}
        self._handles: list[Any] = []
        self._eager = _eager()

    def __enter__(self) -> Self:
        self._running.clear()
        self._sites.clear()
        self._owners = {
            id(p): f"{name}" for name, module in self.model.named_modules() for p in module.parameters(recurse=False)
        }
        for name, module in self.model.named_modules():
            self._watch(name, module)
        self._eager.__enter__()
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._functions.__exit__(*exception)  # type: ignore[no-untyped-call]
        self._eager.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch(self, name: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: Any) -> None:
            self._running.append((name, module, torch._C._current_autograd_node() is not None))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            while self._running.pop()[1] is not module:  # one that raised within was not popped
                pass

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        site = self._site()
        if is_view(func) and not self._visitor.sees_views:
            return func(*args, **(kwargs or {}))
        return self._visitor.visit(site, func, args, kwargs or {})

    def _site(self) -> Site:
        node = torch._C._current_autograd_node()
        # A module that was entered while backward runs is one that a checkpoint computes again.
        if node is not None and not (self._running and self._running[-1][2]):
            forward = self._sites.get(node._sequence_nr())
            if forward is not None:
                return forward._replace(phase="backward")
            owner = self._owners.get(id(getattr(node, "variable", None)))
            return Site(owner, None, "backward", None, None)
        module = self._running[-1][0] if self._running else None
        site = Site(module, self._functions.name, "forward", *_line())
        # Autograd makes a node before it runs its operation, so the newest one is that of this operation, or, where
        # this one needs no gradient, an older one that has its place already.
        self._sites.setdefault(torch.autograd._get_sequence_nr() - 1, site)  # type: ignore[attr-defined]
        return site


class _Functions(TorchFunctionMode):
    """The name of the outermost torch function that is running."""

    def __init__(self) -> None:
        super().__init__()
        self.name: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer, self.name = self.name, self.name or _plain_name(func)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.name = outer


@functools.cache
def _plain_name(func: Any) -> str | None:
    name: str | None = getattr(func, "__name__", None)
    if name == "__get__":  # of a property such as x.T
        name = getattr(func.__self__, "__name__", None)
    return name.strip("_") if name else None


@functools.cache
def is_view(func: Any) -> bool:
    """Whether the result of an operation shares the memory of an input and changes nothing, as a transpose's does."""
    returns, name = func._schema.returns, func._schema.name
    return name in ("aten::_unsafe_view", "aten::_reshape_alias") or any(
        value.alias_info is not None and not value.alias_info.is_write for value in returns
    )


@contextmanager
def _eager() -> Iterator[None]:
    """Compiled models run uncompiled, where the compiler has been imported at all."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


_OWN = str(Path(__file__).parent.parent)
_INTERNAL = (str(Path(torch.__file__).parent), _OWN, sysconfig.get_path("stdlib"), "<frozen")
_EXTERNAL = (f"{_OWN}/workloads", sysconfig.get_path("purelib"))


@functools.cache
def _is_users(code: CodeType) -> bool:
    file = code.co_filename
    return (
        not file.startswith(_INTERNAL[:2]) and (not file.startswith(_INTERNAL[2:]) or file.startswith(_EXTERNAL[1]))
    ) or file.startswith(_EXTERNAL[0])


def _line() -> tuple[str | None, int | None]:
    """File and line of the innermost call in the user's code."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        if _is_users(frame.f_code):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None, None
