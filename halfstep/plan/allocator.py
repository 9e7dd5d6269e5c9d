"""What torch's CUDA caching allocator holds for a step: its rules, replayed on a trace.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` in torch 2.11 to 2.13,
with default settings: no expandable segments, no rounding to powers of two, no limit on splitting, one stream.

- A request is rounded up to a multiple of 512 bytes. Up to 1 MiB it is served from the small pool, else from the large.
- The smallest free block that holds it is taken, of equal ones that at the lowest address. What is left over is split
  off as a free block: in the small pool from 512 bytes on, in the large one if it is more than 1 MiB.
- If there is none, a segment is reserved: of 2 MiB for the small pool, of 20 MiB for a request below 10 MiB, of the
  request rounded up to 2 MiB else.
- A freed block merges with its free neighbours in the segment, and stays reserved.
- When the card is full, every segment without a block in use is given back and the request tried once more.

Where the driver puts a segment is not torch's to say; here each lies behind the ones before it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from halfstep.plan.step_trace import STEP, StepTrace

MIB = 1 << 20
UNIT = 512
"""Sizes of blocks are multiples of this."""
SMALL = 1 * MIB
"""The largest request of the small pool."""
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
OWN_SEGMENT = 10 * MIB
"""From this size on a request that finds no block gets a segment of its own size, in multiples of SEGMENT_UNIT."""
SEGMENT_UNIT = 2 * MIB

FIRST_ADDRESS = 0x7F0000000000
GAP = SEGMENT_UNIT
"""Bytes between two segments, so that blocks of different ones never touch."""


class Block(NamedTuple):
    """A block in use. nbytes: what was asked for. size: what it takes."""

    address: int
    nbytes: int
    size: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory reserved from the driver. born, died: times in the step; 0 is before it, None is never."""

    address: int
    nbytes: int
    born: int
    died: int | None


@dataclass(frozen=True)
class Simulation:
    """A step in the caching allocator; ``torch.cuda.max_memory_reserved`` and ``max_memory_allocated`` are its peaks.

    peak_reserved:  most bytes in segments. num_segments: how many they are then, for the first time.
    peak_allocated: most bytes in blocks in use. peak_asked: most bytes that were asked for.
    num_retries:    how often the card was full, and segments were given back, within the step.
    failed_at:      time of the event that found no memory, None if all did. The figures are then those up to it.
    blocks:         of each storage, in the order of the trace; None if it takes none or came after a failure.
    before:         the blocks of the libraries. segments: those that were held within the step.
    """

    peak_reserved: int
    peak_allocated: int
    peak_asked: int
    num_segments: int
    num_retries: int
    failed_at: int | None
    blocks: Sequence[Block | None]
    before: Sequence[Block]
    segments: Sequence[Segment]

    @property
    def out_of_memory(self) -> bool:
        return self.failed_at is not None

    @property
    def rounding(self) -> int:
        """Bytes that blocks are larger than what was asked for: the difference of the two peaks."""
        return self.peak_allocated - self.peak_asked

    @property
    def fragmentation(self) -> int:
        """Bytes that are reserved above the peak of the blocks in use."""
        return self.peak_reserved - self.peak_allocated


def simulate(trace: StepTrace, capacity: int | None = None, before: Sequence[int] = ()) -> Simulation:
    """Replay ``trace`` in a running job: one step in which the segments grow, then the step that counts.

    The first step is assumed to be as every other, except that the optimizer makes its states in it, at the start of
    its last ``step`` phase, where earlier memory lies free. A run that begins with a step of another kind (a longer
    sequence, an evaluation) may be fragmented in another way.

    capacity: bytes that the allocator may reserve, which is the card's memory less all that is outside of it; None is
              as many as it takes.
    before:   bytes of blocks that libraries take at their first call and keep, such as a workspace of cuBLAS. They come
              after all that was there before the step.
    """
    storages = trace.storages
    allocator = _Allocator(capacity)
    replay = _Replay(allocator, [storage.nbytes for storage in storages])
    is_state = [storage.component == "optimizer states" for storage in storages]
    held = [i for i, s in enumerate(storages) if s.born == 0 and s.died is None]
    coming = [i for i, s in enumerate(storages) if s.born == 0 and s.died is not None]
    staying = [i for i, s in enumerate(storages) if s.born > 0 and s.died is None]
    events = [(s.born, False, i) for i, s in enumerate(storages) if s.born > 0]
    events += [(s.died, True, i) for i, s in enumerate(storages) if s.died is not None]
    events.sort()
    made_at = next((start for phase, start in reversed(trace.phases) if phase == STEP), trace.num_events)
    first = [event for event in events if storages[event[2]].born > 0]
    first[bisect_left(first, (made_at,)) : 0] = [(made_at, False, i) for i in held if is_state[i]]

    taken: list[Block] = []
    try:
        replay.bear(i for i in held if not is_state[i])
        for nbytes in before:
            taken.append(allocator.take(nbytes))
        replay.run(first)
        # What one step leaves to the next is there when that one begins.
        replay.end(staying)
        replay.bear(coming)
        allocator.restart()
        replay.run(events)
    except _OutOfMemory:
        failed_at: int | None = allocator.time
    else:
        failed_at = None
    return Simulation(
        allocator.peak_reserved,
        allocator.peak_allocated,
        allocator.peak_asked,
        allocator.num_segments,
        allocator.num_retries,
        failed_at,
        replay.blocks,
        taken,
        sorted(allocator.history(), key=lambda segment: (segment.born, segment.address)),
    )


class _OutOfMemory(Exception):
    pass


@dataclass
class _Replay:
    """Storages by their index in blocks of ``allocator``."""

    allocator: _Allocator
    nbytes: Sequence[int]
    blocks: list[Block | None] = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = [None] * len(self.nbytes)

    def bear(self, indices: Iterable[int]) -> None:
        for i in indices:
            if self.nbytes[i]:
                self.blocks[i] = self.allocator.take(self.nbytes[i])

    def end(self, indices: Iterable[int]) -> None:
        for i in indices:
            block = self.blocks[i]
            if block is not None:
                self.allocator.give(block)

    def run(self, events: Iterable[tuple[int, bool, int]]) -> None:
        """Each event is (time, whether it is a death, index of the storage)."""
        allocator, blocks, all_nbytes = self.allocator, self.blocks, self.nbytes
        for time, is_death, i in events:
            allocator.time = time
            if is_death:
                block = blocks[i]
                if block is not None:
                    allocator.give(block)
            else:
                nbytes = all_nbytes[i]
                if nbytes:
                    blocks[i] = allocator.take(nbytes)


class _Allocator:
    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._small: list[tuple[int, int]] = []  # free blocks, (size, address), in order
        self._large: list[tuple[int, int]] = []
        self._size_from: dict[int, int] = {}  # of free blocks, by their first address
        self._size_to: dict[int, int] = {}  # and by the one behind their last
        self._segments: dict[int, Segment] = {}
        self._released: list[Segment] = []
        self._next_address = FIRST_ADDRESS
        self._reserved = self._allocated = self._asked = 0
        self.time = 0
        self.restart()

    def restart(self) -> None:
        """Begin to count with what is held."""
        self.time = 0
        self.num_retries = 0
        self.peak_reserved, self.peak_allocated, self.peak_asked = self._reserved, self._allocated, self._asked
        self.num_segments = len(self._segments)
        self._segments = {a: Segment(a, segment.nbytes, 0, None) for a, segment in self._segments.items()}
        self._released = []

    def history(self) -> list[Segment]:
        return self._released + list(self._segments.values())

    def take(self, nbytes: int) -> Block:
        size = -(-nbytes // UNIT) * UNIT
        is_small = size <= SMALL
        pool = self._small if is_small else self._large
        at = bisect_left(pool, (size, 0))
        if at < len(pool):
            found, address = pool.pop(at)
            del self._size_from[address], self._size_to[address + found]
        else:
            found, address = self._reserve(size)
        rest = found - size
        if rest >= UNIT if is_small else rest > SMALL:
            self._keep(pool, rest, address + size)
        else:
            size = found
        self._allocated += size
        self._asked += nbytes
        if self._allocated > self.peak_allocated:
            self.peak_allocated = self._allocated
        if self._asked > self.peak_asked:
            self.peak_asked = self._asked
        return Block(address, nbytes, size)

    def give(self, block: Block) -> None:
        address, nbytes, size = block
        self._allocated -= size
        self._asked -= nbytes
        pool = self._small if size <= SMALL else self._large
        behind = self._size_from.get(address + size)
        if behind is not None:
            self._drop(pool, behind, address + size)
            size += behind
        ahead = self._size_to.get(address)
        if ahead is not None:
            address -= ahead
            self._drop(pool, ahead, address)
            size += ahead
        self._keep(pool, size, address)

    def _keep(self, pool: list[tuple[int, int]], size: int, address: int) -> None:
        insort(pool, (size, address))
        self._size_from[address] = self._size_to[address + size] = size

    def _drop(self, pool: list[tuple[int, int]], size: int, address: int) -> None:
        del pool[bisect_left(pool, (size, address))]
        del self._size_from[address], self._size_to[address + size]

    def _reserve(self, size: int) -> tuple[int, int]:
        """A new segment for a block of ``size``: its bytes and address."""
        if size <= SMALL:
            nbytes = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            nbytes = LARGE_SEGMENT
        else:
            nbytes = -(-size // SEGMENT_UNIT) * SEGMENT_UNIT
        if self._is_full(nbytes):
            self._release()
            self.num_retries += 1
            if self._is_full(nbytes):
                raise _OutOfMemory
        address = self._next_address
        self._next_address += nbytes + GAP
        self._segments[address] = Segment(address, nbytes, self.time, None)
        self._reserved += nbytes
        if self._reserved > self.peak_reserved:
            self.peak_reserved, self.num_segments = self._reserved, len(self._segments)
        return nbytes, address

    def _is_full(self, nbytes: int) -> bool:
        return self._capacity is not None and self._reserved + nbytes > self._capacity

    def _release(self) -> None:
        """Give back every segment that is one free block."""
        for address, segment in list(self._segments.items()):
            if self._size_from.get(address) == segment.nbytes:
                pool = self._small if segment.nbytes == SMALL_SEGMENT else self._large
                self._drop(pool, segment.nbytes, address)
                del self._segments[address]
                self._reserved -= segment.nbytes
                self._released.append(Segment(address, segment.nbytes, segment.born, self.time))
