"""What every tensor of a step would be had it been computed in float64 from the start.

Each operation can be right by itself and their sequence wrong: E[x^2] - E[x]^2 loses every digit, an eps vanishes, a
sum stops growing. So the same operations run a second time on float64 shadows, casts being the identity there. A shadow
belongs to a storage, not to a tensor, so that views and what is written through them need no care.

What has no shadow is what its own values say: weights, batches, random numbers, memory that a foreign kernel filled,
and the results of decisions (a sign, a rounding), which float64 could take otherwise without being any better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.explain.error import largest, relative, scale_of, unit_of, widen
from halfstep.explain.exact import run_wide
from halfstep.formats import Format
from halfstep.record.recorder import op_name
from halfstep.record.walk import Site

_DECISIONS = frozenset(
    {
        "sgn",
        "sign",
        "round",
        "floor",
        "ceil",
        "trunc",
        "frac",
        "fmod",
        "remainder",
        "floor_divide",
        "heaviside",
        "hardshrink",
        "threshold",
    }
)
_GATES = frozenset(
    f"{name}_backward"
    for name in ("threshold", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "softshrink", "_prelu_kernel")
)
_SWEEP_EVERY = 16


@dataclass(frozen=True)
class History:
    """How a tensor's drift came about.

    source: the operation in which it did: place and name.
    maker:  which operation of which line made the tensor.
    base:   drift of what that line took in, over all its turns that led here.
    turns:  how many times in a row it made the tensor from what it had made before, as a loop that adds up does.
    """

    source: tuple[Site, str] | None
    maker: Any
    base: float
    turns: int


@dataclass(frozen=True)
class Drift:
    """How far a tensor is from its shadow.

    error: worst |value - shadow| in units of u at the scale of the shadow, where both are finite.
    lost:  whether a value is not finite where its shadow is; lost_up: whether that is NaN or inf, and not -inf.
    zero:  whether a value is zero where its shadow is not.
    scale: largest finite magnitude of the shadow; missed: that of the shadow where the value is lost.
    """

    error: float = 0.0
    lost: bool = False
    zero: bool = False
    lost_up: bool = False
    scale: float = 0.0
    missed: float = 0.0


@dataclass
class _Entry:
    reference: StorageWeakRef
    flat: torch.Tensor
    dtype: torch.dtype
    history: History | None = None
    drifts: dict[tuple[Any, ...], Drift] = field(default_factory=dict)


class Shadow:
    """The shadows of the storages that are alive. ``format``: in whose u a drift is counted."""

    def __init__(self, format: Format) -> None:
        self._unit = unit_of(format)
        self._entries: dict[int, _Entry] = {}
        self._num_added = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The shadow of ``tensor``, float64 of the same shape: where it has one the same memory, else a copy."""
        entry = self._entry(tensor)
        if entry is None:
            return widen(tensor)
        return entry.flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _entry(self, tensor: torch.Tensor) -> _Entry | None:
        entry = self._entries.get(tensor.untyped_storage()._cdata)
        if entry is None or entry.dtype != tensor.dtype or entry.flat.numel() != _size(tensor):
            return None  # bits that are read as another format, or a storage that was resized
        return entry

    def history(self, tensor: torch.Tensor) -> History | None:
        """What :meth:`note` was told about ``tensor``."""
        entry = self._entry(tensor)
        return entry.history if entry else None

    def note(self, tensor: torch.Tensor, history: History) -> None:
        entry = self._entry(tensor)
        if entry is not None:
            entry.history = history

    def run(self, func: Any, named: dict[str, Any], written: list[torch.Tensor]) -> Any:
        """``func`` on the shadows of its arguments; what it writes into has its shadow written. May raise NotExact."""
        name = op_name(func).removesuffix("_")
        if name in _DECISIONS:
            return None
        for tensor in written:
            if not tensor.is_complex() and self._entry(tensor) is None:
                whole = tensor.detach().as_strided((_size(tensor),), (1,), 0)
                self._add(tensor, widen(whole))
        gate = named.get("self") if name in _GATES else None
        return run_wide(func, named, lambda tensor: widen(tensor) if tensor is gate else self.of(tensor))

    def store(self, tensor: torch.Tensor, exact: torch.Tensor | None) -> None:
        """``exact`` is the shadow of what an operation returned or wrote; None if it has none."""
        entry = self._entry(tensor)
        if entry is None:  # what is there may be of the same memory as another format, or before it was resized
            self._entries.pop(tensor.untyped_storage()._cdata, None)
        if exact is None or tensor.is_complex() or exact.shape != tensor.shape:
            if entry is not None:  # written by something that has no shadow, or only a part of it
                self.of(tensor).copy_(tensor.detach())
                entry.drifts.clear()
            return
        exact = exact.detach()
        if entry is not None:
            entry.drifts.clear()
            if exact.untyped_storage()._cdata != entry.flat.untyped_storage()._cdata:
                self.of(tensor).copy_(exact)
            return
        size = _size(tensor)
        is_alike = exact.stride() == tensor.stride() and exact.storage_offset() == tensor.storage_offset() == 0
        if is_alike and exact.untyped_storage().nbytes() == 8 * size and exact.dtype == torch.float64:
            flat = exact.as_strided((size,), (1,), 0)
        else:
            flat = torch.zeros(size, dtype=torch.float64, device=tensor.device)
            flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(exact)
        self._add(tensor, flat)

    def _add(self, tensor: torch.Tensor, flat: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._entries[storage._cdata] = _Entry(StorageWeakRef(storage), flat, tensor.dtype)
        self._num_added += 1
        if self._num_added % _SWEEP_EVERY == 0:
            self._entries = {key: entry for key, entry in self._entries.items() if not entry.reference.expired()}

    def drift(self, tensor: torch.Tensor, scale: float = 0.0) -> Drift:
        """Of ``tensor`` as it is now. scale: what to count it at, if that is larger than the shadow's own."""
        entry = self._entry(tensor)
        if entry is None:
            return Drift()
        place = (tensor.shape, tensor.stride(), tensor.storage_offset())
        if not scale and place in entry.drifts:
            return entry.drifts[place]
        drift = self._measure(tensor.detach(), self.of(tensor), scale)
        entry.drifts[place] = drift
        return drift

    def _measure(self, value: torch.Tensor, shadow: torch.Tensor, scale: float) -> Drift:
        distance = (value - shadow).abs_()
        worst = largest(distance)
        lost = lost_up = False
        missed = 0.0
        if not math.isfinite(worst):
            both = value.isfinite() & shadow.isfinite()
            gone = ~value.isfinite() & shadow.isfinite()
            lost, lost_up = bool(gone.any()), bool((gone & (value != -math.inf)).any())
            worst, missed = largest(torch.where(both, distance, 0.0)), scale_of(torch.where(gone, shadow, 0.0))
            shadow = torch.where(both, shadow, 0.0)
        # Where a value is zero and its shadow is not, the two are as far apart as the shadow is large.
        zero = worst > 0 and bool(((value == 0) & (distance != 0)).any())
        own = scale_of(shadow)
        return Drift(relative(worst, max(own, scale)) / self._unit, lost, zero, lost_up, own, missed)


def _size(tensor: torch.Tensor) -> int:
    """How many elements the storage of ``tensor`` holds."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()
