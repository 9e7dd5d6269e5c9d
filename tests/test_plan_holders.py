"""Who holds the memory: groups of modules, the phases of a step, and the tables made of them."""

import pytest
from reference.planted_steps import BACKWARD, FORWARD, STEP, alive_bytes, block, drawn_step, fake, step

from halfstep.plan.holders import (
    Holder,
    holders_of,
    holders_table,
    maker_text,
    module_patterns,
    peak_phase,
    peak_text,
    phase_peaks,
    phases_table,
    sections,
)
from halfstep.plan.size import size_text


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        (
            ["", "blocks.0", "blocks.0.attention.out", "blocks.11.attention.qkv", "head"],
            ["", "blocks.*", "blocks.*.attention", "blocks.*.attention", "head"],
        ),
        # The layers of a Sequential differ, and stay apart; in repeated blocks they are one part of the block.
        (["0", "1", "2"], ["0", "1", "2"]),
        (["stem.0", "stem.1", "body.0.ff.0", "body.1.ff.2"], ["stem.0", "stem.1", "body.*.ff", "body.*.ff"]),
        (["layers.0.blocks.0.mlp.fc", "layers.1.blocks.1.mlp.fc"], ["layers.*.blocks.*.mlp"] * 2),
        (["a.0.b.0.c.d", "a.0.b.1.c.d", "a.1.b.0.c.d", "a.1.b.1.c.d"], ["a.*.b.*.c"] * 4),
        # One block alone is not repeated.
        (["blocks.0.attention.out.norm"], ["blocks.0.attention"]),
    ],
)
def test_modules_are_grouped_where_they_repeat(names, patterns):
    assert list(module_patterns(names).values()) == patterns


def test_holders_are_the_groups_of_what_is_alive():
    trace = step(
        block(100, "weights", 0, None),
        block(40, "activations", 1, 150, "addmm", "blocks.0.up"),
        block(50, "activations", 2, 150, "addmm", "blocks.1.up"),
        block(60, "activations", 3, 150, "gelu", "blocks.1.up"),
        block(7, "activations", 4, 150, "mul", "blocks.1.up"),
        block(9, "forward temporaries", 5, 6, "mul", "blocks.1.up"),
    )
    assert holders_of(trace, 120) == [
        Holder("weights", None, None, None, 0, 1, 100),
        Holder("activations", "blocks.*.up", "aten.addmm.default", FORWARD, 2, 2, 90),
        Holder("activations", "blocks.*.up", "aten.gelu.default", FORWARD, 1, 1, 60),
        Holder("activations", "blocks.*.up", "aten.mul.default", FORWARD, 1, 1, 7),
    ]
    table = holders_table(trace, num_shown=3)
    assert table.rows[0] == ("weights", "-", "before the step", "1", size_text(100), "37.6 %")
    assert table.rows[1][1] == "blocks.*.up (2)"
    assert table.rows[2] == ("3 more groups", "", "", "3", size_text(60 + 7 + 9), "28.6 %")
    assert len(holders_table(trace, num_shown=5).rows) == 5


@pytest.mark.parametrize("seed", range(5))
def test_holders_leave_nothing_out(seed):
    trace = drawn_step(seed)
    for time in range(0, trace.num_events + 1, 7):
        holders = holders_of(trace, time)
        held = {}
        for holder in holders:
            held[holder.component] = held.get(holder.component, 0) + holder.nbytes
        assert held == alive_bytes(trace, time)
        assert [h.nbytes for h in holders] == sorted((h.nbytes for h in holders), reverse=True)


def test_a_step_ends_a_pass_only_after_the_last_backward():
    phases = (
        (STEP, 1),
        (FORWARD, 3),
        (STEP, 10),
        (BACKWARD, 12),
        (STEP, 20),
        (FORWARD, 22),
        (BACKWARD, 30),
        (STEP, 40),
    )
    parts = [(FORWARD, 1, 11), (BACKWARD, 12, 21), (FORWARD, 22, 29), (BACKWARD, 30, 39), (STEP, 40, 50)]
    trace = step(block(8, "gradients", 21, 45, "add", ""), phases=phases, num_events=50)
    assert sections(trace) == parts
    assert peak_phase(trace) == BACKWARD


def test_each_phase_has_its_peak():
    trace = step(
        block(100, "weights", 0, None),
        block(30, "activations", 5, 120, "mm", "head"),
        block(10, "forward temporaries", 6, 7, "exp", ""),
        block(20, "gradients", 110, 250, "mm", "head"),
        block(70, "step temporaries", 210, 220, "_foreach_sqrt"),
    )
    peaks = [(p.phase, p.moment.time, p.moment.nbytes, p.maker.nbytes) for p in phase_peaks(trace)]
    assert peaks == [(FORWARD, 6, 140, 10), (BACKWARD, 110, 150, 20), (STEP, 210, 190, 70)]
    assert peak_text(trace) == f"{size_text(190)} in the optimizer step, made by aten._foreach_sqrt"
    table = phases_table([trace])
    assert table.columns == (
        "policy",
        "phase",
        ">peak",
        ">weights",
        ">gradients",
        ">activations",
        ">temporaries",
        "made by",
    )
    assert [row[1] for row in table.rows] == [FORWARD, BACKWARD, STEP]
    assert table.rows[2][3:] == (size_text(100), size_text(20), "-", size_text(70), "aten._foreach_sqrt")


@pytest.mark.parametrize("seed", range(5))
def test_the_peaks_of_the_phases_are_those_of_all_their_times(seed):
    trace = drawn_step(seed)
    for peak in phase_peaks(trace):
        times = [time for phase, start, end in sections(trace) if phase == peak.phase for time in range(start, end + 1)]
        assert peak.moment.nbytes == max(sum(alive_bytes(trace, time).values()) for time in times)
        assert peak.moment.time in times


@pytest.mark.parametrize(
    ("storage", "text"),
    [
        (None, ""),
        (block(1, "weights", 0, None), ""),
        (block(1, "activations", 1, 2, "mm", "head"), "aten.mm in head"),
        (block(1, "activations", 1, 2, "mm", "", file="/a/net.py", line=7), "aten.mm in the model itself (net.py:7)"),
        (
            block(1, "activations", 1, 2, "mm", None, file="C:\\a\\net.py", line=7),
            "aten.mm outside the model (net.py:7)",
        ),
        (block(1, "step temporaries", 250, 251, "_foreach_sqrt", file="/a/net.py", line=7), "aten._foreach_sqrt"),
    ],
)
def test_what_made_a_storage_is_named(storage, text):
    assert maker_text(storage) == text


def test_the_holders_of_a_true_step():
    trace = fake("charlm", finds_growth=True)
    holders = holders_of(trace, trace.peak.time)
    assert sum(h.nbytes for h in holders) == trace.peak.nbytes
    largest = next(h for h in holders if h.module == "blocks.*.up" and h.component == "activations")
    # Two blocks, of 1,024 tokens x 256 numbers of 2 bytes each.
    assert (largest.op, largest.phase, largest.num_modules, largest.nbytes) == (
        "aten.addmm.default",
        FORWARD,
        2,
        2 * 1024 * 256 * 2,
    )
    assert [peak.phase for peak in phase_peaks(trace)] == [FORWARD, BACKWARD, STEP]
    assert next(start for _, start, _ in sections(trace)) == 1
    assert peak_phase(trace) == BACKWARD
