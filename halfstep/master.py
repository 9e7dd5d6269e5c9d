"""Master weights: 16-bit weights in the model, and beside them what the optimizer needs to move fp32 ones.

Autocast keeps fp32 weights and casts them in each forward pass: 4 bytes for the weight, 2 for the cast, 4 for the
gradient. A layout of ``halfstep.layouts`` keeps the 16-bit weight alone in the model, so that the cast is gone and the
gradient takes 2 bytes, and a rest of 0 to 4 bytes beside it, the layout's low part.
"""

from __future__ import annotations

import functools
import hashlib
import math
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.chunks import hooks_once, step_in_chunks
from halfstep.dtypes import LOW_DTYPES
from halfstep.errors import HalfstepError
from halfstep.formats import FORMATS, SIXTEEN_BIT, format_of
from halfstep.gradients import Gradients, divide
from halfstep.guard import RegionGuard
from halfstep.layouts import LAYOUTS, Copy
from halfstep.loading import ExactLoading, keep_formats, widen_state
from halfstep.policy import Policy
from halfstep.weights import formats_of, widen_embedding, widen_output


@dataclass(eq=False)
class _Rest:
    """What a 16-bit weight leaves out, in a layout, and the format and version of the weight that it belongs to."""

    layout: Copy
    low: torch.Tensor | None
    dtype: torch.dtype
    version: int

    def is_of(self, parameter: torch.Tensor) -> bool:
        return parameter._version == self.version and parameter.dtype == self.dtype


_KEYS = {"layout", "num_steps", "rests", "formats", "checksums", "widened"}
_rests: Any = WeakTensorKeyDictionary()
"""Parameter to its rest. It belongs to the weight and not to who trains it, so that several ``Masters``, in turn or one
after the other, move one exact weight."""


class Masters:
    """The master weights of an optimizer's parameters, in the layout that a policy asks for.

    Held in 16 bit are the weights of two and more dimensions, in every module that the policy computes in 16 bit.
    Vectors, norms and what a weight is computed from stay fp32: they are below 1 % of a model, and what uses them
    computes in fp32 or casts them as autocast does. So do EmbeddingBag and recurrent layers, whose kernels take weights
    and biases of one format. An embedding with a 16-bit table hands on fp32, as under autocast.

    The parameters stay the same objects, so ties, groups, ``zero_grad`` and whoever holds them keep working. A weight
    that somebody changes in place between two steps is the new weight, without a rest; ``model.load_state_dict`` with
    fp32 weights stores every bit that the layout holds. A change through ``.data`` goes unseen.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, policy: Policy) -> None:
        self.optimizer = optimizer
        self._model = model
        self._kind = policy.master
        self._layout = LAYOUTS.get(policy.master)
        self._rests: dict[torch.Tensor, _Rest] = {}
        self._places: dict[torch.Tensor, int] = {}
        self._widened: set[torch.Tensor] = set()
        self._changed: set[torch.Tensor] = set()
        self._has_warned = False
        self._hook = functools.partial(widen_output)
        self._num_steps = 0
        self._settled: Any = None
        self._loading = ExactLoading(self)
        self._removers: list[Any] = []
        if self._layout is not None:
            self._removers.append(keep_formats(optimizer))
            self._removers.append(model.register_forward_pre_hook(RegionGuard(self)).remove)
            weakref.finalize(self, _call_all, self._removers)
        self.settle(policy)

    def __bool__(self) -> bool:
        return bool(self._rests)

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._rests

    def held(self) -> Iterator[torch.Tensor]:
        """The parameters that have a rest."""
        return iter(self._rests)

    def rests(self) -> Iterator[torch.Tensor]:
        """What the 16-bit weights leave out, the low parts of the layout."""
        return (rest.low for rest in self._rests.values() if rest.low is not None)

    def __getstate__(self) -> dict[str, Any]:
        if self._layout is not None:
            raise HalfstepError(
                f"a copy or a pickle of a Stepper with master={self._kind}",
                "the copied weights would lose the rests that belong to them",
                "Build a Stepper over the copied model, and load the state_dict() of both.",
            )
        return self.__dict__

    # Formats.

    def settle(self, policy: Policy) -> None:
        """Bring each parameter of the optimizer into the format that ``policy`` gives it, where it is in another."""
        if self._layout is None:
            return
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if self._settled == (policy, _found(parameters)):
            return
        formats = formats_of(self._model, policy)
        to_narrow: dict[torch.Tensor, torch.dtype] = {}
        for parameter in parameters:
            format = formats.get(parameter, "fp32")
            # What is fp64 stays so, as under autocast.
            is_low = format in SIXTEEN_BIT and parameter.dtype in LOW_DTYPES | {torch.float32}
            if is_low and (parameter not in self._rests or parameter.dtype != FORMATS[format].dtype):
                to_narrow[parameter] = FORMATS[format].dtype
            elif not is_low and parameter in self._rests:
                self._widen(parameter)
        _check_memory(self._model, to_narrow)
        for parameter, dtype in to_narrow.items():
            self._check_range(parameter, parameter, dtype)
        for parameter, dtype in to_narrow.items():
            self._narrow(parameter, dtype)
        self._removers += self._loading.watch(self._model)
        for module in self._model.modules():
            if getattr(module, "weight", None) in self and (handle := widen_embedding(module, self._hook)):
                self._removers.append(handle.remove)
        self._settled = policy, _found(parameters)

    def _check_range(self, parameter: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> None:
        largest = float(torch.linalg.vector_norm(weight.detach(), math.inf)) if weight.numel() else 0.0
        if not largest <= torch.finfo(dtype).max:
            name = self._name_of({parameter})
            raise HalfstepError(
                f"parameter {name} with a weight of {largest:g}",
                f"{format_of(dtype).name} holds no weight beyond {torch.finfo(dtype).max:g}",
                f"Keep its module in fp32 (module:{name.rpartition('.')[0]}=fp32), or use bf16 weights.",
            )

    def _narrow(self, parameter: torch.Tensor, dtype: torch.dtype) -> None:
        assert self._layout is not None
        rest = _rests.get(parameter)
        has_rest = rest is not None and rest.is_of(parameter)
        if not (has_rest and rest.layout.name == self._kind and parameter.dtype == dtype):
            weight = rest.layout.read(parameter.data, rest.low) if has_rest else parameter.detach()
            high = parameter.detach().to(dtype, copy=True)
            low_dtype = self._layout.low_dtype
            low = None if low_dtype is None else torch.empty_like(high, dtype=low_dtype)
            self._layout.write(weight.to(torch.float32, copy=True), high, low, self._seed(parameter, 0))
            parameter.data = high
            torch.autograd.graph.increment_version([parameter])  # who holds a rest in another layout sees it
            parameter.grad_dtype = None  # 16 bit, or the fp32 sum of several
            rest = _rests[parameter] = _Rest(self._layout, low, dtype, parameter._version)
        self._rests[parameter] = rest
        if parameter in self.optimizer.state:
            widen_state(self.optimizer.state[parameter])

    def _widen(self, parameter: torch.Tensor) -> None:
        parameter.data = self._read(parameter)
        parameter.grad_dtype = torch.float32
        del self._rests[parameter]
        _rests.pop(parameter, None)
        self._widened.add(parameter)

    # The step.

    def sum_in_fp32(self) -> None:
        """Make 16-bit gradients fp32. What autograd adds to them then is summed in fp32, without being cast before."""
        for parameter in self._rests:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.float()

    def step(self, gradients: Gradients, divisor: torch.Tensor | float) -> None:
        """Divide the gradients by ``divisor`` and let the optimizer step; where there are rests, it frees them."""
        if not self._rests:
            divide(gradients.values(), divisor)
            self.optimizer.step()
            return
        moved = [parameter for parameter in gradients if parameter in self._rests]
        changed = {parameter for parameter in moved if not self._has_rest(parameter)}
        for parameter in changed:
            self._write(parameter, parameter.data)
        self._warn_of(changed)
        self._num_steps += 1
        with hooks_once(self.optimizer):
            try:
                step_in_chunks(self.optimizer, gradients, divisor, self)
            finally:
                torch.autograd.graph.increment_version(moved)
                for parameter in moved:
                    self._rests[parameter].version = parameter._version

    def _warn_of(self, changed: set[torch.Tensor]) -> None:
        """Of a rest that is lost in every step, as when the weights are clamped: nothing is dropped in silence."""
        again = changed & self._changed if self._layout is not None and self._layout.low_dtype is not None else set()
        self._changed = changed
        if again and not self._has_warned:
            self._has_warned = True
            name = self._name_of(again)
            warnings.warn(
                f"parameter {name} was changed in place before each of two steps, so that it lost the rest of its "
                f"master weight twice. Updates under half an ulp are lost so. Keep its module in fp32 "
                f"(module:{name.rpartition('.')[0]}=fp32) if you clamp or scale it after every step.",
                stacklevel=2,
            )

    def _name_of(self, parameters: set[torch.Tensor]) -> str:
        """The name of the first of them; one of another model has none."""
        return next((name for name, p in self._model.named_parameters() if p in parameters), "of the optimizer")

    def read_part(self, parameter: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """The fp32 weights from ``start`` to ``stop`` of the flattened parameter; all of them in its own shape."""
        assert self._layout is not None
        return self._layout.read(*self._parts(parameter, start, stop))

    def write_part(self, parameter: torch.Tensor, start: int, stop: int, weight: torch.Tensor) -> None:
        """Store what :meth:`read_part` gave, moved; ``weight`` is scratch afterwards."""
        assert self._layout is not None
        self._layout.write(weight, *self._parts(parameter, start, stop), self._seed(parameter, start))

    def _parts(self, parameter: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        high, low = parameter.data, self._rests[parameter].low
        if stop - start < parameter.numel():
            high = high.view(-1)[start:stop]
            low = None if low is None else low.view(-1)[start:stop]
        return high, low

    def _seed(self, parameter: torch.Tensor, start: int) -> int:
        """A seed for this step and place: the same on every replica, and no state but the number of steps."""
        place = self._places.setdefault(parameter, len(self._places))
        text = f"{self._num_steps} {place} {start}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())

    def seeds(self) -> dict[str, int]:
        """What stochastic rounding draws by, in words; empty in the other layouts."""
        if self._kind != "stochastic":
            return {}
        named = {name: self._places.get(parameter) for name, parameter in self._model.named_parameters()}
        places = {f"the place of {name}": place for name, place in named.items() if place is not None}
        return {"the number of steps": self._num_steps, **places}

    # Values.

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The exact weight of each parameter of the model, by name, one at a time: fp32 where it has a rest.

        Not to be changed, since some are the stored ones. A tied parameter comes once, under its first name.
        """
        for name, parameter in self._model.named_parameters():
            yield name, self._read(parameter)

    def fp32_state_dict(self) -> dict[str, Any]:
        """``model.state_dict()`` with the exact weights, in memory of the CPU: what to publish or to load elsewhere."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        state = self._model.state_dict()
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                exact = self._read(parameters[name]) if name in parameters else value
                state[name] = exact.to("cpu", copy=True)
        return state

    def values_at(self, parameter: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The exact weights, in fp32, at places ``index`` of the flattened parameter."""
        high = parameter.detach().take(index)
        if not self._has_rest(parameter):
            return high.float()
        assert self._layout is not None
        low = self._rests[parameter].low
        return self._layout.read(high, None if low is None else low.take(index))

    def set_weight(self, parameter: torch.Tensor, weight: torch.Tensor) -> None:
        """Make ``weight``, of the same shape, the one of ``parameter``: every bit that its format or layout holds."""
        if parameter in self._rests:
            self._check_range(parameter, weight, parameter.dtype)
            self._write(parameter, weight)
        else:
            with torch.no_grad():
                parameter.copy_(weight)

    def _read(self, parameter: torch.Tensor) -> torch.Tensor:
        if self._has_rest(parameter):
            return self.read_part(parameter, 0, parameter.numel())
        return parameter.detach().float() if parameter in self._rests else parameter.detach()

    def _write(self, parameter: torch.Tensor, weight: torch.Tensor) -> None:
        self.write_part(parameter, 0, parameter.numel(), weight.detach().to(torch.float32, copy=True))
        torch.autograd.graph.increment_version([parameter])
        self._rests[parameter].version = parameter._version

    def _has_rest(self, parameter: torch.Tensor) -> bool:
        """Whether there is a rest beside ``parameter``, and it still belongs to its weight."""
        return parameter in self._rests and self._rests[parameter].is_of(parameter)

    # State.

    def named_rests(self) -> dict[str, torch.Tensor | None]:
        """What each 16-bit weight leaves out, by name, None where its layout keeps nothing: the rests, not copies."""
        return {name: self._rests[p].low for name, p in self._model.named_parameters() if self._has_rest(p)}

    def numbers(self) -> dict[str, Any]:
        """The state without what is as large as the model."""
        none: dict[str, Any] = {"rests": {}, "formats": {}, "checksums": {}, "widened": {}}
        return {"layout": self._kind, "num_steps": self._num_steps, **none}

    def state_dict(self) -> dict[str, Any]:
        """The rests by name: with the 16-bit weights of the model's own state they are the exact weights."""
        named = dict(self._model.named_parameters())
        lows = self.named_rests()
        held = {name: named[name] for name in lows}
        return {
            **self.numbers(),
            "rests": {name: None if low is None else low.clone() for name, low in lows.items()},
            "formats": {name: format_of(parameter.dtype).name for name, parameter in held.items()},
            "checksums": {name: _checksum(parameter.detach()) for name, parameter in held.items()},
            "widened": {name: p.detach().clone() for name, p in named.items() if p in self._widened},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, also from another layout's; the model's own state has to be loaded before.

        Nothing is lost where the layout of this run can hold it: ``fp32``, ``copy``, and ``split16`` of bf16 weights.
        """
        if not isinstance(state, Mapping) or not state.keys() >= _KEYS:
            raise HalfstepError(
                "a state without the keys of Masters.state_dict()",
                "it was written by something else, or by another version",
                "Pass what stepper.state_dict() returned, loaded with torch.load.",
            )
        parameters = dict(self._model.named_parameters())
        highs = {}
        for name, format in state["formats"].items():
            high = self._in_format(parameters[name], FORMATS[format].dtype) if name in parameters else None
            if high is None or _checksum(high) != state["checksums"][name]:
                raise HalfstepError(
                    f"the rest of a master weight for parameter {name}",
                    "the model does not hold the 16-bit weight that it was saved with",
                    "Load the model's state first: model.load_state_dict(...), then stepper.load_state_dict(...).",
                )
            highs[name] = high
        for name, high in highs.items():
            parameter, rest = parameters[name], state["rests"][name]
            low = None if rest is None else rest.to(parameter.device)
            self.set_weight(parameter, LAYOUTS[state["layout"]].read(high, low))
        self._num_steps = state["num_steps"]

    def _in_format(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The 16-bit weight that the model was given, although it may hold it in another format."""
        return parameter.detach() if parameter.dtype == dtype else self._read(parameter).to(dtype)

    def load_widened(self, state: Mapping[str, Any]) -> None:
        """The weights of modules that were promoted to fp32 during the run; to be called when they are so here too."""
        parameters = dict(self._model.named_parameters())
        for name, weight in state["widened"].items():
            self.set_weight(parameters[name], weight)


def has_rest(parameter: torch.Tensor) -> bool:
    """Whether what a 16-bit weight leaves out is beside it, whoever trains it."""
    rest = _rests.get(parameter)
    return rest is not None and rest.is_of(parameter)


def _found(parameters: list[torch.Tensor]) -> list[tuple[int, torch.dtype]]:
    return [(id(parameter), parameter.dtype) for parameter in parameters]


def _check_memory(model: nn.Module, to_narrow: Mapping[torch.Tensor, torch.dtype]) -> None:
    """Refuse two parameters over one memory, which would part when one of them becomes 16 bit."""
    spans = []
    for name, parameter in model.named_parameters():
        has_memory = parameter.device.type != "meta" and not hasattr(parameter, "fake_mode")
        if parameter.numel() and has_memory:
            num_spanned = 1 + sum(
                (n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride(), strict=True)
            )
            start = parameter.data_ptr()
            spans.append((start, start + num_spanned * parameter.element_size(), name, parameter in to_narrow))
    before = (0, 0, "", False)
    for span in sorted(spans):
        if span[0] < before[1] and (span[3] or before[3]):
            raise HalfstepError(
                f"parameters {before[2]} and {span[2]}, which share memory",
                "a 16-bit weight gets memory of its own, so that they would part",
                "Tie them as one Parameter (b.weight = a.weight) before building the optimizer.",
            )
        before = max(before, span, key=lambda each: each[1])


def _checksum(weight: torch.Tensor) -> int:
    """Of a 16-bit tensor's bits, to tell whether it is the one that a rest belongs to."""
    return int(weight.view(torch.int16).sum(dtype=torch.int64))


def _call_all(functions: list[Any]) -> None:
    for function in functions:
        function()
