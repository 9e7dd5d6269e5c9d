"""Region: the autocast region that a Policy opens around a model's forward pass.

    with region:                     # training: autocast, op rules, module rules, TF32 switches, cpu16 where needed
        loss = loss_fn(model(x), y)
    with region.backward():          # cpu16, and the rules for what a checkpoint computes again
        loss.backward()
    with region.inference():         # evaluation: no gradients, no loss scale
        logits = model(x)

A weight is cast to 16 bit once a region, by autocast's cache. :meth:`Region.hold` keeps that cache over several
regions, so that a window of N micro-batches casts once instead of N times; it costs 2 bytes for each parameter that
meets a 16-bit operation, alive until :meth:`Region.release`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map_only

from halfstep import cpu16, oplist
from halfstep.errors import HalfstepError
from halfstep.events import RunInfo
from halfstep.fast_path import no_fast_path
from halfstep.formats import FORMATS, SIXTEEN_BIT
from halfstep.hardware import Hardware, detect
from halfstep.kernels import untraced
from halfstep.policy import Policy, check_module_rules, pattern_of, resolve

_tokens = itertools.count()
_opened: list[Region] = []
"""The regions that are open or running backward, the innermost last; module rules act for that one alone.

One list for the process, as ``oplist.active`` says. A region takes itself out wherever it stands, so that two threads
whose regions overlap leave nothing switched on.
"""


class Region:
    """The forward context of one model under one policy, on the device where the model lives.

    agreed: what ``auto`` becomes, and why, where several devices have to agree on it.

    Raises HalfstepError when the device cannot do what the policy asks for, or when a rule matches nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: str | Policy = "auto",
        hardware: Hardware | None = None,
        agreed: tuple[Policy, str] | None = None,
    ) -> None:
        self.model = model
        self.device = device_of(model)
        self.hardware = detect(str(self.device)) if hardware is None else hardware
        requested = Policy.parse(policy)
        self.policy, reason = resolve(requested, self.hardware, agreed)
        self.info = RunInfo(
            str(requested), str(self.policy), reason, self.hardware.name, {"torch": str(torch.__version__)}
        )
        self._is_low = self.policy.compute in SIXTEEN_BIT
        self._dtype = FORMATS[self.policy.compute].dtype
        self._entered: list[Any] = []
        self._casts = _HeldCasts()
        weakref.finalize(self, self._casts.drop)
        self._weights = list(model.parameters())
        if self._is_low:
            # Cast weights go stale when the model changes them in place between two calls, and after an optimizer's
            # step; torch's fused optimizers change weights without counting it as a version.
            weakref.finalize(self, model.register_forward_pre_hook(_drop_stale_casts).remove)
            weakref.finalize(self, register_optimizer_step_post_hook(_drop_all_casts).remove)
        oplist.check_rules(self.policy.ops)
        self._op_rules = {name: FORMATS[format].dtype for name, format in self.policy.ops}
        self._op_rules_if_low = self._op_rules if self.policy.formats & SIXTEEN_BIT else None
        has_attention = any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
        keeps_out = has_attention and self.device.type == "cpu" and bool(self.policy.formats & SIXTEEN_BIT)
        self._fast_path = no_fast_path if keeps_out else contextlib.nullcontext()
        self._needs_cpu16 = bool(self.policy.formats & self.hardware.emulated)
        users = [oplist.kernels(self.device.type)] if self._op_rules_if_low is not None else []
        self._needs_sums = self.device.type == "cpu" and self._op_rules_if_low is not None
        if self._needs_sums:
            users.append(cpu16.sums)
        if self._needs_cpu16:
            users.append(cpu16.kernels)
        for kernels in users:
            kernels.acquire()
            weakref.finalize(self, kernels.release)
        if self._op_rules_if_low is not None:
            oplist.add_rules(self.device.type, self._op_rules)
        # The rules hold a token and not this region, so that a model does not keep its regions alive. It is a number,
        # since torch.compile guards on values.
        self._token = next(_tokens)
        self._rules = attach_rules(model, self.policy.modules, self.device.type, self._token)
        weakref.finalize(self, _remove_all, self._rules)

    # Opening and closing. Each saved state is one tuple, and closing restores exactly what opening found.

    @untraced
    def __enter__(self) -> Self:
        begun = self._begin()
        autocast = _set_autocast(self.device.type, self._is_low, self._dtype, True, self._casts.kept)
        self._entered.append((begun, autocast))
        return self

    @untraced
    def __exit__(self, *exception: object) -> None:
        begun, autocast = self._entered.pop()
        _restore_autocast(self.device.type, autocast, self._casts.kept)
        self._finish(begun)

    def backward(self) -> AbstractContextManager[None]:
        """What a backward pass of this region needs while it runs: its rules for recomputation, and cpu16."""
        return _Backward(self)

    @contextlib.contextmanager
    @untraced
    def inference(self) -> Iterator[None]:
        """The same formats without gradients, for evaluation: under ``torch.inference_mode``, without a loss scale.

        Inside a window that holds its casts it leaves that cache alone, since a cast made here has no gradient.
        """
        with torch.inference_mode(), self.evaluation():
            yield

    @contextlib.contextmanager
    @untraced
    def evaluation(self) -> Iterator[None]:
        """As :meth:`inference`, inside a ``torch.no_grad()`` of the caller's, whose results are ordinary tensors."""
        with self._fast_path:
            saved = self._begin()
            held = self._casts.kept
            autocast = _set_autocast(self.device.type, self._is_low, self._dtype, not held, held)
            try:
                yield
            finally:
                _restore_autocast(self.device.type, autocast, self._casts.kept)
                self._finish(saved)

    @untraced
    def _begin(self) -> tuple[bool, bool] | None:
        tf32 = _set_tf32(self.policy.uses_tf32) if self.device.type == "cuda" else None
        _opened.append(self)
        self._switch_on()
        return tf32

    @untraced
    def _finish(self, tf32: tuple[bool, bool] | None) -> None:
        if _opened[-1] is self:
            _opened.pop()
        else:
            del _opened[len(_opened) - 1 - _opened[::-1].index(self)]
        if _opened:
            _opened[-1]._switch_on()
        else:
            oplist.active, cpu16.active, cpu16.sums_active = None, False, False
        if tf32 is not None:
            _restore_tf32(tf32)

    def _switch_on(self) -> None:
        """Make the kernels follow this region, the innermost one."""
        oplist.active, cpu16.active, cpu16.sums_active = self._op_rules_if_low, self._needs_cpu16, self._needs_sums

    # The cast weights of a window.

    def hold(self) -> None:
        """Keep the cast weights over this and the coming regions, until :meth:`release`. To be called before each one.

        Casts of weights that were changed in place since the last call, or by an optimizer, are dropped; autocast would
        go on using them. A change through ``.data`` goes unseen.
        """
        if self._is_low:
            if not self._casts.kept:
                self._weights = list(self.model.parameters())  # it may have got others since
            self._casts.keep(_version_of(self._weights))

    def release(self) -> None:
        """Drop what :meth:`hold` kept. Releasing twice is harmless."""
        self._casts.drop()

    def promote(self, module: str) -> None:
        """Keep ``module`` in fp32 from now on: one more module rule, as ``policy.with_module`` says it."""
        pattern = pattern_of(module)
        self._rules += attach_rules(self.model, ((pattern, "fp32"),), self.device.type, self._token)
        self.policy = self.policy.in_fp32([module])
        reason = f"{self.info.reason}; {module} was promoted to fp32 during the run"
        self.info = replace(self.info, effective=str(self.policy), reason=reason)


class _Backward:
    """A backward pass of ``region``; a class, since a generator's context takes longer, in every micro-batch."""

    __slots__ = ("_begun", "_region")

    def __init__(self, region: Region) -> None:
        self._region = region
        self._begun: tuple[bool, bool] | None = None

    @untraced
    def __enter__(self) -> None:
        self._begun = self._region._begin()

    @untraced
    def __exit__(self, *exception: object) -> None:
        self._region._finish(self._begun)


class _HeldCasts:
    """Autocast's cache of cast weights, kept by counting as one more region that is open."""

    def __init__(self) -> None:
        self.kept = False
        self._version = 0

    def keep(self, version: int) -> None:
        if not self.kept and torch.autocast_increment_nesting() > 1:
            torch.clear_autocast_cache()
        self.kept = True
        self.check(version)

    def check(self, version: int) -> None:
        """Drop the casts if a weight has another version than the last time."""
        if version != self._version:
            torch.clear_autocast_cache()
        self._version = version

    def drop(self) -> None:
        if self.kept:
            self.kept = False
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def _version_of(weights: list[nn.Parameter]) -> int:
    """A number that grows when a weight is changed in place."""
    return sum([weight._version for weight in weights])


def _drop_stale_casts(model: nn.Module, args: Any) -> None:
    """Before a model is called that has a region, if that is the open one. A compiled graph keeps no casts."""
    if not torch.compiler.is_compiling() and _opened and _opened[-1].model is model:
        _opened[-1]._casts.check(_version_of(_opened[-1]._weights))


def _drop_all_casts(*_: Any) -> None:
    torch.clear_autocast_cache()


class ModuleRule:
    """A module whose forward runs in a format of its own while the region with ``token`` is open.

    One wrapper serves the rules of every region, so that regions come and go in any order. It is a bound method, so
    that a deep copy of the model binds to the copy.
    """

    def __init__(self, module: nn.Module, format: str, device_type: str, token: int) -> None:
        self._token = token
        forward = _own_forward(module) or _wrap_forward(module, device_type)
        forward.rules[token] = (format in SIXTEEN_BIT, FORMATS[format].dtype)
        # Weak, so that a model which refers to its stepper can be freed: what ends a region outlives it otherwise.
        self._module, self._forward = weakref.ref(module), weakref.ref(forward)

    def remove(self) -> None:
        """Take the rule back, and with the last one the wrapper, unless somebody has wrapped it again since."""
        module, forward = self._module(), self._forward()
        if module is None or forward is None:
            return
        forward.rules.pop(self._token, None)
        if not forward.rules and _own_forward(module) is forward:
            if forward.wrapped is None:
                del module.forward
            else:
                module.forward = forward.wrapped


def _own_forward(module: nn.Module) -> Any:
    """Our wrapper, if it is the forward of ``module``: a copy's, or one inside another wrapper, only looks like it."""
    forward = module.__dict__.get("forward")
    method = getattr(forward, "halfstep_method", None)
    return forward if method is not None and method() is forward else None


def rule_of(module: nn.Module) -> tuple[bool, torch.dtype] | None:
    """Whether the open region's rule for ``module`` is a 16-bit one, and its format; None where it has no rule.

    For a caller that multiplies by the weights of a module without calling it.
    """
    forward = _own_forward(module)
    return forward.rules.get(_opened[-1]._token) if forward is not None and _opened else None


def _wrap_forward(module: nn.Module, device_type: str) -> Any:
    function: Any = _ruled(module, module.__dict__.get("forward"), device_type)
    forward = module.forward = types.MethodType(function, module)
    function.halfstep_method = weakref.ref(forward)
    return forward


def forward_of(module: nn.Module) -> Callable[[nn.Module], Callable[..., Any]]:
    """What binds the forward that ``module`` has now, its class's or one of its own, to it or to a deep copy of it."""
    own: Any = module.__dict__.get("forward")
    is_bound = isinstance(own, types.MethodType) and own.__self__ is module

    def bind(self: nn.Module) -> Callable[..., Any]:
        # functools.partial, since torch 2.11's compiler does not go into a method that is bound here.
        if own is None:
            return functools.partial(type(self).forward, self)
        return functools.partial(own.__func__, self) if is_bound else own

    return bind


def _ruled(module: nn.Module, wrapped: Any, device_type: str) -> Callable[..., Any]:
    """A forward around ``wrapped``, the one of the instance if it has its own, that looks up who is open."""
    rules: dict[int, tuple[bool, torch.dtype]] = {}
    bind = forward_of(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner = bind(self)
        rule = rules.get(_opened[-1]._token) if _opened else None
        if rule is None:
            return inner(*args, **kwargs)
        is_low, dtype = rule
        if is_low:
            # It casts at its operations, as autocast does. The cache does not tell formats apart.
            cache = dtype == _opened[-1]._dtype and torch.is_autocast_cache_enabled()
            is_in_fp32 = not torch.is_autocast_enabled(device_type)
            with torch.autocast(device_type, dtype=dtype, cache_enabled=cache):
                result = inner(*args, **kwargs)
            return _to_fp32(result, device_type) if is_in_fp32 else result
        # What computes in fp32 has to see fp32: this module, and above what follows a 16-bit one.
        args, kwargs = _to_fp32((args, kwargs), device_type)
        with torch.autocast(device_type, enabled=False):
            return inner(*args, **kwargs)

    forward.rules, forward.wrapped = rules, wrapped  # type: ignore[attr-defined]
    return forward


def _to_fp32(values: Any, device_type: str) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if oplist.eligible(tensor, device_type) else tensor

    return tree_map_only(torch.Tensor, cast, values)


def _remove_all(rules: list[ModuleRule]) -> None:
    for rule in reversed(rules):
        rule.remove()


def attach_rules(
    model: nn.Module, rules: tuple[tuple[str, str], ...], device_type: str, token: int
) -> list[ModuleRule]:
    """Put module rules in place.

    Of two rules for one module the later one decides; one that matches nothing is refused.
    """
    check_module_rules(rules, [name for name, _ in model.named_modules()])
    attached = []
    for name, module in model.named_modules():
        formats = [format for pattern, format in rules if name and fnmatch.fnmatchcase(name, pattern)]
        if formats:
            attached.append(ModuleRule(module, formats[-1], device_type, token))
    return attached


def device_of(model: nn.Module) -> torch.device:
    """The one device of a model's parameters and buffers, the CPU for a model without any."""
    devices = {tensor.device for tensors in (model.parameters(), model.buffers()) for tensor in tensors}
    if len(devices) > 1:
        raise HalfstepError(
            f"a model on {', '.join(sorted(map(str, devices)))}",
            "one region serves one device",
            "Move the model to one device, or make a Region for each part.",
        )
    return devices.pop() if devices else torch.device("cpu")


def _watch_compiler() -> None:
    """Have torch.compile trace a backward pass as eager runs it, without autocast, where it compiles inside a region.

    Its default, ``same_as_forward``, rounds the gradients of what an fp32 rule kept in fp32. Done whenever a region
    opens, since torch.compile may come into use at any time, takes seconds to import, and forgets who watches when it
    is reset.
    """
    compiler = sys.modules.get("torch._dynamo.callback")
    if compiler is not None and _before_compiling not in compiler.callback_handler.start_callbacks:
        compiler.callback_handler.register_start_callback(_before_compiling)
        compiler.callback_handler.register_end_callback(_after_compiling)


_saved_forms: list[Any] = []
"""How backward was to be traced, of the compilation that is going on."""


def _before_compiling(_: Any) -> None:
    config: Any = sys.modules.get("torch._functorch.config")
    if config is not None and _opened and _opened[-1]._is_low:
        _saved_forms.append(config.backward_pass_autocast)
        config.backward_pass_autocast = "off"


def _after_compiling(_: Any) -> None:
    if _saved_forms:
        config: Any = sys.modules["torch._functorch.config"]
        config.backward_pass_autocast = _saved_forms.pop()


@untraced
def _set_autocast(device_type: str, enabled: bool, dtype: torch.dtype, cache: bool, held: bool) -> tuple[Any, ...]:
    """What ``torch.autocast.__enter__`` does, without building an object for every micro-batch.

    The cache has one cast for a weight, whatever its format, and nobody watches the weights of another region. So in
    and out of one that is open around this one, or holds its casts (not ``held``, which are our own), it is emptied.
    """
    saved = (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
    )
    if enabled:
        _watch_compiler()
    torch.set_autocast_enabled(device_type, enabled)
    if enabled:
        torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(cache)
    if torch.autocast_increment_nesting() > 1 + held:
        torch.clear_autocast_cache()
    return saved


@untraced
def _restore_autocast(device_type: str, saved: tuple[Any, ...], held: bool) -> None:
    if not (torch.autocast_decrement_nesting() == 1 and held):
        torch.clear_autocast_cache()
    torch.set_autocast_enabled(device_type, saved[0])
    torch.set_autocast_dtype(device_type, saved[1])
    torch.set_autocast_cache_enabled(saved[2])


def _set_tf32(allowed: bool) -> tuple[bool, bool]:
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    try:
        saved = (cuda.allow_tf32, cudnn.allow_tf32)
    except RuntimeError:
        raise HalfstepError(
            "TF32 switches that torch cannot read",
            "allow_tf32 and fp32_precision were both used and disagree",
            "Use one of the two, and set it alike for matmul and cudnn.",
        ) from None
    cuda.allow_tf32 = cudnn.allow_tf32 = allowed
    return saved


def _restore_tf32(saved: tuple[bool, bool]) -> None:
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = saved
