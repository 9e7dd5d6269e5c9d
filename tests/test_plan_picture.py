"""The picture of a plan: what is drawn is what the steps hold."""

import json
from dataclasses import replace

import pytest
from reference.planted_steps import alive_bytes, block, drawn_step, fake, step

from halfstep.plan.holders import phase_peaks, sections
from halfstep.plan.picture import _COLORS, curve_of, memory_figure
from halfstep.plan.size import MIB, size_text
from halfstep.plan.step_trace import COMPONENTS


def areas(figure, axis="x"):
    return [trace for trace in figure.data if trace.get("stackgroup") == axis]


@pytest.mark.parametrize("num_points", [10, 40, 600])
@pytest.mark.parametrize("seed", range(3))
def test_every_point_is_exact(seed, num_points):
    trace = drawn_step(seed, 60)
    curve = curve_of(trace, num_points)
    assert len(curve.times) <= num_points
    for at, time in enumerate(curve.times):
        held = {name: of[at] for name, of in curve.components.items() if of[at]}
        assert held == {name: nbytes for name, nbytes in alive_bytes(trace, time).items() if nbytes}
        assert curve.totals[at] == trace.at(time).nbytes


def test_a_long_step_keeps_its_extremes():
    trace = drawn_step(1, 500)
    curve = curve_of(trace, 100)
    always = {0, trace.num_events, trace.peak.time}
    always |= {peak.moment.time for peak in phase_peaks(trace)} | {start for _, start, _ in sections(trace)}
    assert always <= set(curve.times)
    assert list(curve.times) == sorted(set(curve.times))
    # What is left of the hundred is two points for each of so many spans.
    totals = [nbytes for _, nbytes in trace.totals()]
    num_spans = (100 - len(always)) // 2
    for at in range(num_spans):
        first, last = at * len(totals) // num_spans, (at + 1) * len(totals) // num_spans
        drawn = [total for time, total in zip(curve.times, curve.totals, strict=True) if first <= time < last]
        assert min(drawn) == min(totals[first:last])
        assert max(drawn) == max(totals[first:last])


def test_a_short_step_is_drawn_whole():
    trace = drawn_step(2, 20)
    assert list(curve_of(trace).times) == list(range(trace.num_events + 1))


@pytest.mark.parametrize("workload", ["mlp", pytest.param("charlm", marks=pytest.mark.slow)])
def test_the_areas_are_those_of_the_true_steps_on_one_scale(workload):
    traces = [fake(workload, policy, finds_growth=True) for policy in ("fp32", "bf16")]
    figure = memory_figure(traces)
    for trace, axis in zip(traces, ("x", "x2"), strict=True):
        drawn = areas(figure, axis)
        assert [area["name"] for area in drawn] == [n for n in COMPONENTS if n in {a["name"] for a in drawn}]
        for at in range(0, len(drawn[0]["x"]), 7):
            # Six digits of each area are drawn.
            total = sum(area["y"][at] for area in drawn) * MIB
            assert total == pytest.approx(trace.at(drawn[0]["x"][at]).nbytes, rel=5e-6)
        assert figure.layout["xaxis" + axis[1:]]["range"] == [0, trace.num_events]
    assert all("yaxis" not in trace for trace in figure.data)
    assert figure.layout["yaxis"]["range"][1] > traces[0].peak.nbytes / MIB
    level = figure.layout["shapes"][-1]
    assert level["xref"] == "paper"
    assert level["y0"] == level["y1"] == traces[0].peak.nbytes / MIB
    json.dumps([figure.data, figure.layout], allow_nan=False)


def test_the_peak_is_marked_with_its_bytes_and_its_maker():
    trace = fake("charlm", finds_growth=True)
    figure = memory_figure([trace])
    mark = next(each for each in figure.data if each["mode"] == "markers")
    assert mark["x"] == [trace.peak.time]
    assert mark["y"][0] == pytest.approx(trace.peak.nbytes / MIB, rel=1e-5)
    label = next(each for each in figure.layout["annotations"] if each.get("yref") == "y")
    assert size_text(trace.peak.nbytes) in label["text"]
    assert "aten._log_softmax_backward_data<br>outside the model (charlm.py:" in label["text"]
    assert "blocks.*" in figure.note
    # One trace has nothing to be compared with.
    assert all(shape.get("xref") != "paper" for shape in figure.layout["shapes"])
    assert "dashed" not in figure.note


def test_a_point_tells_what_happened():
    trace = step(
        block(3 * MIB, "weights", 0, None),
        block(MIB, "activations", 5, 150, "mm", "blocks.0.<up>"),
        block(2 * MIB, "step temporaries", 210, 220, "_foreach_sqrt"),
    )
    edge = next(each for each in memory_figure([trace]).data if "text" in each)
    told = dict(zip(edge["x"], edge["text"], strict=True))
    assert told[0] == "<b>3 MiB</b>, before the step<br>weights 3 MiB"
    assert told[5] == (
        "<b>4 MiB</b>, forward<br>+1 MiB aten.mm in blocks.0.&lt;up&gt;<br>weights 3 MiB<br>activations 1 MiB"
    )
    assert told[150] == "<b>3 MiB</b>, backward<br>-1 MiB aten.mm in blocks.0.&lt;up&gt;<br>weights 3 MiB"
    assert told[210].startswith("<b>5 MiB</b>, step<br>+2 MiB aten._foreach_sqrt<br>")


def test_the_legend_names_once_what_can_be_seen():
    small, empty = block(1, "inputs", 0, None), block(0, "buffers", 0, None)
    held = [block(MIB, "weights", 0, None), block(MIB, "activations", 5, 9, "mm", "m")]
    cast = block(MIB, "16-bit weights", 4, 9, "_to_copy", "m")
    figure = memory_figure([replace(step(small, *held), policy="fp32"), step(small, empty, *held, cast)])
    named = [(area["xaxis"], area["name"]) for area in figure.data if area["showlegend"]]
    assert named == [("x", "weights"), ("x", "activations"), ("x2", "16-bit weights")]
    assert "inputs" in {area["name"] for area in areas(figure)}
    assert "buffers" not in {area["name"] for area in areas(figure, "x2")}
    assert set(_COLORS) == set(COMPONENTS)
    assert len(set(_COLORS.values())) == len(COMPONENTS)


def test_phases_are_marked():
    trace = drawn_step(3)
    figure = memory_figure([trace])
    starts = [start for _, start, _ in sections(trace)]
    assert [shape["x0"] for shape in figure.layout["shapes"]] == starts[1:]
    assert set(figure.layout["xaxis"]["ticktext"]) <= {"forward", "backward", "step"}
    many = replace(trace, phases=tuple((("forward", "backward")[at % 2], 1 + at) for at in range(40)))
    assert memory_figure([many]).layout["shapes"] == []
