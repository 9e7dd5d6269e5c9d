"""Master weights: 16-bit weights in the model, and beside them what the optimizer needs to move fp32 ones.

Autocast keeps fp32 weights and casts them in each forward pass: 4 bytes for the weight, 2 for the cast, 4 for the
gradient. A layout of ``halfstep.layouts`` keeps the 16-bit weight alone in the model, so that the cast is gone and the
gradient takes 2 bytes, and a low part of 0 to 4 bytes beside it.

Any torch optimizer moves the fp32 weights, without knowing of it: for the moment of its step a parameter's data is the
fp32 weight and its gradient fp32. This happens in chunks, so that the fp32 weights never exist all at once. A chunk's
gradients are freed with it, and later chunks may be as large as what earlier ones have freed: the step needs no more
memory than the end of the backward pass did, but for the first few chunks of 1/1024 of the model.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.errors import HalfstepError
from halfstep.formats import FORMATS, SIXTEEN_BIT
from halfstep.gradients import Gradients, divide
from halfstep.layouts import LAYOUTS
from halfstep.policy import Policy
from halfstep.states import GRAIN, keep_formats, merge_state, scratch_bytes, slice_state, slices_at

_FIRST_CHUNKS = 1024
"""The first chunks are this part of the model: at 16 bytes an element 1/64 byte a parameter."""
_SMALLEST_CHUNK = 16 * GRAIN
_FREED_BYTES = 2
"""What the gradient of an element frees, at the least."""

Chunk = list[tuple[torch.Tensor, int, int]]
"""Parts of parameters: elements from start to stop."""


class Masters:
    """The master weights of an optimizer's parameters, in the layout that a policy asks for.

    Held in 16 bit are the weights of two and more dimensions, in every module that the policy computes in 16 bit.
    Vectors (biases, the weights of norms) stay fp32: they are below 1 % of a model, and what uses them computes in fp32
    or casts them as autocast does.

    The parameters stay the same objects, so ties, groups, ``zero_grad`` and whoever holds them keep working. A weight
    that somebody changes in place, or loads, between two steps is taken as the new weight; ``model.load_state_dict``
    with fp32 weights stores every bit that the layout holds. A change through ``.data`` goes unseen.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, policy: Policy) -> None:
        self._model, self.optimizer = model, optimizer
        self._kind = policy.master
        self._layout = LAYOUTS.get(policy.master)
        self._low: dict[torch.Tensor, torch.Tensor | None] = {}
        self._versions: dict[torch.Tensor, int] = {}
        self._places: dict[torch.Tensor, int] = {}
        self._loading = _Loading(self)
        self._num_steps = 0
        self._settled: Any = None
        self._removers: list[Any] = []
        if self._layout is not None:
            self._removers.append(keep_formats(optimizer))
            weakref.finalize(self, _call_all, self._removers)

    def __bool__(self) -> bool:
        return bool(self._low)

    def settle(self, policy: Policy) -> None:
        """Bring every parameter of the optimizer into the format that ``policy`` gives it, where it is not in it yet."""
        if self._layout is None:
            return
        groups = self.optimizer.param_groups
        asked = (sum(len(group["params"]) for group in groups), policy)
        if asked == self._settled:
            return
        self._settled = asked
        formats = _formats_of(self._model, policy)
        for parameter in _parameters_of(self.optimizer):
            format = formats.get(parameter)
            is_low = format in SIXTEEN_BIT and parameter.dim() >= 2 and parameter.is_floating_point()
            if is_low and parameter not in self._low:
                self._narrow(parameter, FORMATS[str(format)].dtype)
            elif not is_low and parameter in self._low:
                self._widen(parameter)
        self._removers += self._loading.watch(self._model)
        self._note_versions()

    def _narrow(self, parameter: torch.Tensor, dtype: torch.dtype) -> None:
        assert self._layout is not None
        weight = parameter.detach().float()
        largest = float(weight.abs().amax()) if weight.numel() else 0.0
        if not largest <= torch.finfo(dtype).max:
            name = self._name(parameter)
            raise HalfstepError(
                f"parameter {name} with a weight of {largest:g}",
                f"{str(dtype).removeprefix('torch.')} holds no weight beyond {torch.finfo(dtype).max:g}",
                f"Keep its module in fp32 (module:{name.rpartition('.')[0]}=fp32), or use bf16 weights.",
            )
        high = parameter.detach().to(dtype, copy=True)
        low_dtype = self._layout.low_dtype
        low = None if low_dtype is None else torch.empty_like(high, dtype=low_dtype)
        self._layout.write(weight.clone() if weight.data_ptr() == parameter.data_ptr() else weight, high, low, 0)
        _replace(parameter, high)
        parameter.grad_dtype = None  # type: ignore[attr-defined]  # 16 bit, or the fp32 sum of several
        self._low[parameter] = low
        self._places.setdefault(parameter, len(self._places))
        for name, value in self.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
                self.optimizer.state[parameter][name] = value.float()

    def _widen(self, parameter: torch.Tensor) -> None:
        weight = self._read(parameter).clone()
        del self._low[parameter]
        _replace(parameter, weight)
        parameter.grad_dtype = weight.dtype  # type: ignore[attr-defined]

    def _name(self, parameter: torch.Tensor) -> str:
        return next(name for name, p in self._model.named_parameters() if p is parameter)

    def _read(self, parameter: torch.Tensor) -> torch.Tensor:
        """The fp32 weight; for some layouts the one that is stored, so it is not to be changed."""
        assert self._layout is not None
        return self._layout.read(parameter.data, self._low[parameter])

    def _write(self, parameter: torch.Tensor, weight: torch.Tensor) -> None:
        """Store a weight in any format; a 16-bit one leaves no rest."""
        assert self._layout is not None
        self._layout.write(weight.to(torch.float32, copy=True), parameter.data, self._low[parameter], 0)
        torch.autograd.graph.increment_version(parameter)

    def _take_changes(self) -> None:
        """Weights that were changed in place since the last step are the new ones, without a rest."""
        for parameter, version in self._versions.items():
            if parameter._version != version:
                self._write(parameter, parameter.data)
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = {parameter: parameter._version for parameter in self._low}

    def sum_in_fp32(self) -> None:
        """Make 16-bit gradients fp32, so that what is added to them is summed in fp32; autograd adds into them as is."""
        for parameter in self._low:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.float()

    # The step.

    def step(self, gradients: Gradients, divisor: torch.Tensor | float) -> None:
        """Divide the gradients by ``divisor`` and let the optimizer step. Takes ``gradients`` and frees them."""
        if not self._low:
            divide(gradients.values(), divisor)
            self.optimizer.step()
            return
        self._take_changes()
        self._num_steps += 1
        optimizer: Any = self.optimizer
        # Hooks fire once a step, around all of its chunks.
        pre, post = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        for hook in list(pre.values()):
            hook(optimizer, (), {})
        for parameter in gradients:
            parameter.grad = None
        optimizer._optimizer_step_pre_hooks = optimizer._optimizer_step_post_hooks = type(pre)()
        wholes: dict[torch.Tensor, Any] = {}
        fresh: set[torch.Tensor] = set()
        try:
            for chunk in self._chunks(gradients):
                self._step_chunk(chunk, gradients, divisor, wholes, fresh)
        finally:
            optimizer.state.update(wholes)
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = pre, post
            torch.autograd.graph.increment_version(list(self._low))
            self._note_versions()
        for hook in list(post.values()):
            hook(optimizer, (), {})

    def _chunks(self, gradients: Gradients) -> Iterator[Chunk]:
        """Parts of at most ``limit`` elements together; a parameter that cannot be sliced is one, whatever its size."""
        total = sum(parameter.numel() for parameter in gradients)
        chunk: Chunk = []
        num_in_chunk, num_freed = 0, 0
        num_freed_per_element = scratch_bytes(self.optimizer) // _FREED_BYTES
        # The small ones first: what they free is room for the large ones.
        for parameter in sorted(gradients, key=torch.Tensor.numel):
            numel, start = parameter.numel(), 0
            is_sliced = not gradients[parameter].is_sparse and slices_at(self.optimizer, parameter)
            while start < numel:
                # A power of two, since some optimizers compile their step for each size.
                limit = max(total // _FIRST_CHUNKS, _SMALLEST_CHUNK, num_freed // num_freed_per_element)
                limit = 1 << (limit.bit_length() - 1)
                if chunk and numel - start > limit - num_in_chunk:
                    yield chunk
                    chunk, num_in_chunk = [], 0
                stop = start + limit if is_sliced and numel - start >= limit + GRAIN else numel
                chunk.append((parameter, start, stop))
                num_in_chunk += stop - start
                start = stop
            num_freed += numel
        if chunk:
            yield chunk

    def _step_chunk(
        self,
        chunk: Chunk,
        gradients: Gradients,
        divisor: torch.Tensor | float,
        wholes: dict[torch.Tensor, Any],
        fresh: set[torch.Tensor],
    ) -> None:
        """Let the optimizer move the weights of one chunk: fp32 for the moment of its step."""
        optimizer, layout = self.optimizer, self._layout
        assert layout is not None
        parts = [self._part(parameter, start, stop) for parameter, start, stop in chunk]
        values = []
        for parameter, start, stop in chunk:
            gradient = gradients[parameter]
            if stop - start < parameter.numel():
                gradient = gradient.reshape(-1)[start:stop]
            values.append(gradient.float() if parameter in self._low else gradient)
            if stop == parameter.numel():
                del gradients[parameter]
        divide(values, divisor)
        stored = [parameter.data for parameter, _, _ in chunk]
        try:
            for (parameter, start, stop), (high, low), value in zip(chunk, parts, values, strict=True):
                is_part = stop - start < parameter.numel()
                if is_part:
                    if start == 0:
                        wholes[parameter] = optimizer.state.pop(parameter, {})
                        if not wholes[parameter]:
                            fresh.add(parameter)
                    # A first step makes the state of each slice, and finds it missing in each.
                    state = {} if parameter in fresh else wholes[parameter]
                    optimizer.state[parameter] = slice_state(state, parameter.numel(), start, stop)
                if parameter in self._low:
                    _replace(parameter, layout.read(high, low))
                elif is_part:
                    _replace(parameter, high)
                parameter.grad = value
            del values
            optimizer.step()
            for (parameter, start, _), (high, low) in zip(chunk, parts, strict=True):
                if parameter in self._low:
                    layout.write(parameter.data, high, low, self._seed(parameter, start))
        finally:
            for (parameter, start, stop), data in zip(chunk, stored, strict=True):
                parameter.grad = None
                if parameter.data is not data:
                    _replace(parameter, data)
                if parameter in wholes and stop - start < data.numel():
                    merge_state(wholes[parameter], optimizer.state[parameter], parameter, start, stop)
                    optimizer.state[parameter] = wholes[parameter]
                    if stop == data.numel():
                        del wholes[parameter]

    def _part(self, parameter: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        high, low = parameter.data, self._low.get(parameter)
        if stop - start < parameter.numel():
            high = high.view(-1)[start:stop]
            low = None if low is None else low.view(-1)[start:stop]
        return high, low

    def _seed(self, parameter: torch.Tensor, start: int) -> int:
        """A seed for this step and place: the same on every replica, and no state but the number of steps."""
        text = f"{self._num_steps} {self._places[parameter]} {start}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())

    # Values.

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The fp32 weight of each parameter of the model, by name, one at a time; of a 16-bit one, with its rest.

        Not to be changed: some are the ones that are stored. A tied parameter comes under its first name.
        """
        for name, parameter in self._model.named_parameters():
            yield name, self._read(parameter) if self._holds(parameter) else parameter.detach()

    def values_at(self, parameter: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The fp32 weights at places ``index`` of ``parameter.flatten()``."""
        high = parameter.detach().flatten()[index]
        if not self._holds(parameter):
            return high.float()
        assert self._layout is not None
        low = self._low[parameter]
        return self._layout.read(high, None if low is None else low.flatten()[index])

    def set_weight(self, parameter: torch.Tensor, weight: torch.Tensor) -> None:
        """Make ``weight``, of the same shape, the weight of ``parameter``: every bit that the layout holds."""
        if self._holds(parameter):
            self._write(parameter, weight)
            self._versions[parameter] = parameter._version
        else:
            with torch.no_grad():
                parameter.copy_(weight)

    def _holds(self, parameter: torch.Tensor) -> bool:
        """Whether there is a rest beside ``parameter`` that still belongs to its weight."""
        return parameter in self._low and parameter._version == self._versions[parameter]

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The rests by name: with the 16-bit weights of the model's own state they are the exact weights."""
        named = {name: p for name, p in self._model.named_parameters() if self._holds(p)}
        return {
            "layout": self._kind,
            "num_steps": self._num_steps,
            "rests": {name: None if (low := self._low[p]) is None else low.clone() for name, p in named.items()},
            "formats": {name: str(p.dtype).removeprefix("torch.") for name, p in named.items()},
            "sums": {name: _checksum(p.detach()) for name, p in named.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, also from another layout's; the model's own state has to be loaded before.

        Nothing is lost where the layout of this run can hold it: ``fp32``, ``copy``, and ``split16`` of bf16 weights.
        """
        parameters = dict(self._model.named_parameters())
        layout = LAYOUTS.get(state["layout"])
        for name in state["rests"]:
            dtype = getattr(torch, state["formats"][name])
            parameter = parameters.get(name)
            high = None if parameter is None else parameter.detach().to(dtype)
            if high is None or _checksum(high) != state["sums"][name]:
                raise HalfstepError(
                    f"the rest of a master weight for parameter {name}",
                    "the model does not hold the 16-bit weight that it was saved with",
                    "Load the model's state first: model.load_state_dict(...), then stepper.load_state_dict(...).",
                )
        if layout is not None:
            for name, rest in state["rests"].items():
                parameter = parameters[name]
                high = parameter.detach().to(getattr(torch, state["formats"][name]))
                rest = None if rest is None else rest.to(parameter.device)
                if layout is self._layout and parameter in self._low and high.dtype == parameter.dtype:
                    if rest is not None:
                        self._low[parameter].copy_(rest)  # type: ignore[union-attr]
                    self._versions[parameter] = parameter._version
                else:
                    self.set_weight(parameter, layout.read(high, rest))
        self._num_steps = state["num_steps"]


class _Loading:
    """Hooks for ``model.load_state_dict``: of weights finer than the 16-bit parameter, the layout keeps all it can.

    They lie on the modules that own parameters and hold the masters weakly; a copied or pickled model has hooks that do
    nothing.
    """

    def __init__(self, masters: Masters | None = None) -> None:
        self._masters = (lambda: None) if masters is None else weakref.ref(masters)
        self._watched: set[nn.Module] = set()
        self._given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __reduce__(self) -> tuple[type[_Loading], tuple[()]]:
        return _Loading, ()

    def watch(self, model: nn.Module) -> list[Any]:
        """Hook every module with parameters that has no hook yet; returns what takes the hooks back."""
        removers = []
        for module in model.modules():
            if module._parameters and module not in self._watched:
                self._watched.add(module)
                removers.append(module.register_load_state_dict_pre_hook(self.before).remove)
                removers.append(module.register_load_state_dict_post_hook(self.after).remove)
        return removers

    def before(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        masters = self._masters()
        for name, parameter in module._parameters.items():
            value = state.get(prefix + name)
            if masters is None or parameter not in masters._low or not isinstance(value, torch.Tensor):
                continue
            if value.shape == parameter.shape and value.dtype in (torch.float32, torch.float64):
                self._given.append((parameter, value))

    def after(self, module: nn.Module, _: Any) -> None:
        masters = self._masters()
        given, self._given = self._given, []
        for parameter, value in given:
            if masters is not None:
                masters.set_weight(parameter, value)


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _formats_of(model: nn.Module, policy: Policy) -> dict[torch.Tensor, str]:
    """The format that each parameter computes in; one shared with a module in fp32 is fp32."""
    formats: dict[torch.Tensor, str] = {}
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None and formats.get(parameter) != "fp32":
                formats[parameter] = policy.format_of(path)
    return formats


def _replace(parameter: torch.Tensor, data: torch.Tensor) -> None:
    parameter.data = data


def _checksum(weight: torch.Tensor) -> int:
    """Of a 16-bit tensor's bits, to tell whether it is the one that a rest belongs to."""
    return int(weight.view(torch.int16).sum(dtype=torch.int64))


def _call_all(functions: list[Any]) -> None:
    for function in functions:
        function()
