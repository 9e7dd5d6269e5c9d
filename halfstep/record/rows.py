"""Counting what tensors hold, exactly: one row of whole numbers for each.

A row is a histogram of exponents with a few counts and extremes, as :class:`halfstep.record.values.Values` says. It is
taken from the bits of fp32, in which every 16-bit value is exact. Three ways give the same rows: one large tensor on a
CPU, many small ones at once, and both without a read, for a device that one would have to wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import _disable_current_modes

from halfstep.formats import FORMATS

NUM_BINS = 256
WIDTH = NUM_BINS + 5
INF = 0x7F800000
"""The bits of infinity in fp32; the magnitude of a NaN has larger ones."""
TINY = 0x00800000
"""The bits of the smallest normal number."""
_MAGNITUDE = 0x7FFFFFFF
_NEGATIVE_INF = 0xFF800000 - 2**32

SMALL = 2**13
"""Tensors of fewer values are copied and counted together: alone, each would cost as much as 20,000 values do."""
ROOM = 2**16
"""How many values may wait for that on one device: 256 KiB of copies."""
MOST = 127
"""And how many tensors: so many histograms of 256 bins are numbered by an int16."""
PIECE = 2**17
"""A large tensor is counted in pieces of so many values, which bounds the memory that counting takes: 1.1 MiB on a CPU,
kept by each thread that counts, and about 10 MiB on another device, whose histogram needs indices of 8 bytes."""
_NUM_COPIES = 64


class Rows:
    """The rows of the tensors added so far, each for what it held at that moment."""

    def __init__(self) -> None:
        self._num_rows = 0
        self._counted: list[tuple[list[int], Any]] = []  # with their rows: an array on a CPU, else a tensor
        self._waiting: dict[torch.device, list[tuple[int, Any]]] = {}
        self._num_waiting = 0

    def add(self, tensor: torch.Tensor) -> int:
        """Count a floating or complex tensor, or keep a copy of a small one to be counted later. Its row's number."""
        number, size = self._num_rows, tensor.numel()
        self._num_rows += 1
        with _unseen():
            if tensor.requires_grad:
                tensor = tensor.detach()
            if size == 0 or size >= SMALL:
                self._counted.append(([number], _count_one(tensor)))
            else:
                waiting = self._waiting.setdefault(tensor.device, [])
                waiting.append((number, _copy(tensor)))
                self._num_waiting += size
                if self._num_waiting > ROOM or len(waiting) == MOST:
                    self._count_waiting()
        return number

    def _count_waiting(self) -> None:
        for device, waiting in self._waiting.items():
            copies = [copy for _, copy in waiting]
            lengths = [len(copy) for copy in copies]
            if device.type == "cpu":
                rows = rows_on_cpu(numpy.concatenate(copies), lengths)
            else:
                rows = rows_without_read(torch.cat(copies), lengths)
            self._counted.append(([number for number, _ in waiting], rows))
        self._waiting.clear()
        self._num_waiting = 0

    def read(self) -> list[tuple[int, ...]]:
        """All rows by their numbers; waits once for each device."""
        found: list[tuple[int, ...]] = [()] * self._num_rows
        by_device: dict[Any, tuple[list[int], list[Any]]] = {}
        with _unseen():
            self._count_waiting()
            for numbers, rows in self._counted:
                device = rows.device if isinstance(rows, torch.Tensor) else None
                known, parts = by_device.setdefault(device, ([], []))
                known += numbers
                parts.append(rows)
            for device, (known, parts) in by_device.items():
                together = numpy.concatenate(parts) if device is None else torch.cat(parts)
                for number, row in zip(known, together.tolist(), strict=True):
                    found[number] = tuple(row)
        return found


def _unseen() -> Any:
    """Modes of others, such as another recorder that is open, do not see what counting does."""
    by_function = torch._C.DisableTorchFunction()
    if not torch._C._len_torch_dispatch_stack():
        return by_function
    stack = ExitStack()
    stack.enter_context(by_function)
    stack.enter_context(_disable_current_modes())
    return stack


# --- from a tensor to flat fp32 ------------------------------------------------------------------------------------


def _copy(tensor: torch.Tensor) -> Any:
    """The values of a tensor, flat, in fp32 and in memory of their own: on a CPU an array, which is quicker made."""
    values = _narrow(_real(tensor))
    if values.dtype != torch.float32:
        values = values.float().reshape(-1)
        return values.numpy() if values.device.type == "cpu" else values
    return values.numpy().flatten() if values.device.type == "cpu" else values.clone().reshape(-1)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex number is two values; what torch would negate or conjugate later, it does now."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _narrow(values: torch.Tensor) -> torch.Tensor:
    """fp64 rounded to fp32. What fp32 cannot hold counts at its ends, and not as zero or inf."""
    if values.dtype != torch.float64:
        return values
    limit = FORMATS["fp32"].max
    narrow = torch.where(values.isfinite(), values.clamp(-limit, limit), values).float()
    is_lost = (narrow.view(torch.int32) & _MAGNITUDE == 0) & (values != 0)
    return torch.where(is_lost, FORMATS["fp32"].smallest_subnormal, narrow)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values fill a stretch of memory, each of them once, in whatever order."""
    if tensor.is_contiguous():
        return True
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != filled:
                return False
            filled *= size
    return True


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The values of a tensor, flat, PIECE at a time, in any order: 16 bit as it is, the rest in fp32."""
    values = _real(tensor)
    if is_dense(values) and not values.is_contiguous():
        values = values.as_strided((values.numel(),), (1,))  # a transposed tensor need not be copied
    values = values.reshape(-1)
    for piece in values.split(PIECE) if len(values) > PIECE else (values,):
        piece = _narrow(piece)
        yield piece if piece.dtype in (torch.float16, torch.bfloat16) else piece.float()


# --- from flat values to rows --------------------------------------------------------------------------------------


def measure(tensor: torch.Tensor) -> torch.Tensor:
    """The row of a floating or complex tensor of any size, int64 [WIDTH], on its device."""
    rows = _count_one(tensor)
    return rows[0] if isinstance(rows, torch.Tensor) else torch.from_numpy(rows[0])


def _count_one(tensor: torch.Tensor) -> Any:
    """Its row as an array [1, WIDTH] on a CPU, and as a tensor on its device elsewhere."""
    if tensor.device.type == "cpu":
        return _count_on_cpu(tensor)
    if not tensor.numel():
        return torch.tensor([[0] * (WIDTH - 1) + [INF]], device=tensor.device)
    rows = torch.cat([rows_without_read(piece, [piece.numel()]) for piece in _pieces(tensor)])
    return torch.cat([rows[:, :-2].sum(0, True), rows[:, -2:-1].amax(0, True), rows[:, -1:].amin(0, True)], 1)


def _count_on_cpu(tensor: torch.Tensor) -> Any:
    """The least work for each value. Reading costs nothing here, so what is not there is not looked for."""
    rows = numpy.zeros((1, WIDTH), dtype=numpy.int64)
    row = rows[0]
    row[-1] = INF
    for bits in _bits(tensor) if tensor.numel() else ():
        # The bits of bf16 are the upper half of those of fp32, so that its constants are too.
        size, up = len(bits), 32 - 8 * bits.itemsize
        sign, inf = 1 << (31 - up), INF >> up
        whole = bits.view(f"uint{32 - up}")
        # With the sign as the highest bit, negative values come first as signed and last as unsigned numbers, and in
        # both orders their magnitudes grow.
        high = max(int(numpy.maximum.reduce(bits)), int(numpy.maximum.reduce(whole)) - sign)
        low = min(int(numpy.minimum.reduce(whole)), int(numpy.minimum.reduce(bits)) + sign)
        if high >= inf or low == 0:
            magnitude = numpy.bitwise_and(bits, sign - 1, out=_buffers.magnitude.view(bits.dtype)[:size])
        if high >= inf:
            row[NUM_BINS + 1] += numpy.count_nonzero(magnitude > inf)
            row[NUM_BINS + 2] += numpy.count_nonzero(bits == _NEGATIVE_INF >> up)
            high = int(numpy.where(magnitude < inf, magnitude, 0).max())
        has_zeros, num_tiny = low == 0, 0
        if has_zeros:
            magnitude -= 1
            others = magnitude.view(whole.dtype)  # zero has become the largest
            low = int(numpy.minimum.reduce(others)) + 1
            num_tiny = int(numpy.count_nonzero(others < (TINY >> up) - 1)) if low < TINY >> up else 0
        # torch's bincount takes bytes, in half the time of wider numbers; the sign is beyond the byte.
        byte = numpy.right_shift(bits, 23 - up, out=_buffers.byte[:size], casting="unsafe")
        bins = torch.bincount(torch.from_numpy(byte), minlength=NUM_BINS).numpy()
        row[:NUM_BINS] += bins
        row[NUM_BINS] += bins[0] - num_tiny if has_zeros else 0
        row[-2], row[-1] = max(row[-2], high << up), min(row[-1], low << up)
    return rows


def _bits(tensor: torch.Tensor) -> Iterator[Any]:
    """The bits of a tensor on a CPU, PIECE at a time: of bf16 as int16, else of fp32; good until the next piece."""
    if tensor.dtype == torch.float32 and tensor.is_contiguous() and not tensor.is_neg():
        bits = tensor.numpy().reshape(-1).view(numpy.int32)
        for start in range(0, len(bits), PIECE):
            yield bits[start : start + PIECE]
        return
    for piece in _pieces(tensor):
        if piece.dtype == torch.bfloat16:
            yield piece.view(torch.int16).numpy()
            continue
        if piece.dtype != torch.float32:
            piece = torch.from_numpy(_buffers.wide[: piece.numel()]).copy_(piece)
        yield piece.numpy().view(numpy.int32)


class _Buffers(threading.local):
    """Memory in which large tensors are counted: fresh memory would cost more than the counting, in page faults."""

    def __init__(self) -> None:
        self.wide = numpy.empty(PIECE, dtype=numpy.float32)
        self.magnitude = numpy.empty(PIECE, dtype=numpy.int32)
        self.byte = numpy.empty(PIECE, dtype=numpy.uint8)


_buffers = _Buffers()


def rows_on_cpu(values: Any, lengths: list[int]) -> Any:
    """Of several tensors at once, their values one after the other: an array of int64 [len(lengths), WIDTH].

    values: array of fp32, flat. lengths: how many are of which tensor; MOST of them at most, none 0.
    """
    bits = values.view(numpy.int32)
    magnitude = bits & _MAGNITUDE
    num_rows, sizes = len(lengths), numpy.array(lengths)
    starts = sizes.cumsum() - sizes
    keys = numpy.repeat(numpy.arange(0, num_rows * NUM_BINS, NUM_BINS, dtype=numpy.int16), sizes)
    numpy.add(keys, magnitude >> 23, out=keys, casting="unsafe")
    rows = numpy.zeros((num_rows, WIDTH), dtype=numpy.int64)
    bins = torch.bincount(torch.from_numpy(keys), minlength=num_rows * NUM_BINS)
    rows[:, :NUM_BINS] = bins.view(num_rows, NUM_BINS).numpy()

    def count(is_one: Any) -> Any:
        return numpy.add.reduceat(is_one, starts, dtype=numpy.int64)

    finite = magnitude
    if rows[:, NUM_BINS - 1].any():
        rows[:, NUM_BINS + 1] = count(magnitude > INF)
        rows[:, NUM_BINS + 2] = count(bits == _NEGATIVE_INF)
        finite = numpy.where(magnitude < INF, magnitude, 0)
    rows[:, -2] = numpy.maximum.reduceat(finite, starts)
    if rows[:, 0].any():
        rows[:, NUM_BINS] = count(magnitude == 0)
        magnitude[magnitude == 0] = INF
    rows[:, -1] = numpy.minimum(numpy.minimum.reduceat(magnitude, starts), INF)
    return rows


def rows_without_read(values: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """As :func:`rows_on_cpu`, in torch and without waiting for the device, as bincount would. 16 bit is taken too."""
    device, num_rows = values.device, len(lengths)
    bits = values.float().view(torch.int32)
    magnitude = bits & _MAGNITUDE
    # Zeros, NaNs and negative infinities have bins of their own, so that one histogram counts everything.
    bins = torch.where(magnitude == 0, NUM_BINS, magnitude >> 23)
    bins = torch.where(magnitude > INF, NUM_BINS + 1, bins)
    bins = torch.where(bits == _NEGATIVE_INF, NUM_BINS + 2, bins)
    # Few exponents are common. Copies of the bins keep the additions to one of them from queueing up.
    num_copies, num_bins = max(1, _NUM_COPIES // num_rows), NUM_BINS + 3
    index = torch.arange(bits.numel(), device=device) % num_copies * (num_rows * num_bins) + bins
    finite = torch.where(magnitude < INF, magnitude, 0)
    not_zero = torch.where(magnitude > 0, magnitude, INF)
    if num_rows == 1:
        largest, smallest = finite.amax(0, True), not_zero.amin(0, True)
    else:
        sizes = torch.tensor(lengths).to(device, non_blocking=True)
        segments = torch.arange(num_rows, device=device).repeat_interleave(sizes, output_size=bits.numel())
        index += segments * num_bins
        start = torch.zeros(num_rows, dtype=torch.int32, device=device)
        largest = start.scatter_reduce(0, segments, finite, "amax")
        smallest = (start + INF).scatter_reduce(0, segments, not_zero, "amin")
    counts = torch.zeros(num_copies * num_rows * num_bins, dtype=torch.int64, device=device)
    counts.scatter_add_(0, index, torch.ones_like(index))
    counts = counts.view(num_copies, num_rows, num_bins).sum(0)
    histogram, (zeros, nans, negative) = counts[:, :NUM_BINS], counts[:, NUM_BINS:].unbind(1)
    histogram[:, 0] += zeros
    histogram[:, -1] += nans + negative
    extremes = torch.stack([largest, smallest.clamp(max=INF)], 1)
    return torch.cat([histogram, torch.stack([zeros, nans, negative], 1), extremes], 1)
