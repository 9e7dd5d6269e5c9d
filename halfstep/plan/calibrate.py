"""Measures what the device at hand does in a second: a large matrix product in each of its formats, and a large copy.

With these rates in place of the published ones a roofline gives a figure for this very device, with its clock, its
cooling and its libraries. Only :func:`calibrate` imports torch; a calibration travels and is read back without.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from halfstep.errors import HalfstepError
from halfstep.formats import FORMATS
from halfstep.hardware import detect
from halfstep.plan.roofline import Ceilings
from halfstep.plan.target import Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

Run = tuple[Callable[[], object], Callable[[], AbstractContextManager[None]]]
"""What is measured, and a context that switches its format on."""

NUM_WARM_UPS = 2
NUM_REPEATS = 9
SIZES = {"cuda": (8192, 2**30), "cpu": (1024, 2**28)}
"""By kind of device: rows of the square matrices, and bytes that are copied, several times the largest cache."""


@dataclass(frozen=True)
class Calibration:
    """What was measured on one device.

    device:             as it reports itself. kind: ``cuda`` or ``cpu``. card: its name in the catalogue, or None.
    torch:              the version that measured.
    rates_tflops:       of a square matrix product, per format, in 10^12 operations per second: the median.
    bandwidth_gb_per_s: of a copy, bytes read and written together, in 10^9 per second: the median.
    spread_pct:         per format and of ``copy``: the largest less the smallest time, in percent of the median.
    context_bytes:      memory of the device that is taken and not held by torch's allocator, after the products have
                        loaded their libraries; what other processes hold is in it. None on a CPU.
    """

    device: str
    kind: str
    card: str | None
    torch: str
    rates_tflops: Mapping[str, float]
    bandwidth_gb_per_s: float
    spread_pct: Mapping[str, float]
    context_bytes: int | None

    def ceilings(self, target: Target) -> Ceilings:
        """The measured rates as ceilings of ``target``, which has to be a device like the one that was measured."""
        is_like = target.hardware.kind == self.kind and (
            target.card is None or target.card.name == self.card or not target.is_named
        )
        if not is_like:
            raise HalfstepError(
                f"a calibration of {self.device}",
                f"the plan is for {target.name}, whose rates it does not tell",
                "Measure on that device, or leave the calibration out for the published rates.",
            )
        return Ceilings(self.rates_tflops, self.bandwidth_gb_per_s, f"measured on {self.device}", is_measured=True)


def calibrate(device: str | None = None) -> Calibration:
    """Measure ``device``, as ``halfstep.hardware.detect`` takes it; None is CUDA if present, else the CPU.

    Products and copy take turns, so that a clock that falls slows all of them; the first rounds do not count. Raises
    HalfstepError for a device that is not there or that nothing here measures.
    """
    import torch

    hardware = detect(device)
    if hardware.kind not in SIZES:
        raise HalfstepError(f"device {device!r}", f"halfstep does not measure {hardware.kind}", "Use cuda or cpu.")
    at = torch.device(device or hardware.kind)
    rows, num_bytes = _fitting(at)
    formats = [name for name in ("fp32", "tf32", "bf16", "fp16") if name in hardware.native]
    runs: dict[str, Run] = {name: _product(at, rows, name) for name in formats}
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=at)
    sink = torch.empty_like(source)
    runs["copy"] = (lambda: sink.copy_(source), nullcontext)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(NUM_WARM_UPS + NUM_REPEATS):
        for name, (run, switched) in runs.items():
            with switched():
                times[name].append(_seconds(run, at))
    counted = {name: each[NUM_WARM_UPS:] for name, each in times.items()}
    median = {name: statistics.median(each) for name, each in counted.items()}
    return Calibration(
        device=hardware.name,
        kind=hardware.kind,
        card=hardware.card.name if hardware.card else None,
        torch=torch.__version__,
        rates_tflops={name: 2e-12 * rows**3 / median[name] for name in formats},
        bandwidth_gb_per_s=2e-9 * num_bytes / median["copy"],
        spread_pct={name: 100 * (max(each) - min(each)) / median[name] for name, each in counted.items()},
        context_bytes=_context_bytes(at) if at.type == "cuda" else None,
    )


def _fitting(at: torch.device) -> tuple[int, int]:
    """SIZES, halved until all that is measured takes at most half of the free memory."""
    import torch

    rows, num_bytes = SIZES[at.type]
    if at.type == "cuda":
        free, _ = torch.cuda.mem_get_info(at)
        while 2 * num_bytes + 3 * (4 + 4 + 2 + 2) * rows**2 > free / 2:
            rows, num_bytes = rows // 2, num_bytes // 4
    return rows, num_bytes


def _product(at: torch.device, rows: int, format: str) -> Run:
    """A product into memory of its own."""
    import torch

    dtype = FORMATS[format].dtype
    generator = torch.Generator(at).manual_seed(0)  # power, and so the clock, depends on the values
    left, right = (torch.randn(rows, rows, device=at, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    switched = nullcontext if at.type == "cpu" else functools.partial(_tf32, format == "tf32")
    return functools.partial(torch.mm, left, right, out=out), switched


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    import torch

    cuda = torch.backends.cuda.matmul
    saved, cuda.allow_tf32 = cuda.allow_tf32, allowed
    try:
        yield
    finally:
        cuda.allow_tf32 = saved


def _seconds(run: Callable[[], object], at: torch.device) -> float:
    """Of one call: on CUDA between two events of the stream, else by the clock."""
    import torch

    if at.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(at):
        before.record()
        run()
        after.record()
        after.synchronize()
    return float(before.elapsed_time(after)) / 1e3


def _context_bytes(at: torch.device) -> int:
    import torch

    free, total = torch.cuda.mem_get_info(at)
    return total - free - torch.cuda.memory_reserved(at)
