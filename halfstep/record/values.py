"""What values a tensor holds: extremes, shares of inf, NaN, zero and subnormal, and a histogram of exponents.

Everything is counted exactly, on the device and without waiting for it (rows.py), into one row of whole numbers that
is read later together with all others. A 16-bit value is exact in fp32, so that one histogram serves every format: bin
``e`` is the biased exponent of fp32, ``2^(e-127) <= |x| < 2^(e-126)`` for e = 1 to 254. Bin 0 holds zeros and what is
below 2^-126, bin 255 inf and NaN.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.dtypes import FORMAT_OF
from halfstep.formats import FORMATS
from halfstep.record.rows import INF, NUM_BINS, Rows, is_dense

BIAS = 127


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
        """How many values were counted; a complex number is two."""
        return math.prod(self.shape) * (2 if self.format.startswith("complex") else 1)

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
        return None if bits >= INF else _float_of(bits)

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
    again. A weak reference keeps the address of a storage from serving another one meanwhile. Views of the same values,
    such as a transpose, are counted once: their ``row`` is one object.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._rows = Rows()
        self._storages: dict[int, _Storage] = {}
        self._tensors: list[tuple[torch.dtype, torch.Size, str | None, int]] = []
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if is_measurable(tensor):
                start = int(tensor.storage_offset())
                self._storage(tensor).names.append((start, start + tensor.numel(), name))

    def of(self, tensor: torch.Tensor) -> int:
        """The number under which ``tensor`` is measured, now or when it was seen before."""
        return self._find(tensor, self._storage(tensor), _place(tensor))

    def written(self, tensor: torch.Tensor) -> None:
        """An operation has just written into ``tensor``: what its memory held before is not found again."""
        storage = self._storage(tensor)
        storage.numbers.clear()
        storage.rows.clear()

    def changed(self, tensor: torch.Tensor) -> int:
        """As :meth:`of` after :meth:`written`. The operation raises the tensor's version only after this."""
        storage, place = self._storage(tensor), _place(tensor)
        number = self._find(tensor, storage, place)
        storage.numbers[(*place[:-1], place[-1] + 1)] = number
        return number

    def _find(self, tensor: torch.Tensor, storage: _Storage, place: tuple[Any, ...]) -> int:
        number = storage.numbers.get(place)
        if number is None:
            number = storage.numbers[place] = self._measure(tensor, storage, place)
        return number

    def _storage(self, tensor: torch.Tensor) -> _Storage:
        memory = tensor.untyped_storage()
        found = self._storages.get(memory._cdata)
        if found is None:
            found = self._storages[memory._cdata] = _Storage(memory)
        return found

    def _measure(self, tensor: torch.Tensor, storage: _Storage, place: tuple[Any, ...]) -> int:
        # The order of the values does not count: a view that has all of them, and no others, has the same row.
        start, shape, _, *rest = place
        extent = (start, shape.numel(), *rest) if is_dense(tensor) else place
        row = storage.rows.get(extent)
        if row is None:
            row = storage.rows[extent] = self._rows.add(tensor)
        name = next((name for first, end, name in storage.names if first <= start < end), None)
        self._tensors.append((tensor.dtype, shape, name, row))
        return len(self._tensors) - 1

    def read(self) -> list[Values]:
        """All measured so far, by their numbers; the one time that this waits for the device."""
        rows = self._rows.read()
        return [Values(format_name(dtype), tuple(shape), name, rows[row]) for dtype, shape, name, row in self._tensors]


class _Storage:
    """What is known of one piece of memory: names of parameters in it by their extent, numbers of tensors, rows."""

    __slots__ = ("_reference", "names", "numbers", "rows")

    def __init__(self, memory: torch.UntypedStorage) -> None:
        self._reference = StorageWeakRef(memory)
        self.names: list[tuple[int, int, str]] = []
        self.numbers: dict[tuple[Any, ...], int] = {}
        self.rows: dict[tuple[Any, ...], int] = {}


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    dtype = tensor.dtype
    is_negated = tensor.is_conj() if dtype.is_complex else tensor.is_neg()  # later, by who reads it
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.storage_offset(), tensor.shape, tensor.stride(), dtype, is_negated, version


_MEASURABLE = frozenset(
    getattr(torch, name)
    for name in (
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
)


def is_measurable(value: Any) -> bool:
    """Whether a value is a tensor of numbers that lie in memory; of a subclass, whose memory may be anything, not."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.dtype in _MEASURABLE
        and value.layout == torch.strided
        and value.device.type != "meta"
    )


def format_name(dtype: torch.dtype) -> str:
    """Name of the number format of a dtype, or of the dtype where it is none of ours."""
    format = FORMAT_OF.get(dtype)
    return format.name if format else str(dtype).removeprefix("torch.")


def _float_of(bits: int) -> float:
    value: float = struct.unpack("f", struct.pack("I", bits))[0]
    return value
