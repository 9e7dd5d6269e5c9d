"""How fast a step could go at best: the operations and bytes of its kernels against what a device does in a second.

A kernel cannot end before its products are computed, nor before its tensors have passed through the memory (Williams,
Waterman and Patterson, Roofline, 2009), and the kernels of a step run one after the other:

    seconds >= sum over kernels of max(operations / rate of the format, bytes / bandwidth)

That is a bound and no promise: no efficiency is assumed, no launch, no wait for data. ``docs/roofline.md`` says what
could get past it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from halfstep.errors import HalfstepError, and_more
from halfstep.plan.step_trace import STEP
from halfstep.plan.target import Target

LAUNCH_US = 4.0
"""What the launch of a kernel from Python typically costs, in microseconds. A note uses it, the bound does not."""

LEVEL_SHARE = 0.95
"""The batch levels off where the bound is within 5% of its limit for ever larger batches."""

CACHE_BYTES = 2**27
"""More than the L2 cache of an A100 (40 MB), H100 (50 MB) or RTX 4090 (72 MB) holds. A note tells what share of a step
moves less than that at a time."""

MAX_GROUPS = 16
"""Modules are grouped as finely as gives so many groups at most."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """``num`` kernels of a step that are alike in all of this.

    op:       such as ``aten.mm.default``. module: qualified name; ``""`` is the model itself, None is outside of it.
    phase:    ``forward``, ``backward`` (with what a checkpoint computes again) or ``step``.
    format:   in which its product multiplies: ``fp32``, ``tf32``, ``fp16``, ``bf16``; None where it multiplies nothing.
    flops:    floating-point operations of the products of one kernel, a multiplication and an addition being two.
    bytes_read, bytes_written: of one kernel.
    growth:   what the three grow by with one sample more in a micro-batch, None where that is not known.
    """

    op: str
    module: str | None
    phase: str
    format: str | None
    num: int
    flops: float
    bytes_read: float
    bytes_written: float
    growth: tuple[float, float, float] | None

    @property
    def nbytes(self) -> float:
        return self.bytes_read + self.bytes_written

    def with_more(self, num_samples: float) -> Kernel:
        """The same kernel with ``num_samples`` more in a micro-batch."""
        assert self.growth is not None, "a count at one batch size tells of that alone"
        flops, read, written = self.growth
        return replace(
            self,
            flops=self.flops + num_samples * flops,
            bytes_read=self.bytes_read + num_samples * read,
            bytes_written=self.bytes_written + num_samples * written,
        )


@dataclass(frozen=True, slots=True)
class OffSize:
    """A layer that multiplies with a size that is no multiple of what tensor cores want, see ``halfstep.align``."""

    module: str
    kind: str
    dimension: str
    size: int
    multiple: int


@dataclass(frozen=True)
class Operations:
    """What one step computes and moves, as ``halfstep.plan.operations.count_operations`` counts it.

    batch_size:  samples of a micro-batch. num_samples: of the step, all its micro-batches together.
    policy:      the effective policy. techniques: names of what was changed besides.
    uncounted:   operations whose products have no formula; what they compute is missing from ``kernels``.
    off_sizes:   sizes that keep tensor cores from full speed.
    notes:       what the count rests on, in sentences.
    """

    kernels: Sequence[Kernel]
    batch_size: int
    num_samples: int
    policy: str
    techniques: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()
    off_sizes: tuple[OffSize, ...] = ()
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def num_kernels(self) -> int:
        return sum(kernel.num for kernel in self.kernels)

    @functools.cached_property
    def flops(self) -> float:
        return sum(kernel.num * kernel.flops for kernel in self.kernels)

    @functools.cached_property
    def nbytes(self) -> float:
        return sum(kernel.num * kernel.nbytes for kernel in self.kernels)

    @functools.cached_property
    def has_growth(self) -> bool:
        """Whether :meth:`with_batch` can tell of other batch sizes."""
        return all(kernel.growth is not None for kernel in self.kernels)

    def with_batch(self, batch_size: int) -> Operations:
        """The operations of a step with ``batch_size`` samples in a micro-batch: each kernel is affine in it."""
        more = batch_size - self.batch_size
        kernels = [kernel.with_more(more) for kernel in self.kernels] if more else self.kernels
        num_samples = self.num_samples // self.batch_size * batch_size
        return replace(self, kernels=kernels, batch_size=batch_size, num_samples=num_samples)


@dataclass(frozen=True)
class Ceilings:
    """What a device does in a second at most.

    rates_tflops:       products per format, in 10^12 operations per second.
    bandwidth_gb_per_s: of its memory, reading and writing together, in 10^9 bytes per second.
    source:             who says so. is_measured: whether it was measured, so that a step may get past it by a little.
    """

    rates_tflops: Mapping[str, float]
    bandwidth_gb_per_s: float
    source: str
    is_measured: bool = False

    def seconds_of(self, kernel: Kernel) -> tuple[float, float]:
        """(of the products, of the bytes) of one kernel; 0 for a format without a rate, so that a bound stays one."""
        rate = self.rates_tflops.get(kernel.format or "")
        return (kernel.flops / rate * 1e-12 if rate else 0.0, kernel.nbytes / self.bandwidth_gb_per_s * 1e-9)


def ceilings_of(target: Target) -> Ceilings:
    """The published figures of the card that is planned for. Without one there is no bound, and the error says so."""
    card = target.card
    if card is None:
        raise HalfstepError(
            f"a bound on the speed of {target.name}",
            "the catalogue holds no rates for it" if target.is_named else "no card is named, and rates differ by card",
            "Name one with --card, or measure the device at hand with --calibrate.",
        )
    return Ceilings(card.rates_tflops, card.bandwidth_gb_per_s, card.source)


@dataclass(frozen=True)
class Share:
    """A group of modules: how long its kernels take at the bound, as a share of the step, and what bounds them.

    name: a qualified name with ``*`` for numbers, ``(the model)``, ``(outside)`` for the loss, ``(step)`` for clipping
          and optimizer. compute_share: of its seconds, those in kernels that their products bound.
    """

    name: str
    seconds: float
    share: float
    compute_share: float


@dataclass(frozen=True)
class Bound:
    """No step of these kernels is faster on a device with these ceilings.

    seconds:        of the step, at least. samples_per_s: at most; ``num_samples / seconds``.
    compute_s:      what the products alone take; no cache and no fusing gets below it.
    memory_s:       what the bytes alone take.
    compute_share:  of ``seconds``, those in kernels that their products bound; the memory bounds the rest.
    modules:        by time. num_kernels: about how many launches.
    limit_samples_per_s: what ``samples_per_s`` nears for ever larger batches. level_batch_size: the smallest
                    micro-batch within 5% of it. None where the growth with the batch is not known.
    off_share:      of ``seconds``, those in products of layers with a size in ``off_sizes``.
    is_measured:    whether the ceilings were measured; the figure is an estimate then, and no bound.
    notes:          what is not in the figure, in sentences.
    """

    batch_size: int
    num_samples: int
    seconds: float
    samples_per_s: float
    compute_s: float
    memory_s: float
    compute_share: float
    modules: tuple[Share, ...]
    num_kernels: int
    limit_samples_per_s: float | None
    level_batch_size: int | None
    off_sizes: tuple[OffSize, ...]
    off_share: float
    source: str
    is_measured: bool
    notes: tuple[str, ...]

    def gain_over(self, other: Bound) -> float:
        """How many times as many samples a second as ``other``, if both ran at their bounds."""
        return self.samples_per_s / other.samples_per_s

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        kind = "scaled by measured rates" if self.is_measured else "upper bound, no promise"
        lines = [
            f"{self.samples_per_s:,.4g} samples/s ({kind}): {self.seconds * 1e3:.4g} ms a step of {self.num_samples}",
            f"bound by products {self.compute_share:.0%}, by memory {1 - self.compute_share:.0%}",
        ]
        if self.limit_samples_per_s is not None:
            lines.append(
                f"levels off at a batch of {self.level_batch_size}, "
                f"within 5% of {self.limit_samples_per_s:,.4g} samples/s for ever larger ones"
            )
        width = max((len(share.name) for share in self.modules), default=0)
        lines += [
            f"  {s.name:{width}}  {s.share:6.1%}  {'products' if s.compute_share >= 0.5 else 'memory'}"
            for s in self.modules
        ]
        return "\n".join([*lines, *self.notes])


def bound_of(operations: Operations, ceilings: Ceilings, batch_size: int | None = None) -> Bound:
    """The bound of a step of ``operations``, with ``batch_size`` samples in a micro-batch; None is what was counted.

    Another batch size than the one counted needs operations with growth.
    """
    at = operations if batch_size is None else operations.with_batch(batch_size)
    timed = [_Timed(kernel, *ceilings.seconds_of(kernel)) for kernel in at.kernels]
    seconds = _seconds(timed)
    off = {size.module for size in at.off_sizes}
    limit, level = _level(at, ceilings) if at.has_growth else (None, None)
    return Bound(
        batch_size=at.batch_size,
        num_samples=at.num_samples,
        seconds=seconds,
        samples_per_s=at.num_samples / seconds,
        compute_s=sum(one.kernel.num * one.products_s for one in timed),
        memory_s=sum(one.kernel.num * one.bytes_s for one in timed),
        compute_share=_seconds(one for one in timed if one.is_compute) / seconds,
        modules=_shares(timed, seconds),
        num_kernels=at.num_kernels,
        limit_samples_per_s=limit,
        level_batch_size=level,
        off_sizes=at.off_sizes,
        off_share=_seconds(one for one in timed if one.kernel.format and one.kernel.module in off) / seconds,
        source=ceilings.source,
        is_measured=ceilings.is_measured,
        notes=(*at.notes, *_notes(at, ceilings, timed)),
    )


class _Timed(NamedTuple):
    kernel: Kernel
    products_s: float
    bytes_s: float

    @property
    def seconds(self) -> float:
        """Of all ``num`` of them."""
        return self.kernel.num * max(self.products_s, self.bytes_s)

    @property
    def is_compute(self) -> bool:
        return self.products_s > self.bytes_s


def _seconds(timed: Iterable[_Timed]) -> float:
    return sum(one.seconds for one in timed)


def _level(operations: Operations, ceilings: Ceilings) -> tuple[float | None, int | None]:
    """What samples/s nears for ever larger batches, and the smallest batch within 5% of it.

    Each kernel takes max(a + b n, c + d n) with n samples, so the seconds of a step are convex in n and those of a
    sample only fall. The limit has no value where no kernel grows.
    """
    lines = []
    for kernel in operations.kernels:
        products, nbytes = ceilings.seconds_of(kernel.with_more(-operations.batch_size))
        more_products, more_bytes = ceilings.seconds_of(kernel.with_more(1 - operations.batch_size))
        lines.append((kernel.num, products, more_products - products, nbytes, more_bytes - nbytes))
    slope = sum(num * max(b, d) for num, _, b, _, d in lines)
    if slope <= 0:
        return None, None

    def is_level(n: int) -> bool:
        return slope * n >= LEVEL_SHARE * sum(num * max(a + b * n, c + d * n) for num, a, b, c, d in lines)

    high = 1
    while not is_level(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_level(middle) else (middle, high)
    return operations.num_samples / operations.batch_size / slope, high


def _shares(timed: Sequence[_Timed], seconds: float) -> tuple[Share, ...]:
    """The kernels by module, grouped as finely as gives MAX_GROUPS groups at most, or else by outermost module."""
    depth = max((one.kernel.module.count(".") + 1 for one in timed if one.kernel.module), default=1)
    groups = _groups(timed, depth)
    while len(groups) > MAX_GROUPS and depth > 1:
        depth -= 1
        groups = _groups(timed, depth)
    shares = [
        Share(name, total, total / seconds, _seconds(one for one in group if one.is_compute) / total if total else 0.0)
        for name, group in groups.items()
        for total in [_seconds(group)]
    ]
    return tuple(sorted(shares, key=lambda share: -share.seconds))


def _groups(timed: Sequence[_Timed], depth: int) -> dict[str, list[_Timed]]:
    groups: dict[str, list[_Timed]] = {}
    for one in timed:
        module = one.kernel.module
        if one.kernel.phase == STEP:
            name = "(step)"
        elif not module:
            name = "(outside)" if module is None else "(the model)"
        else:
            name = ".".join("*" if part.isdigit() else part for part in module.split(".")[:depth])
        groups.setdefault(name, []).append(one)
    return groups


def _notes(operations: Operations, ceilings: Ceilings, timed: Sequence[_Timed]) -> list[str]:
    seconds, launches_s = _seconds(timed), operations.num_kernels * LAUNCH_US * 1e-6
    launches = (
        f"Not in the figure: about {operations.num_kernels:,} launches. At a typical {LAUNCH_US:g} us each they take "
    )
    rest = ", longer than the kernels: this step is likely bound by its launches." if launches_s > seconds else "."
    notes = [f"{launches}{launches_s * 1e3:.3g} ms{rest}"]
    cached_s = _seconds(one for one in timed if one.kernel.nbytes < CACHE_BYTES and not one.is_compute)
    if cached_s > 0.05 * seconds:
        notes.append(
            f"Kernels that move less than {CACHE_BYTES // 2**20} MiB each take {cached_s / seconds:.0%} of it; where a "
            "card's cache holds that, they are faster than its memory lets them. The products alone take "
            f"{sum(one.kernel.num * one.products_s for one in timed) * 1e3:.3g} ms."
        )
    if operations.off_sizes:
        off = [f"{size.module} ({size.dimension} {size.size})" for size in operations.off_sizes]
        notes.append(f"Counted at full speed, though tensor cores want other sizes: {and_more(off)}.")
    if operations.uncounted:
        notes.append(f"Not counted, since no formula is known: {and_more(operations.uncounted)}.")
    formats = {kernel.format for kernel in operations.kernels if kernel.format} - set(ceilings.rates_tflops)
    if formats:
        named = ", ".join(sorted(formats))
        notes.append(f"{ceilings.source} has no rate for {named}; its products count by their bytes alone.")
    return notes
