"""A simulated step in the format of PyTorch's memory viewer.

What ``torch.cuda.memory._dump_snapshot`` writes on a real run, and pytorch.org/memory_viz and
``torch.cuda._memory_viz`` open: the events of the allocator in order, and the segments as they are at the end.
Sizes of events are the bytes that were asked for, as there. An event has no time of a clock, since none ran.
"""

from __future__ import annotations

import os
import pickle
from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice
from typing import Any

from halfstep.files import write_whole
from halfstep.plan.allocator import SMALL_SEGMENT, Block, Segment, Simulation
from halfstep.plan.step_trace import StepTrace, Storage

UNKNOWN = "unknown"
PROTOCOL = 4
"""Of the pickle; the viewer's page reads no later one."""

_FREE, _SEGMENT_FREE, _SEGMENT_ALLOC, _ALLOC = range(4)

_Placed = tuple[Block, list[dict[str, Any]]]  # with the frames of what it is for


def snapshot_of(trace: StepTrace, simulation: Simulation) -> dict[str, Any]:
    """The snapshot of ``simulation``, which must be of ``trace`` and have found memory for all of it.

    It begins with what is there before the step. It holds nothing but numbers, text, lists and dicts. The component of
    a storage is its ``category``, which the viewer colours by.
    """
    assert not simulation.out_of_memory, "the picture is of a whole step: simulate it without a capacity"
    events: list[tuple[int, int, dict[str, Any]]] = []  # time, order at that time, event
    for segment in simulation.segments:
        events.append((segment.born, _SEGMENT_ALLOC, _segment_event("segment_alloc", segment)))
        if segment.died is not None:
            events.append((segment.died, _SEGMENT_FREE, _segment_event("segment_free", segment)))
    in_use: list[_Placed] = []
    for workspace in simulation.before:
        frames = [_frame("workspace of a library")]
        events.append((0, _ALLOC, {**_event("alloc", workspace, frames), "category": UNKNOWN}))
        in_use.append((workspace, frames))
    for storage, block in zip(trace.storages, simulation.blocks, strict=True):
        if block is None:
            continue
        frames = frames_of(storage)
        events.append((storage.born, _ALLOC, {**_event("alloc", block, frames), "category": storage.component}))
        if storage.died is None:
            in_use.append((block, frames))
        else:
            events.append((storage.died, _FREE, _event("free_requested", block, [])))
            events.append((storage.died, _FREE, _event("free_completed", block, [])))
    events.sort(key=lambda event: event[:2])
    in_use.sort(key=lambda placed: placed[0].address)
    return {
        "segments": [_segment(segment, in_use) for segment in simulation.segments if segment.died is None],
        "device_traces": [[event for _, _, event in events]],
        "allocator_settings": {},
        "external_annotations": [],
    }


def write_snapshot(trace: StepTrace, simulation: Simulation, path: str | os.PathLike[str]) -> None:
    """Write :func:`snapshot_of` into the file at ``path``, whole or not at all."""
    write_whole(path, pickle.dumps(snapshot_of(trace, simulation), protocol=PROTOCOL))


def frames_of(storage: Storage) -> list[dict[str, Any]]:
    """What the viewer shows in place of a call stack: component, operation, module and line."""
    frames = [_frame(storage.component)]
    if storage.op is not None:
        frames.append(_frame(storage.op))
    if storage.module is not None:
        frames.append(_frame(f"module {storage.module}" if storage.module else "the model itself"))
    if storage.file is not None:
        frames.append({"name": "called here", "filename": storage.file, "line": storage.line or 0})
    return frames


def _frame(name: str) -> dict[str, Any]:
    return {"name": name, "filename": "halfstep plan", "line": 0}


def _event(action: str, block: Block, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"action": action, "addr": block.address, "size": block.nbytes, "stream": 0, "frames": frames}


def _segment_event(action: str, segment: Segment) -> dict[str, Any]:
    place = {"addr": segment.address, "size": segment.nbytes, "stream": 0, "frames": []}
    # The viewer fails on categories of which none is called unknown.
    return {"action": action, **place, "category": UNKNOWN}


def _segment(segment: Segment, in_use: Sequence[_Placed]) -> dict[str, Any]:
    """A segment with its blocks, which fill it without gaps; ``in_use`` is in order of addresses."""
    blocks: list[dict[str, Any]] = []
    at, end = segment.address, segment.address + segment.nbytes
    first = bisect_left(in_use, at, key=lambda placed: placed[0].address)
    for block, frames in islice(in_use, first, None):
        if block.address >= end:
            break
        if block.address > at:
            blocks.append(_free_block(at, block.address - at))
        blocks.append(
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.nbytes,
                "state": "active_allocated",
                "frames": frames,
            }
        )
        at = block.address + block.size
    if at < end:
        blocks.append(_free_block(at, end - at))
    active = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.nbytes,
        "allocated_size": active,
        "active_size": active,
        "requested_size": sum(block["requested_size"] for block in blocks),
        "stream": 0,
        "segment_type": "small" if segment.nbytes == SMALL_SEGMENT else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _free_block(address: int, size: int) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
