"""What a training step takes on the device that is here, which is what a plan is held against. Runs in a worker.

One process serves one policy: it builds the workload once, measures its memory in windows of their own, and then times
a few windows whenever it is asked to, so that the policies can take turns.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from halfstep.compare.memory import LiveBytes
from halfstep.events import StepReport
from halfstep.hardware import Hardware, detect
from halfstep.loop import make_stepper
from halfstep.plan.build import build, mapped, resized, tensors_of
from halfstep.plan.fake_step import fake_step
from halfstep.plan.measure_report import Memory, Prepared, WindowTime
from halfstep.plan.subject import Subject
from halfstep.plan.target import Target
from halfstep.stepper import Stepper
from halfstep.window import Loss
from halfstep.workload import Workload, num_samples, stream, to_device

NUM_SETTLING = 2
"""Windows before the one whose memory counts: the first makes the optimizer's states, the second has them."""
MAX_SETTLING = 8
"""Windows that it waits for one like every other, at most: the loss scale may have to fall first."""

WARM_UP_S, TURN_S = 0.5, 0.5
"""Seconds that are trained before the first timing, and those of one turn of it."""
MIN_WINDOWS = 3
"""Windows of a warm-up and of a turn at least."""

Step = Callable[[Callable[[], Loss]], StepReport | None]

_run: Run | None = None  # of this process


class Run:
    """A workload behind a Stepper on a real device. ``batch_size`` is that of every micro-batch."""

    def __init__(self, workload: Workload, stepper: Stepper, batch_size: int | None) -> None:
        self.workload, self.stepper, self.batch_size = workload, stepper, batch_size
        self._batches = stream(workload)

    def window(self, step: Step, held: Callable[[Any], None] = lambda batch: None) -> bool:
        """Train one window: whether its step was applied, without running again.

        ``step`` makes each micro-batch's step; each batch is shown to ``held`` before.
        """
        report = None
        while report is None:
            batch = self._next()
            held(batch)
            report = step(lambda batch=batch: self.workload.loss(self.stepper.model, batch))  # type: ignore[misc]
            del batch
        return report.applied and not report.num_replays

    def _next(self) -> Any:
        """The next micro-batch on the device, in memory of its own, with ``batch_size`` samples.

        A longer one is cut, and a shorter one repeats its samples.
        """
        drawn = next(self._batches)
        old = num_samples(drawn)
        new = self.batch_size = self.batch_size or old
        batch = drawn if new == old else _filled(drawn, resized(drawn, old, new), old)
        device = self.stepper.region.device
        return mapped(batch, _copied) if device.type == "cpu" else to_device(batch, device)


def _filled(drawn: Any, batch: Any, old: int) -> Any:
    """``batch``, which is ``drawn`` resized, with the values of its samples in turn."""
    was, now = tensors_of(drawn), tensors_of(batch)
    made = [tensor for tensor in now if all(tensor is not other for other in was)]
    sources = [t for t in was if all(t is not other for other in now) and t.dim() and len(t) == old]
    for source, target in zip(sources, made, strict=True):
        with torch.no_grad():
            target.copy_(source[torch.arange(len(target)) % old])
    return batch


def _copied(leaf: Any) -> Any:
    """A dense copy, such as a device gets that is not the CPU."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def prepare(subject: Subject, policy: str, device: str | None) -> Prepared:
    """Build ``subject`` on ``device``, measure its memory, and train until it has warmed up.

    What the device cannot do is the HalfstepError of its Stepper.
    """
    global _run
    hardware = detect(device)
    place = device or hardware.kind
    workload = build(subject)
    if hardware.kind == "cuda":
        torch.cuda.set_device(place)
        _run = Run(workload, make_stepper(workload, policy, place), subject.batch_size)
        memory = _cuda_memory(_run)
    else:
        _run, memory = live_memory(workload, policy, place, subject.batch_size)
    _timed(_run, WARM_UP_S)
    return Prepared(
        hardware.name,
        str(torch.__version__),
        torch.get_num_threads(),
        str(_run.stepper.policy),
        (_run.batch_size or 0) * workload.accumulate,
        memory,
    )


def timed() -> list[WindowTime]:
    """The parts of each window of one turn."""
    assert _run is not None, "prepare() comes before"
    return _timed(_run, TURN_S)


def predicted(subject: Subject, policy: str, device: str | None) -> int:
    """Peak bytes of the tensors by the plan for the device that is here. To be asked last: it ends the run."""
    global _run
    _run = None
    return fake_step(subject, policy, target_on(detect(device))).peak.nbytes


def target_on(hardware: Hardware) -> Target:
    """The target that stands for ``hardware``."""
    return Target(hardware, hardware.memory_gib, True)


# --- memory --------------------------------------------------------------------------------------------------------


def live_memory(workload: Workload, policy: str, place: str, batch_size: int | None) -> tuple[Run, Memory]:
    """A run of ``workload``, and the live tensors of a window that leaves nothing new behind.

    Counted are the model, what the Stepper holds, and each batch. Data on the host are not, nor what a loader does.
    """
    live, collects = LiveBytes(), gc.isenabled()
    with live:
        stepper = make_stepper(workload, policy, place)
    run = Run(workload, stepper, batch_size)
    live.count([*stepper.model.parameters(), *stepper.model.buffers()])

    def step(closure: Callable[[], Loss]) -> StepReport | None:
        with live:
            return stepper.step(closure)

    def begin() -> None:
        gc.collect()
        live.peak = live.now

    gc.disable()  # else the moment at which a cycle of Python objects frees its tensors would depend on the machine
    try:
        is_applied = _settle(run, step, begin, lambda batch: live.count(tensors_of(batch)))
    finally:
        if collects:
            gc.enable()
    return run, Memory(live.peak, None, is_applied)


def _cuda_memory(run: Run) -> Memory:
    """What torch's allocator holds in a window like every other."""

    def begin() -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    is_applied = _settle(run, run.stepper.step, begin)
    torch.cuda.synchronize()
    return Memory(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), is_applied)


def _settle(run: Run, step: Step, begin: Callable[[], None], held: Callable[[Any], None] = lambda batch: None) -> bool:
    """Train until a window runs as every later one does, which is the last: whether there was one.

    ``begin`` is called before each.
    """
    num_applied = 0
    for _ in range(MAX_SETTLING):
        begin()
        is_applied = run.window(step, held)
        num_applied += is_applied
        if is_applied and num_applied > NUM_SETTLING:
            return True
    return False


# --- time ----------------------------------------------------------------------------------------------------------


def _timed(run: Run, seconds: float) -> list[WindowTime]:
    clock = _CudaClock() if run.stepper.region.device.type == "cuda" else _Clock()
    parts = Parts(run.stepper, clock)
    num, start = 0, time.perf_counter()
    with parts.watching():
        while num < MIN_WINDOWS or time.perf_counter() - start < seconds:
            parts.marks.append([])
            run.window(parts.step)
            num += 1
    clock.wait()
    return parts.times()


class _Clock:
    """The CPU's, where an operation has ended when its call returns."""

    def now(self) -> Any:
        return time.perf_counter()

    def wait(self) -> None:
        """Wait until what was called has run."""

    def between(self, start: Any, end: Any) -> float:
        """Seconds."""
        seconds: float = end - start
        return seconds


class _CudaClock(_Clock):
    """Events in the stream, which are read when the turn is over: no step waits for another."""

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        torch.cuda.synchronize()

    def between(self, start: Any, end: Any) -> float:
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3


class Parts:
    """Tells the parts of a step apart by its moments, from outside: the step that runs is the one of every day.

    The loss function is ``forward``, with what the step does before it: opening the region, saving statistics.
    Everything from its end to the end of the region's backward is ``backward``. All the rest is ``optimizer``: the
    gradient's norm and verdict, unscaling, clipping, the optimizer, the loss scale. Where a micro-batch runs again, or
    the optimizer evaluates the loss itself, each run counts for its part.
    """

    def __init__(self, stepper: Stepper, clock: _Clock) -> None:
        self._stepper, self._clock = stepper, clock
        self.marks: list[list[tuple[str, Any]]] = []
        """Of each window: moments in order, each with the part that ends there; empty where a step begins."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        region: Any = self._stepper.region
        backward = region.backward

        @contextlib.contextmanager
        def marked() -> Iterator[None]:
            with backward():
                yield
            self._mark("backward")

        region.backward = marked
        try:
            yield
        finally:
            del region.backward

    def step(self, closure: Callable[[], Loss]) -> StepReport | None:
        has_run = False

        def marked() -> Loss:
            nonlocal has_run
            self._mark("optimizer" if has_run else "forward")
            has_run = True
            loss = closure()
            self._mark("forward")
            return loss

        self._mark("")
        report = self._stepper.step(marked)
        self._mark("optimizer")
        return report

    def _mark(self, ends: str) -> None:
        self.marks[-1].append((ends, self._clock.now()))

    def times(self) -> list[WindowTime]:
        return [self._time(marks) for marks in self.marks]

    def _time(self, marks: list[tuple[str, Any]]) -> WindowTime:
        seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        for (_, start), (part, end) in itertools.pairwise(marks):
            if part:
                seconds[part] += self._clock.between(start, end)
        return WindowTime(**seconds)
