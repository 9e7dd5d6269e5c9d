"""A run as a checkpoint holds it: checked against the run that is to go on, and then given to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from halfstep.distributed import optimizer_state, random_state
from halfstep.distributed.contents import is_cut, on_device, parts_of, scheduler_state
from halfstep.distributed.regroup import factors, regrouped
from halfstep.distributed.store import Store
from halfstep.dtypes import LOW_DTYPES
from halfstep.errors import HalfstepError, and_more
from halfstep.gradients import local_of, put_gradients
from halfstep.layouts import LAYOUTS
from halfstep.scale import make_scale
from halfstep.stepper import Stepper


class SavedRun:
    """The checkpoint in ``folder``, for ``stepper``.

    With the same number of ranks, and parameters that are cut over them as before, each rank goes on from its own
    numbers. Else all go on from what they add up to.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any], stepper: Stepper) -> None:
        self._store = Store(folder)
        self._stepper, self._ranks = stepper, stepper.ranks
        self._parameters, self._buffers, self._extra_state = parts_of(stepper)
        self._names = {parameter: name for name, parameter in self._parameters.items()}
        self._device = stepper.region.device
        self._num_saved = manifest["num_ranks"]
        self._is_cut = is_cut(self._ranks.module)
        self._is_same = (self._num_saved, manifest["is_cut"]) == (self._ranks.num, self._is_cut)
        numbers = [self._ranks.rank] if self._is_same else range(self._num_saved)
        saved = {number: self._store.read_object(f"rank/{number}") for number in numbers}
        self._random = saved.get(self._ranks.rank, {}).get("random")
        self._states = [each["stepper"] for each in saved.values()]
        self._state = self._states[0] if self._is_same else regrouped(self._states, self._ranks.num)
        self._run = self._store.read_object("run")

    # Before anything is changed.

    def check(self) -> None:
        """Refuse what cannot be given to the stepper; nothing is changed."""
        _compare("parameter", self._shapes("weights/"), _shapes_of(self._parameters))
        _compare("buffer", self._shapes("buffers/"), _shapes_of(self._buffers))
        _compare("extra state", dict.fromkeys(self._run["extra_state"]), dict.fromkeys(self._extra_state))
        for name, parameter in self._parameters.items():
            self._check_format(name, parameter)
        for name, buffer in self._buffers.items():
            self._check_dtype(f"buffer {name}", self._store.dtype(f"buffers/{name}"), buffer.dtype)
        optimizer_state.check(self._run["optimizer"], self._stepper.optimizer, self._names)
        self._check_scheduler()
        # On one that is thrown away, since loading is what checks.
        make_scale(self._stepper.policy.scale, torch.device("cpu")).load_state_dict(self._state["scale"])
        self._check_promoted()

    def _shapes(self, prefix: str) -> dict[str, Any]:
        return {name: self._store.shape(prefix + name) for name in self._store.names(prefix)}

    def _check_format(self, name: str, parameter: torch.Tensor) -> None:
        saved = self._store.dtype(f"weights/{name}")
        if f"rests/{name}" in self._store:
            saved = torch.float32
        # A layout holds of fp32 weights what it can, and every 16-bit number is one of fp32.
        is_layout = parameter in self._stepper.masters and saved in LOW_DTYPES | {torch.float32}
        if not is_layout and (saved not in LOW_DTYPES or parameter.dtype != torch.float32):
            self._check_dtype(f"parameter {name}", saved, parameter.dtype)

    def _check_dtype(self, what: str, saved: torch.dtype, own: torch.dtype) -> None:
        if saved != own:
            raise HalfstepError(
                f"{what}, saved in {_text(saved)}",
                f"the model here holds it in {_text(own)}, and nothing is rounded in silence",
                "Build the model in the format that it was saved in.",
            )

    def _check_scheduler(self) -> None:
        own, saved = scheduler_state(self._stepper.scheduler), self._run["scheduler"]
        own_kind, saved_kind = (each["kind"] if each else "no scheduler" for each in (own, saved))
        if own_kind != saved_kind:
            raise HalfstepError(
                f"the state of {saved_kind}" if saved else "a checkpoint without the state of a scheduler",
                f"this run's stepper has {own_kind}",
                "Build the stepper with the scheduler that it was saved with.",
            )

    def _check_promoted(self) -> None:
        module, policy = self._ranks.module, self._stepper.policy
        paths = {path for path, _ in module.named_modules()}
        for path in self._state["promoted"]:
            if path not in paths:
                raise HalfstepError(
                    f"a promotion of module {path!r}", "this model has no such module", "Build the model it was of."
                )
            if self._is_cut and (path, "fp32") not in policy.modules:
                raise HalfstepError(
                    f"a run in which module {path} was promoted to fp32",
                    "fully_shard has fixed the format of each module when it was called",
                    f"Shard the model, and build the stepper, with module:{path}=fp32 in the policy.",
                )

    # Giving it to the stepper.

    def give(self) -> Any:
        """Give it to the stepper, in place; what the caller of ``save`` had added."""
        with torch.no_grad():
            self._give_buffers()
            # Formats of weights follow promotions, so that these come first.
            self._stepper.load_state_dict(on_device(self._state, self._device))
            self._give_weights()
            to_fill = optimizer_state.put_together(self._run["optimizer"], self._stepper.optimizer, self._names)
            self._store.read_into({f"optimizer/{name}": tensor for name, tensor in to_fill.items()})
            if self._stepper.scheduler is not None:
                self._stepper.scheduler.load_state_dict(self._run["scheduler"]["state"])
            self._give_gradients()
        if self._random is not None:
            random_state.restore(self._random, self._device)
        return self._run["extra"]

    def _give_buffers(self) -> None:
        own = f"rank/{self._ranks.rank}/"
        buffers = {f"buffers/{name}": buffer.detach() for name, buffer in self._buffers.items()}
        is_own = {name: self._is_same and own + name in self._store for name in buffers}
        self._store.read_into({own + name if is_own[name] else name: each for name, each in buffers.items()})
        if self._extra_state:
            self._ranks.module.load_state_dict(self._run["extra_state"], strict=False)

    def _give_weights(self) -> None:
        masters = self._stepper.masters
        layout = LAYOUTS.get(self._state["masters"]["layout"])
        in_place = {}
        for name, parameter in self._parameters.items():
            key, rest_key = f"weights/{name}", f"rests/{name}"
            dtype = self._store.dtype(key)
            if dtype == parameter.dtype and parameter not in masters and rest_key not in self._store:
                in_place[key] = parameter.detach()
                continue
            # One at a time, so that what is put together needs the memory of one parameter.
            parts = {key: torch.empty_like(parameter, dtype=dtype, requires_grad=False)}
            if rest_key in self._store:
                rest_dtype = self._store.dtype(rest_key)
                parts[rest_key] = torch.empty_like(parameter, dtype=rest_dtype, requires_grad=False)
            self._store.read_into(parts)
            weight, *rest = (local_of(part) for part in parts.values())
            if rest:
                assert layout is not None
                weight = layout.read(weight, rest[0])
            if parameter in masters:
                masters.set_weight(parameter, weight)
            else:
                local_of(parameter.detach()).copy_(weight)
        self._store.read_into(in_place)

    def _give_gradients(self) -> None:
        gradients = {}
        for name, parameter in self._parameters.items():
            key = f"gradients/{name}"
            if key in self._store:
                # Reduced already: the mean over the ranks that were.
                gradient = self._read_gradient(key, parameter)
                local_of(gradient).mul_(1.0 if self._is_same else self._num_saved / self._ranks.num)
                gradients[parameter] = gradient
            elif self._is_same:
                own = f"rank/{self._ranks.rank}/{key}"
                if own in self._store:
                    gradients[parameter] = self._read_gradient(own, parameter)
            else:
                for number, factor in enumerate(factors(self._states, self._ranks.num)):
                    of_rank = f"rank/{number}/{key}"
                    if of_rank in self._store:
                        gradient = self._read_gradient(of_rank, parameter)
                        local_of(gradient).mul_(factor)
                        if parameter in gradients:
                            local_of(gradients[parameter]).add_(local_of(gradient))
                        else:
                            gradients[parameter] = gradient
        put_gradients(gradients)

    def _read_gradient(self, key: str, parameter: torch.Tensor) -> torch.Tensor:
        gradient = torch.empty_like(parameter, dtype=self._store.dtype(key), requires_grad=False)
        self._store.read_into({key: gradient})
        return gradient


def _shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _compare(what: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse another model: by the first names that differ, or shapes."""
    for names, why in ((saved.keys() - own.keys(), "this model has none"), (own.keys() - saved.keys(), "it has none")):
        if names:
            raise HalfstepError(
                f"a checkpoint of another model, by its {what} {and_more(sorted(names))}",
                why if names <= saved.keys() else f"the checkpoint has no {what} of this name, which this model has",
                "Build the model that it was saved with.",
            )
    for name in saved:
        if saved[name] != own[name]:
            raise HalfstepError(
                f"a checkpoint of another model, by its {what} {name} of shape {saved[name]}",
                f"this model has it in shape {own[name]}",
                "Build the model that it was saved with.",
            )


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
