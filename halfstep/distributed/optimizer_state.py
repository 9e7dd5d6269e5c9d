"""An optimizer's state by the names of its parameters, taken apart into tensors that a checkpoint stores, and back.

torch's own way of doing this, ``get_optimizer_state_dict``, lets an optimizer that has no state yet take a step, which
counts, and gives 16-bit weights 16-bit states; and loading casts states to the format of the weight. Here a state is
read and put back as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from halfstep.errors import HalfstepError, and_more

_OF_THIS_RUN = ("foreach", "fused", "capturable", "differentiable")
"""How a group's step is computed, and not what: the run that loads keeps its own."""


def kind_of(value: object) -> str:
    """The class of an optimizer or a scheduler with the package that it comes from."""
    return f"{type(value).__module__.split('.')[0]}.{type(value).__name__}"


def take_apart(
    optimizer: Optimizer, names: Mapping[torch.Tensor, str], put: Callable[[str, torch.Tensor], None]
) -> dict[str, Any]:
    """What :func:`put_together` needs; each tensor in it is given to ``put`` under a name, and not copied."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise HalfstepError(
                    f"a checkpoint of an optimizer with a parameter of shape {tuple(parameter.shape)}",
                    "the model does not have it, so that it has no name",
                    "Add the parameter to the model.",
                )
    groups = [
        {"names": [names[p] for p in group["params"]], "options": _options_of(group)}
        for group in optimizer.param_groups
    ]
    states: dict[str, Any] = {}
    others: dict[Any, Any] = {}
    for key, state in optimizer.state.items():
        if isinstance(key, torch.Tensor):
            for name, tensor in _tensors_in(state, names[key]):
                _check_cut(name, key, tensor.shape, getattr(tensor, "placements", None))
            states[names[key]] = _apart(state, names[key], put)
        else:
            others[key] = _apart(state, f"/{key}", put)
    return {"kind": kind_of(optimizer), "groups": groups, "states": states, "others": others}


def check(saved: Mapping[str, Any], optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> None:
    """Refuse what :func:`put_together` could not give to ``optimizer``. It changes nothing."""
    if saved["kind"] != kind_of(optimizer):
        raise HalfstepError(
            f"the state of an optimizer {saved['kind']}",
            f"this run has {kind_of(optimizer)}, which keeps other numbers",
            "Build the optimizer that it was saved with.",
        )
    groups = {frozenset(group["names"]) for group in saved["groups"]}
    for place, group in enumerate(optimizer.param_groups):
        own = {names.get(p, "a parameter without a name") for p in group["params"]}
        if len(saved["groups"]) != len(optimizer.param_groups) or own not in groups:
            raise HalfstepError(
                f"the state of an optimizer with {len(saved['groups'])} parameter groups",
                f"group {place} of the {len(optimizer.param_groups)} here ({and_more(sorted(own))}) is none of them",
                "Build the optimizer over the same groups of parameters.",
            )
    parameters = {name: p for p, name in names.items()}
    for name, node in saved["states"].items():
        for tensor in _stored_in(node):
            _check_cut(tensor["tensor"], parameters[name], tensor["shape"], None)


def put_together(
    saved: Mapping[str, Any], optimizer: Optimizer, names: Mapping[torch.Tensor, str]
) -> dict[str, torch.Tensor]:
    """Give ``optimizer`` its groups and states; the tensors to be filled, by the names that ``put`` was given.

    Its former states are gone before there is memory for these.
    """
    options = {frozenset(group["names"]): group["options"] for group in saved["groups"]}
    groups, number = [], 0
    for group in optimizer.param_groups:
        own = options[frozenset(names[p] for p in group["params"])]
        own = {key: _like(value, group.get(key)) for key, value in own.items()}
        kept = {key: group[key] for key in _OF_THIS_RUN if key in group}
        groups.append({**own, **kept, "params": list(range(number, number + len(group["params"])))})
        number += len(group["params"])
    optimizer.load_state_dict({"state": {}, "param_groups": groups})
    to_fill: dict[str, torch.Tensor] = {}
    for group in optimizer.param_groups:
        on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            if names[parameter] in saved["states"]:
                make = _maker(parameter, on_device, to_fill)
                optimizer.state[parameter] = _together(saved["states"][names[parameter]], make, "")
    first = optimizer.param_groups[0]["params"][0]
    for key, node in saved["others"].items():
        optimizer.state[key] = _together(node, _maker(first, False, to_fill), "")
    return to_fill


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _like(value: Any, own: Any) -> Any:
    """An option of a group, a tensor on the device of the one that it replaces."""
    is_both = isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor)
    return value.to(own.device) if is_both else value


# A state may be a tensor, a tensor that wraps others, a container of any of them, or anything else.


def _apart(value: Any, name: str, put: Callable[[str, torch.Tensor], None]) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {"dict": {key: _apart(each, f"{name}/{key}", put) for key, each in value.items()}}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_apart(each, f"{name}/{i}", put) for i, each in enumerate(value)]}
    if not isinstance(value, torch.Tensor):
        return {"value": value}
    if _is_wrapper(value):
        inner, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {key: _apart(getattr(value, key), f"{name}/{key}", put) for key in inner}
        return {"wrapper": type(value), "context": context, "parts": parts}
    put(name, value)
    return {"tensor": name, "dtype": value.dtype, "shape": tuple(value.shape)}


Maker = Callable[[str, Mapping[str, Any]], torch.Tensor]


def _together(node: Mapping[str, Any], make: Maker, key: str) -> Any:
    if "dict" in node:
        return {inner: _together(each, make, inner) for inner, each in node["dict"].items()}
    if "list" in node or "tuple" in node:
        values = [_together(each, make, key) for each in node.get("list", node.get("tuple"))]
        return values if "list" in node else tuple(values)
    if "wrapper" in node:
        parts = {inner: _together(each, make, inner) for inner, each in node["parts"].items()}
        return node["wrapper"].__tensor_unflatten__(parts, node["context"])
    return make(key, node) if "tensor" in node else node["value"]


def _maker(parameter: torch.Tensor, on_device: bool, to_fill: dict[str, torch.Tensor]) -> Maker:
    def make(key: str, node: Mapping[str, Any]) -> torch.Tensor:
        if node["shape"] == tuple(parameter.shape) and key != "step":
            tensor = torch.empty_like(parameter, dtype=node["dtype"], requires_grad=False)
        else:
            # torch counts steps on the host, but for steps that never come back there.
            device = parameter.device if key != "step" or on_device else torch.device("cpu")
            tensor = torch.empty(node["shape"], dtype=node["dtype"], device=device)
        to_fill[node["tensor"]] = tensor
        return tensor

    return make


def _is_wrapper(value: torch.Tensor) -> bool:
    """Whether it is made of other tensors, as torchao's quantised ones are; not so a shard."""
    return hasattr(value, "__tensor_flatten__") and not hasattr(value, "device_mesh")


def _tensors_in(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that :func:`_apart` puts, with their names."""
    found: list[tuple[str, torch.Tensor]] = []
    _apart(value, name, lambda key, tensor: found.append((key, tensor)))
    return iter(found)


def _stored_in(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The nodes of tensors in what :func:`_apart` has made."""
    if "tensor" in node:
        yield node
    inner = next((node[kind] for kind in ("dict", "parts", "list", "tuple") if kind in node), ())
    for each in inner.values() if isinstance(inner, Mapping) else inner:
        yield from _stored_in(each)


def _check_cut(name: str, parameter: torch.Tensor, shape: Sequence[int], placements: Any) -> None:
    """Refuse a state of a shard that is cut in another way than its parameter: nobody knows how to cut it anew."""
    if not hasattr(parameter, "device_mesh") or (math.prod(shape) == 1 and placements is None):
        return
    if tuple(shape) != tuple(parameter.shape) or placements not in (None, getattr(parameter, "placements", None)):
        raise HalfstepError(
            f"optimizer state {name} of shape {tuple(shape)}",
            f"its parameter of shape {tuple(parameter.shape)} is cut into shards, and the state is not cut like it",
            "Under fully_shard use an optimizer that works element by element, such as AdamW.",
        )
