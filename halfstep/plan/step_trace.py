"""The trace of one training step: every storage from birth to death, and what follows from it.

A storage is a block of memory that one or more tensors share. Time is a count of events: a birth or a death is one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

COMPONENTS = (
    "weights",
    "buffers",
    "master weights",
    "optimizer states",
    "gradients",
    "inputs",
    "16-bit weights",
    "activations",
    "forward temporaries",
    "backward temporaries",
    "step temporaries",
)
"""What a storage is held for. ``weights`` are the parameters, in whatever format; ``master weights`` the rests of a
layout; ``16-bit weights`` autocast's casts of parameters. ``activations`` were made in a forward pass and outlive it,
``forward temporaries`` do not; the other temporaries were made by the backward pass (what a checkpoint computes again
as well) and between it and the end of the step."""

FORWARD, BACKWARD, STEP = "forward", "backward", "step"
"""The phases of a step. ``step`` is everything after the last backward pass: unscale, clip, optimizer."""


@dataclass(frozen=True, slots=True)
class Storage:
    """One block of memory.

    nbytes:    bytes that the tensors asked for, without an allocator's rounding.
    component: one of COMPONENTS.
    phase, op, module, file, line: where it was made: the operation (``aten.mm.default``), the qualified name of the
               module (``""`` is the model itself, None outside of it), and the line of the user's code. None for what
               was there before the step.
    born, died: time of its first and last event; born is 0 for what was there before the step, and died is None for
               what is there after it.
    """

    nbytes: int
    component: str
    phase: str | None
    op: str | None
    module: str | None
    file: str | None
    line: int | None
    born: int
    died: int | None


@dataclass(frozen=True)
class Moment:
    """The memory at one time: bytes in all, and by component (only those that hold any)."""

    time: int
    nbytes: int
    components: Mapping[str, int]


@dataclass(frozen=True)
class StepTrace:
    """One step of a model under a policy, as it would run on a device.

    storages:    in the order of their birth; those that were there before come first.
    num_events:  births and deaths; times run from 1 to it.
    phases:      (phase, time of its first event), in order; a window of several micro-batches has several of each.
    batch_size:  samples of a micro-batch.
    num_samples: samples of the step, which is ``batch_size`` times the micro-batches of its window.
    num_parameters: of the model; num_trained of them require a gradient.
    policy:      the effective policy. techniques: names of what was changed besides, see ``halfstep.plan.technique``.
    attention:   the attention kernels that were chosen, with the reason, each with the modules that call it.
    tokens_per_sample: length of the batch's sequences of whole numbers, None where it has none.
    notes:       what the figure rests on, in sentences.
    growth:      bytes that each storage grows by with one sample more, None where that is not known.
    pair:        the step of two samples, where a single one runs in another way than several, as it does where a
                 dimension of 1 needs no copy.
    """

    storages: Sequence[Storage]
    num_events: int
    phases: Sequence[tuple[str, int]]
    batch_size: int
    num_samples: int
    num_parameters: int
    num_trained: int
    policy: str
    techniques: tuple[str, ...] = ()
    attention: Mapping[str, Sequence[str]] | None = None
    tokens_per_sample: int | None = None
    notes: tuple[str, ...] = ()
    growth: Sequence[float] | None = None
    pair: StepTrace | None = None

    @property
    def law(self) -> StepTrace:
        """The trace that tells of other batches, if it has :attr:`growth`: this one, or that of a pair."""
        return self.pair if self.growth is None and self.pair is not None else self

    def growth_to(self, other: StepTrace) -> Sequence[float] | None:
        """What each storage grows by with a sample, by the same step with another batch.

        None where that one ran in another way, as one does that chooses a kernel by the size of a batch.
        """
        if [(s.born, s.died) for s in other.storages] != [(s.born, s.died) for s in self.storages]:
            return None
        samples = other.batch_size - self.batch_size
        growth = [(b.nbytes - a.nbytes) / samples for a, b in zip(self.storages, other.storages, strict=True)]
        # What grows by more than its share is not a line, as the products of all samples with all others are not.
        is_line = all(a.nbytes >= more * self.batch_size for a, more in zip(self.storages, growth, strict=True))
        return growth if is_line else None

    def with_batch(self, batch_size: int) -> StepTrace:
        """The trace of a step with ``batch_size`` samples in a micro-batch, by :attr:`growth`."""
        assert self.growth is not None, "a trace without growth tells of its own batch alone"
        more = batch_size - self.batch_size
        storages = [
            replace(storage, nbytes=round(storage.nbytes + more * growth))
            for storage, growth in zip(self.storages, self.growth, strict=True)
        ]
        windows = self.num_samples // self.batch_size
        return replace(self, storages=storages, batch_size=batch_size, num_samples=batch_size * windows)

    @functools.cached_property
    def peak(self) -> Moment:
        """The first time at which most bytes are alive."""
        best, at = -1, 0
        for time, nbytes in self.totals():
            if nbytes > best:
                best, at = nbytes, time
        return self.at(at)

    def totals(self) -> Iterator[tuple[int, int]]:
        """(time, bytes alive after its event), from time 0 on."""
        changes = [0] * (self.num_events + 1)
        for storage in self.storages:
            changes[storage.born] += storage.nbytes
            if storage.died is not None:
                changes[storage.died] -= storage.nbytes
        total = 0
        for time, change in enumerate(changes):
            total += change
            yield time, total

    def alive(self, time: int) -> list[Storage]:
        """The storages that are alive after the event at ``time``."""
        return [s for s in self.storages if s.born <= time and (s.died is None or s.died > time)]

    def at(self, time: int) -> Moment:
        """The memory after the event at ``time``."""
        components: dict[str, int] = {}
        for storage in self.alive(time):
            components[storage.component] = components.get(storage.component, 0) + storage.nbytes
        ordered = {name: components[name] for name in COMPONENTS if components.get(name)}
        return Moment(time, sum(ordered.values()), ordered)

    def born_at(self, time: int) -> Storage | None:
        """The storage whose birth is the event at ``time``; for a peak that is what made it."""
        return next((storage for storage in self.storages if storage.born == time and time > 0), None)

    def phase_at(self, time: int) -> str:
        """The phase that the event at ``time`` belongs to."""
        current = self.phases[0][0] if self.phases else FORWARD
        for phase, start in self.phases:
            if start > time:
                break
            current = phase
        return current
