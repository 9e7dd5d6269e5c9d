"""What values a tensor holds: extremes, shares of inf, NaN, zero and subnormal, and a histogram of exponents.

Everything is counted exactly, on the device and without waiting for it, into one row of whole numbers that is read
later together with all others. A 16-bit value is exact in fp32, so that one histogram serves every format: bin ``e`` is
the biased exponent of fp32, ``2^(e-127) <= |x| < 2^(e-126)`` for e = 1 to 254. Bin 0 holds zeros and what is below
2^-126, bin 255 inf and NaN.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.formats import FORMATS

NUM_BINS = 256
BIAS = 127
_INF = 0x7F800000
_NEGATIVE_INF = 0xFF800000 - 2**32
_NUM_COPIES = 64
_FORMAT_OF = {format.dtype: name for name, format in FORMATS.items() if name != "tf32"}


@dataclass(frozen=True, eq=False)
class Values:
    """The values of one tensor; two are equal only if they are the same.

    format: name of its number format, or of the dtype where it is none of ours. shape: of the tensor.
    name:   of the parameter or buffer that it is, None for what was computed and for a batch.
    """

    format: str
    shape: tuple[int, ...]
    name: str | None
    row: tuple[int, ...]
    """Bins 0 to 255, then zeros, NaNs, negative infinities, and the bits in fp32 of the largest finite and of the
    smallest non-zero magnitude."""

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def exponents(self) -> dict[int, int]:
        """How many finite non-zero values have which exponent: ``{e: n}`` for 2^e <= |x| < 2^(e+1).

        Subnormals of fp32 count at -127.
        """
        bins = {e - BIAS: n for e, n in enumerate(self.row[1:255], 1) if n}
        tiny = self.row[0] - self.num_zeros
        return ({-BIAS: tiny} if tiny else {}) | bins

    @property
    def num_zeros(self) -> int:
        return self.row[NUM_BINS]

    @property
    def num_nan(self) -> int:
        return self.row[NUM_BINS + 1]

    @property
    def num_inf(self) -> int:
        return self.row[NUM_BINS - 1] - self.num_nan

    @property
    def num_negative_inf(self) -> int:
        return self.row[NUM_BINS + 2]

    @property
    def largest(self) -> float:
        """Largest finite magnitude, 0.0 if there is none."""
        return _float_of(self.row[NUM_BINS + 3])

    @property
    def smallest(self) -> float | None:
        """Smallest non-zero magnitude, None if there is none."""
        bits = self.row[NUM_BINS + 4]
        return None if bits >= _INF else _float_of(bits)

    @property
    def num_subnormal(self) -> int:
        """How many are subnormal in the tensor's own format, where they have fewer bits."""
        format = FORMATS.get(self.format)
        limit = math.frexp(format.tiny)[1] - 1 if format else 1 - BIAS
        return sum(n for e, n in self.exponents.items() if e < limit)

    @property
    def kind(self) -> str | None:
        """``nan`` or ``inf`` if there is one, NaN first."""
        return "nan" if self.num_nan else "inf" if self.num_inf else None


class Measurements:
    """Tensors measured so far, each once for what it holds at the time.

    A tensor is known by its storage, its place in it and its version, so that one that was saved for backward is found
    again. A weak reference keeps the address of a storage from serving another one meanwhile.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        named = (*model.named_parameters(), *model.named_buffers())
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in named}
        self._known: dict[int, tuple[StorageWeakRef, dict[tuple[object, ...], int]]] = {}
        self._rows: list[torch.Tensor] = []
        self._tensors: list[tuple[str, tuple[int, ...], str | None]] = []

    def of(self, tensor: torch.Tensor) -> int:
        """The number under which ``tensor`` is measured, now or when it was seen before."""
        places, place = self._places(tensor)
        number = places.get(place)
        if number is None:
            number = places[place] = self._measure(tensor)
        return number

    def changed(self, tensor: torch.Tensor) -> int:
        """As :meth:`of`, after an operation has written into ``tensor``, which raises its version only afterwards."""
        places, (*where, version) = self._places(tensor)
        number = places[(*where, version)] = places[(*where, version + 1)] = self._measure(tensor)
        return number

    def _places(self, tensor: torch.Tensor) -> tuple[dict[tuple[object, ...], int], tuple[Any, ...]]:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = (StorageWeakRef(storage), {})
        version = 0 if tensor.is_inference() else tensor._version
        place = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version)
        return self._known[storage._cdata][1], place

    def _measure(self, tensor: torch.Tensor) -> int:
        with torch.no_grad():
            self._rows.append(measure(tensor.detach()))
        name = self._names.get(tensor.untyped_storage()._cdata)
        format = _FORMAT_OF.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        self._tensors.append((format, tuple(tensor.shape), name))
        return len(self._rows) - 1

    def read(self) -> list[Values]:
        """All measured so far, by their numbers; the one time that this waits for the device."""
        if not self._rows:
            return []
        rows = torch.stack(self._rows).tolist()
        return [Values(*tensor, tuple(row)) for tensor, row in zip(self._tensors, rows, strict=True)]


def measure(tensor: torch.Tensor) -> torch.Tensor:
    """The row of :class:`Values` for a floating tensor, int64 [261], on its device."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype == torch.float64:
        # What fp32 cannot hold counts at its ends, and not as inf.
        limit = FORMATS["fp32"].max
        tensor = torch.where(tensor.isfinite(), tensor.clamp(-limit, limit), tensor)
    bits = tensor.float().reshape(-1).view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    exponents = magnitude >> 23
    if tensor.is_cuda:
        return _row_on_device(bits, magnitude, exponents)
    bins = torch.bincount(exponents, minlength=NUM_BINS)
    # Reading costs nothing on a CPU, so that what is not there need not be looked for.
    low, high = bins[0].item() > 0, bins[NUM_BINS - 1].item() > 0
    counts = torch.tensor(
        [
            bits.numel() - magnitude.count_nonzero().item() if low else 0,
            (magnitude > _INF).count_nonzero().item() if high else 0,
            (bits == _NEGATIVE_INF).count_nonzero().item() if high else 0,
            _max(torch.where(magnitude < _INF, magnitude, 0) if high else magnitude),
            _min(torch.where(magnitude > 0, magnitude, _INF) if low else magnitude),
        ]
    )
    return torch.cat([bins, counts])


def _row_on_device(bits: torch.Tensor, magnitude: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """As on a CPU, without a read: bincount would wait for the device."""
    # Few exponents are common. Copies of the bins keep the additions to one of them from queueing up.
    copies = torch.arange(bits.numel(), device=bits.device) % _NUM_COPIES
    bins = torch.zeros(_NUM_COPIES * NUM_BINS, dtype=torch.int64, device=bits.device)
    bins.scatter_add_(0, copies * NUM_BINS + exponents, torch.ones_like(copies))
    one = torch.zeros(1, dtype=torch.int32, device=bits.device)  # so that an empty tensor has extremes as well
    counts = [
        (magnitude == 0).sum(),
        (magnitude > _INF).sum(),
        (bits == _NEGATIVE_INF).sum(),
        torch.cat([torch.where(magnitude < _INF, magnitude, 0), one]).max(),
        torch.cat([torch.where(magnitude > 0, magnitude, _INF), one + _INF]).min(),
    ]
    return torch.cat([bins.view(_NUM_COPIES, NUM_BINS).sum(0), torch.stack([count.long() for count in counts])])


def _max(magnitude: torch.Tensor) -> int:
    return int(magnitude.max()) if magnitude.numel() else 0


def _min(magnitude: torch.Tensor) -> int:
    return int(magnitude.min()) if magnitude.numel() else _INF


def _float_of(bits: int) -> float:
    value: float = struct.unpack("f", struct.pack("I", bits))[0]
    return value
