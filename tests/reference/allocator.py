"""A slow, plain twin of halfstep.plan.allocator: every segment is a list of blocks, and every search looks at all."""

from halfstep.plan.step_trace import StepTrace, Storage

UNIT, MIB = 512, 1024 * 1024
FIRST_ADDRESS, GAP = 0x7F0000000000, 2 * MIB


def trace_of(*storages, phases=(("forward", 1),)):
    """A trace of (bytes, born, died) or (bytes, born, died, component)."""
    made = [
        Storage(nbytes, rest[0] if rest else "activations", None, None, None, None, None, born, died)
        for nbytes, born, died, *rest in storages
    ]
    last = max([s.born for s in made] + [s.died or 0 for s in made])
    return StepTrace(made, last, phases, 1, 1, 0, 0, "fp32")


class Full(Exception):
    pass


class PlainAllocator:
    """Blocks are lists [size, bytes asked for], the bytes None in a free one; a segment is [address, is_small, blocks].

    ``segments`` are those held, in order of addresses.
    """

    def __init__(self, capacity):
        self.capacity = capacity
        self.segments = []
        self.next_address = FIRST_ADDRESS
        self.num_retries = 0

    def reserved(self):
        return sum(block[0] for _, _, blocks in self.segments for block in blocks)

    def allocated(self):
        return sum(block[0] for _, _, blocks in self.segments for block in blocks if block[1] is not None)

    def asked(self):
        return sum(block[1] or 0 for _, _, blocks in self.segments for block in blocks)

    def take(self, nbytes):
        """(address, bytes of the block)."""
        size = UNIT
        while size < nbytes:
            size += UNIT * max(1, (nbytes - size) // UNIT)
        is_small = size <= MIB
        best = None
        for segment in self.segments:
            for at, block in enumerate(segment[2]):
                fits = segment[1] == is_small and block[1] is None and block[0] >= size
                if fits and (best is None or block[0] < best[0][2][best[1]][0]):
                    best = segment, at
        if best is None:
            best = self.reserve(size, is_small), 0
        segment, at = best
        blocks = segment[2]
        rest = blocks[at][0] - size
        if (is_small and rest >= 512) or (not is_small and rest > MIB):
            blocks[at : at + 1] = [[size, nbytes], [rest, None]]
        else:
            blocks[at][1] = nbytes
        return segment[0] + sum(block[0] for block in blocks[:at]), blocks[at][0]

    def give(self, address):
        for start, _, blocks in self.segments:
            at = start
            for block in blocks:
                if at == address and block[1] is not None:
                    block[1] = None
                    merged = []
                    for each in blocks:
                        if merged and merged[-1][1] is None and each[1] is None:
                            merged[-1][0] += each[0]
                        else:
                            merged.append(each)
                    blocks[:] = merged
                    return
                at += block[0]
        raise AssertionError(f"no block at {address}")

    def reserve(self, size, is_small):
        if is_small:
            nbytes = 2 * MIB
        elif size < 10 * MIB:
            nbytes = 20 * MIB
        else:
            nbytes = 2 * MIB
            while nbytes < size:
                nbytes += 2 * MIB
        if self.capacity is not None and self.reserved() + nbytes > self.capacity:
            self.segments = [s for s in self.segments if len(s[2]) > 1 or s[2][0][1] is not None]
            self.num_retries += 1
            if self.reserved() + nbytes > self.capacity:
                raise Full
        segment = [self.next_address, is_small, [[nbytes, None]]]
        self.segments.append(segment)
        self.next_address += nbytes + GAP
        return segment


def simulate_plainly(trace, capacity=None, before=()):
    """The figures of a Simulation that found memory, by their names, and the blocks as (address, size) or None.

    Raises Full if it did not.
    """
    allocator = PlainAllocator(capacity)
    storages = trace.storages
    places = [None] * len(storages)
    reserved, allocated, asked, segments = [], [], [], []

    def count():
        reserved.append(allocator.reserved())
        allocated.append(allocator.allocated())
        asked.append(allocator.asked())
        segments.append(len(allocator.segments))

    def bear(i):
        if storages[i].nbytes > 0:
            places[i] = allocator.take(storages[i].nbytes)

    def end(i):
        if places[i] is not None:
            allocator.give(places[i][0])

    def is_state(i):
        return storages[i].component == "optimizer states" and storages[i].born == 0 and storages[i].died is None

    def step(is_first):
        starts = [time for phase, time in trace.phases if phase == "step"]
        states_at = starts[-1] if starts else trace.num_events
        for time in range(1, trace.num_events + 1):
            if is_first and time == states_at:
                for i in indices:
                    if is_state(i):
                        bear(i)
            for i in indices:
                if storages[i].born == time:
                    bear(i)
                    count()
            for i in indices:
                if storages[i].died == time and not (is_first and storages[i].born == 0):
                    end(i)
                    count()

    indices = range(len(storages))
    for i in indices:
        if storages[i].born == 0 and storages[i].died is None and not is_state(i):
            bear(i)
    workspaces = [allocator.take(nbytes) for nbytes in before]
    step(is_first=True)
    for i in indices:
        if storages[i].born > 0 and storages[i].died is None:
            end(i)
    for i in indices:
        if storages[i].born == 0 and storages[i].died is not None:
            bear(i)
    reserved, allocated, asked, segments = [], [], [], []
    allocator.num_retries = 0
    count()
    step(is_first=False)
    return {
        "peak_reserved": max(reserved),
        "peak_allocated": max(allocated),
        "peak_asked": max(asked),
        "num_segments": segments[reserved.index(max(reserved))],
        "num_retries": allocator.num_retries,
        "blocks": places,
        "before": workspaces,
    }
