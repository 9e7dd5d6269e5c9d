"""The snapshot for PyTorch's memory viewer: torch's own readers take it, and its events add up to the trace."""

import pickle
import pickletools
import subprocess
import sys

import pytest
from reference.allocator import trace_of
from torch.cuda import _memory_viz

from halfstep.errors import HalfstepError
from halfstep.plan.allocator import MIB, simulate
from halfstep.plan.fake_step import fake_step
from halfstep.plan.step_trace import COMPONENTS, Storage
from halfstep.plan.subject import Subject
from halfstep.plan.target import target_of
from halfstep.plan.viewer import frames_of, snapshot_of, write_snapshot

BEFORE = (8 * MIB + 128 * 1024, MIB)


@pytest.fixture(scope="module")
def trace():
    return fake_step(Subject("digits"), "bf16", target_of())


def replayed(snapshot):
    """(bytes asked for, bytes reserved) after each event, and what is alive at the end by address."""
    alive, segments, sums = {}, {}, []
    for event in snapshot["device_traces"][0]:
        action, address, nbytes = event["action"], event["addr"], event["size"]
        if action == "segment_alloc":
            segments[address] = nbytes
        elif action == "segment_free":
            assert segments.pop(address) == nbytes
        elif action == "alloc":
            assert address not in alive
            assert any(start <= address < start + size for start, size in segments.items())
            alive[address] = nbytes
        elif action == "free_completed":
            assert alive.pop(address) == nbytes
        else:
            assert action == "free_requested"
            assert alive[address] == nbytes
        sums.append((sum(alive.values()), sum(segments.values())))
    return sums, alive


def test_its_events_add_up_to_the_peaks(trace):
    found = simulate(trace)
    sums, _ = replayed(snapshot_of(trace, found))
    assert max(asked for asked, _ in sums) == trace.peak.nbytes
    assert max(reserved for _, reserved in sums) == found.peak_reserved
    found = simulate(trace, before=BEFORE)
    sums, _ = replayed(snapshot_of(trace, found))
    assert max(asked for asked, _ in sums) == trace.peak.nbytes + sum(BEFORE)


def test_its_segments_are_the_state_at_the_end(trace):
    found = simulate(trace, before=BEFORE)
    snapshot = snapshot_of(trace, found)
    _, alive = replayed(snapshot)
    ends = {}
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            address += block["size"]
            if block["state"] == "active_allocated":
                ends[block["address"]] = block["requested_size"]
        assert address == segment["address"] + segment["total_size"]
        used = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
        assert segment["allocated_size"] == segment["active_size"] == sum(block["size"] for block in used)
    assert ends == alive
    assert sum(alive.values()) == trace.at(trace.num_events).nbytes + sum(BEFORE)
    assert {segment["segment_type"] for segment in snapshot["segments"]} == {"small", "large"}


def test_torch_reads_it(trace):
    found = simulate(trace, before=BEFORE)
    snapshot = snapshot_of(trace, found)
    summary = _memory_viz.segsum(snapshot)
    assert f"segments: {len(found.segments)}\n" in summary
    assert f"total_reserved: {_memory_viz.Bytes(found.peak_reserved)}\n" in summary
    num_blocks = sum(block is not None for block in found.blocks) + len(BEFORE)
    text = _memory_viz.trace(snapshot)
    assert text.count("cudaMalloc(") == len(found.segments)
    assert text.count("[") == num_blocks
    for page in (_memory_viz.trace_plot(snapshot), _memory_viz.segment_plot(snapshot)):
        assert "snapshot.pickle" in page
    folded = _memory_viz.memory(snapshot, format_flamegraph=lambda lines: lines)
    assert "halfstep plan:0:optimizer states" in folded
    assert "<non-python>" in folded  # what lies free has no frames


def test_every_storage_is_named(trace):
    snapshot = snapshot_of(trace, simulate(trace))
    allocs = [event for event in snapshot["device_traces"][0] if event["action"] == "alloc"]
    names = {frame["name"] for event in allocs for frame in event["frames"]}
    assert {"weights", "optimizer states", "activations", "gradients"} <= names
    assert {"aten.convolution.default", "aten.mm.default"} <= names
    modules = {f"module {storage.module}" for storage in trace.storages if storage.module}
    assert modules
    assert modules <= names
    files = {frame["filename"] for event in allocs for frame in event["frames"]}
    assert {storage.file for storage in trace.storages if storage.file} <= files
    assert {event["category"] for event in allocs} <= set(COMPONENTS)


def test_frames_go_from_what_it_is_to_where_it_was_made():
    made = Storage(8, "activations", "forward", "aten.mm.default", "", "net.py", 7, 1, 2)
    assert [(f["name"], f["filename"], f["line"]) for f in frames_of(made)] == [
        ("activations", "halfstep plan", 0),
        ("aten.mm.default", "halfstep plan", 0),
        ("the model itself", "halfstep plan", 0),
        ("called here", "net.py", 7),
    ]
    there = Storage(8, "weights", None, None, None, None, None, 0, None)
    assert [f["name"] for f in frames_of(there)] == ["weights"]


def test_the_page_finds_a_category_called_unknown(trace):
    """Its script fails without one as soon as any event has a category."""
    events = snapshot_of(trace, simulate(trace))["device_traces"][0]
    assert {event["category"] for event in events if event["action"] == "segment_alloc"} == {"unknown"}


def test_a_retry_shows_as_a_segment_given_back():
    trace = trace_of((11 * MIB, 1, 3), (11 * MIB, 2, 5), (13 * MIB, 4, 6))
    snapshot = snapshot_of(trace, simulate(trace, 28 * MIB))
    actions = [event["action"] for event in snapshot["device_traces"][0]]
    assert actions.count("segment_free") == 1
    assert actions.index("segment_free") + 1 == len(actions) - 1 - actions[::-1].index("segment_alloc")
    sums, alive = replayed(snapshot)
    assert max(reserved for _, reserved in sums) == 28 * MIB
    assert [segment["total_size"] for segment in snapshot["segments"]] == [14 * MIB, 14 * MIB]
    assert alive == {}


def test_an_empty_step_is_an_empty_snapshot():
    trace = trace_of((0, 0, None))
    assert snapshot_of(trace, simulate(trace))["device_traces"] == [[]]


def test_the_file_is_one_that_the_page_opens(trace, tmp_path):
    found = simulate(trace)
    file = tmp_path / "step.pickle"
    write_snapshot(trace, found, file)
    data = file.read_bytes()
    assert pickle.loads(data) == snapshot_of(trace, found)
    assert data[1] == 4  # the protocol: MemoryViz.js takes 2 to 4
    # The opcodes that the script of the page knows.
    known = {
        *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET"),
        *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "SETITEM", "SETITEMS"),
        *("APPEND", "APPENDS", "BININT", "BININT1", "BININT2", "LONG1", "NONE", "NEWTRUE", "NEWFALSE"),
        *("SHORT_BINUNICODE", "BINUNICODE"),
    }
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= known
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_cannot_be_written_is_one_line(trace, tmp_path, monkeypatch):
    found = simulate(trace)
    with pytest.raises(HalfstepError, match=r"output file .*cannot be written"):
        write_snapshot(trace, found, tmp_path / "none" / "step.pickle")
    file = tmp_path / "step.pickle"
    file.write_bytes(b"before")

    def fails(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("halfstep.files.os.replace", fails)
    with pytest.raises(HalfstepError, match="No space left"):
        write_snapshot(trace, found, file)
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file]


def test_it_needs_no_torch():
    code = "import halfstep.plan.viewer, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
