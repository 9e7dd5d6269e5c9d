"""Every operation of a forward and backward pass, one by one, with its place in the model and in the user's source.

A dispatch mode sees what autograd and autocast have made of the user's calls: casts, decompositions, and the backward
pass. Which module is running comes from hooks, what the user called from a function mode, the line from the stack. A
backward operation has the place of the forward operation that made its autograd node: the two share a sequence number.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
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
    file, line: of the innermost call outside torch and halfstep. Of a backward operation, that of its forward one, or
              where the user has written the backward function, the line in that.
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
        self._running: list[tuple[str, nn.Module]] = []
        self._functions = _Functions()
        self._sites: dict[int, Site] = {}
        self._owners: dict[int, str] = {}
        self._places: dict[tuple[Any, ...], Site] = {}
        self._opened = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would wrap each call to keep its compiler out, which does not run here."""
        return False

    @property
    def module(self) -> str | None:
        """Qualified name of the innermost module whose forward pass is running, None outside of all."""
        return self._running[-1][0] if self._running else None

    def __enter__(self) -> Self:
        self._running.clear()
        self._sites.clear()
        self._owners.clear()
        self._places.clear()
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                self._watch(name, module, stack)
                for parameter in module.parameters(recurse=False):
                    self._owners.setdefault(id(parameter), name)
            stack.enter_context(eager())
            stack.enter_context(self._functions)
            super().__enter__()  # type: ignore[no-untyped-call]
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._opened.close()

    def _watch(self, name: str, module: nn.Module, stack: ExitStack) -> None:
        def before(module: nn.Module, args: Any) -> None:
            self._running.append((name, module))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            # One that raised within is still there; one that was running before this walk is not.
            for index in range(len(self._running) - 1, -1, -1):
                if self._running[index][1] is module:
                    del self._running[index:]
                    break

        stack.callback(module.register_forward_pre_hook(before).remove)
        stack.callback(module.register_forward_hook(after, always_call=True).remove)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return func(*args)
        if torch.is_inference_mode_enabled():
            with _SeenBy(self):  # there torch leaves it to us to take composite operations apart
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        site = self._site(func)
        # The names of functions are those that the user calls, not the visitor.
        with torch._C.DisableTorchFunction():
            if self.hides(func):
                return func(*args, **(kwargs or {}))
            return self._visitor.visit(site, func, args, kwargs or {})

    def hides(self, func: Any) -> bool:
        """Whether the visitor does not get ``func``."""
        return is_view(func) and not self._visitor.sees_views

    def _site(self, func: Any) -> Site:
        node = torch._C._current_autograd_node()
        file, line, caller = _innermost(sys._getframe(2), node is not None)
        number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        # In a backward pass the stack ends at the engine; on this side of it a checkpoint runs a forward pass again.
        if node is not None and caller != _CHECKPOINT:
            site = self._forward_site(node)._replace(phase="backward")
            if file is not None:  # a backward function of the user's, or a hook
                site = site._replace(function=_plain(func), file=file, line=line)
            if torch.is_grad_enabled():  # a gradient of this gradient may be taken
                self._sites.setdefault(number, site)
            return site
        module = self._running[-1][0] if self._running else None
        site = Site(module, self._functions.name, "forward", file, line)
        if node is None:
            self._places[module, file, line, func] = self._places[module, None, None, func] = site
        else:  # torch lets no mode see which functions are called within a backward pass
            site = self._places.get((module, file, line, func), site)
        # Autograd makes a node before it runs its operation, so the newest one is that of this operation, or, where
        # this one needs no gradient, an older one that has its place already. A checkpoint detaches in between.
        if func is not torch.ops.aten.detach.default:
            self._sites.setdefault(number, site)
        return site

    def _forward_site(self, node: Any) -> Site:
        number = node._sequence_nr()
        site = self._sites.get(number)
        if site is None:
            parameter = getattr(node, "variable", None)
            older = [] if parameter is not None else [other for other in self._sites if other < number]
            # A node that no operation made, as that of a write into a view, follows the one of its operation.
            site = self._sites[max(older)] if older else Site(self._owners.get(id(parameter)), None, "", None, None)
            if parameter is None:
                self._sites[number] = site
        return site


class _SeenBy:
    """A walk sees operations again, inside of its own handling of one."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk

    def __enter__(self) -> None:
        TorchDispatchMode.__enter__(self._walk)

    def __exit__(self, *exception: Any) -> None:
        TorchDispatchMode.__exit__(self._walk, *exception)


class _Functions(TorchFunctionMode):
    """The name of the outermost torch function that is running."""

    def __init__(self) -> None:
        super().__init__()
        self.name: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer, self.name = self.name, self.name or function_name(func)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.name = outer


@functools.cache
def function_name(func: Any) -> str | None:
    name: str | None = getattr(func, "__name__", None)
    if name == "__get__":  # of a property such as x.T
        name = getattr(func.__self__, "__name__", None)
    return name.strip("_") if name else None


@functools.cache
def _plain(func: Any) -> str:
    return str(func._schema.name.partition("::")[2].strip("_"))


@functools.cache
def is_view(func: Any) -> bool:
    """Whether the result of an operation shares the memory of an input and changes nothing, as a transpose's does."""
    returns, name = func._schema.returns, func._schema.name
    return name in ("aten::_unsafe_view", "aten::_reshape_alias") or any(
        value.alias_info is not None and not value.alias_info.is_write for value in returns
    )


@contextmanager
def eager() -> Iterator[None]:
    """Compiled models run uncompiled, where the compiler has been imported at all."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


_DEVICE = torch.ops.prim.device.default
"""What asking a tensor subclass for its device calls, a fake tensor's above all; no operation."""
_OWN = f"{Path(__file__).parent.parent}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_CHECKPOINT = f"{_TORCH}{os.path.join('utils', 'checkpoint.py')}"
_ENGINE = (f"{_TORCH}{os.path.join('autograd', 'graph.py')}", "_engine_run_backward")
_STDLIB = f"{sysconfig.get_path('stdlib')}{os.sep}"
_PACKAGES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib"))
_WORKLOADS = f"{_OWN}workloads{os.sep}"


@functools.cache
def is_users(file: str) -> bool:
    if file.startswith((_TORCH, _OWN)):
        return file.startswith(_WORKLOADS)
    if file.startswith(("<frozen", "<eval_with_key>")):  # an import, and code that torch.fx has made
        return False
    return not file.startswith(_STDLIB) or file.startswith(_PACKAGES)


def _innermost(frame: FrameType | None, in_backward: bool = False) -> tuple[str | None, int | None, str | None]:
    """File and line of the innermost call in the user's code, and torch's checkpoint file if that is what called it.

    In a backward pass only what the engine has called counts, which runs it.
    """
    file, line = None, None
    while frame is not None:
        code, name = frame.f_code, frame.f_code.co_filename
        if file is None and is_users(name):
            file, line = name, frame.f_lineno
            if not in_backward:
                break
        if in_backward and name == _CHECKPOINT:
            return file, line, name
        if in_backward and name == _ENGINE[0] and code.co_name == _ENGINE[1]:
            break
        frame = frame.f_back
    return file, line, None


def user_line() -> tuple[str | None, int | None]:
    """File and line of the innermost call in the user's code, from who called the caller on."""
    return _innermost(sys._getframe(2))[:2]
