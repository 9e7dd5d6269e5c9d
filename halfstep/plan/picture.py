"""The picture of a plan: memory over the step, stacked by component, the policies side by side on one scale.

A Plotly figure; colours of text and rules are the page's, which knows whether it is light or dark.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfstep.page import chart_text
from halfstep.plan.holders import grouped, maker_text, module_patterns, peak_phase, phase_peaks, phase_text, sections
from halfstep.plan.size import GIB, MIB, size_text
from halfstep.plan.step_trace import COMPONENTS, StepTrace, Storage
from halfstep.report import Figure

NUM_POINTS = 600
"""Points of a trace that are drawn at most."""
NUM_NAMED = 3
"""Groups of modules that are named for a peak, and components for a point."""

# What is there all the time in blue and grey, what a pass leaves in strong colours, what it drops again beside them.
_COLORS = {
    "weights": "#39699f",
    "buffers": "#7d8896",
    "master weights": "#8a78dd",
    "optimizer states": "#6fa3d8",
    "gradients": "#12a07a",
    "inputs": "#a9b2bd",
    "16-bit weights": "#b58fd6",
    "activations": "#e0871b",
    "forward temporaries": "#f3c37c",
    "backward temporaries": "#d2542c",
    "step temporaries": "#cc6fa6",
}
_VISIBLE = 0.004
"""Share of the height of the chart that is one pixel or so."""
_MOST_PARTS = 17
"""Forward and backward passes and the step that are marked off from each other; more would be a hatching."""
_GAP = 0.035
_HEIGHT, _TOP, _BOTTOM = 440, 34, 100


@dataclass(frozen=True)
class Curve:
    """A trace at some of its times: bytes at each, for each component that ever holds any."""

    times: Sequence[int]
    components: Mapping[str, Sequence[int]]

    @property
    def totals(self) -> list[int]:
        return [sum(at) for at in zip(*self.components.values(), strict=True)]

    def highest(self, component: str) -> int:
        return max(self.components.get(component, ()), default=0)


def curve_of(trace: StepTrace, num_points: int = NUM_POINTS) -> Curve:
    """``trace`` at ``num_points`` of its times at most, each exact, the peak of each phase among them.

    The others are where the memory is lowest and highest in spans of equal length.
    """
    size = trace.num_events + 1
    changes: dict[str, list[int]] = {}
    for s in trace.storages:
        of = changes.setdefault(s.component, [0] * size)
        of[s.born] += s.nbytes
        if s.died is not None:
            of[s.died] -= s.nbytes
    held = {name: list(itertools.accumulate(changes[name])) for name in COMPONENTS if name in changes}
    times: Sequence[int] = range(size)
    if size > num_points:
        totals = [nbytes for _, nbytes in trace.totals()]
        kept = {0, trace.num_events, trace.peak.time, *(peak.moment.time for peak in phase_peaks(trace))}
        kept |= {start for _, start, _ in sections(trace)[: num_points // 4]}
        num_spans = max(1, (num_points - len(kept)) // 2)
        for at in range(num_spans):
            span = range(at * size // num_spans, (at + 1) * size // num_spans)
            kept |= {min(span, key=totals.__getitem__), max(span, key=totals.__getitem__)}
        times = sorted(kept)
    shown = {name: [of[time] for time in times] for name, of in held.items() if any(of)}
    return Curve(times, shown)


def memory_figure(traces: Sequence[StepTrace]) -> Figure:
    """Memory over the step of each trace, side by side, the first one's peak drawn through all."""
    assert traces, "a picture of at least one trace"
    highest = max(trace.peak.nbytes for trace in traces)
    unit, name = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    curves = [curve_of(trace) for trace in traces]
    # A component that nobody could see has its area and its hover text, but no place in the legend.
    first_shown = {
        component: next((at for at, curve in enumerate(curves) if curve.highest(component) > _VISIBLE * highest), None)
        for component in COMPONENTS
    }
    data: list[dict[str, Any]] = []
    layout = _layout(len(traces), 1.2 * highest / unit, name)
    for at, (trace, curve) in enumerate(zip(traces, curves, strict=True)):
        axis = f"x{at + 1 if at else ''}"
        for component, held in curve.components.items():
            area = _area(component, curve.times, [_short(nbytes / unit) for nbytes in held])
            data.append(area | {"xaxis": axis, "stackgroup": axis, "showlegend": first_shown[component] == at})
        data.append(_hover(trace, curve, unit) | {"xaxis": axis})
        data.append(_peak_mark(trace, unit) | {"xaxis": axis})
        layout["xaxis" + axis[1:]] = _time_axis(trace, at, len(traces))
        parts = sections(trace)
        layout["shapes"] += [_boundary(start, axis) for _, start, _ in parts[1:] if len(parts) <= _MOST_PARTS]
        layout["annotations"] += [_title(trace, axis), _peak_label(trace, unit, axis)]
    if len(traces) > 1:
        layout["shapes"].append(_level(traces[0].peak.nbytes / unit))
    return Figure("Memory over the step", _note(traces), data, layout)


def _area(component: str, times: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    return {
        "name": component,
        "legendgroup": component,
        "x": list(times),
        "y": values,
        "mode": "lines",
        "line": {"width": 0, "shape": "hv"},
        "fillcolor": _COLORS[component],
        "hoverinfo": "skip",
    }


def _hover(trace: StepTrace, curve: Curve, unit: int) -> dict[str, Any]:
    """The upper edge, which tells of each point what is held and what happened."""
    totals = curve.totals
    events: dict[int, tuple[str, Storage]] = {}
    for s in trace.storages:
        events[s.born] = ("+", s)
        if s.died is not None:
            events[s.died] = ("-", s)
    phases = {time: phase for phase, start, end in sections(trace) for time in range(start, end + 1)}
    texts = []
    for at, time in enumerate(curve.times):
        held = sorted(((of[at], name) for name, of in curve.components.items()), reverse=True)[:NUM_NAMED]
        lines = [f"<b>{size_text(totals[at])}</b>, {phases.get(time, 'before the step')}"]
        if time and time in events:
            sign, storage = events[time]
            place = maker_text(storage) or storage.component
            lines.append(f"{sign}{size_text(storage.nbytes)} {chart_text(place)}")
        lines += [f"{name} {size_text(nbytes)}" for nbytes, name in held if nbytes]
        texts.append("<br>".join(lines))
    return {
        "x": list(curve.times),
        "y": [_short(total / unit) for total in totals],
        "text": texts,
        "hovertemplate": "%{text}<extra></extra>",
        "mode": "lines",
        "line": {"width": 1.2, "shape": "hv", "color": "var(--ink)"},
        "showlegend": False,
    }


def _peak_mark(trace: StepTrace, unit: int) -> dict[str, Any]:
    marker = {"size": 9, "color": "var(--bad)", "line": {"width": 2, "color": "var(--card)"}}
    point = {"x": [trace.peak.time], "y": [_short(trace.peak.nbytes / unit)], "mode": "markers", "marker": marker}
    return point | {"showlegend": False, "hoverinfo": "skip", "cliponaxis": False}


def _peak_label(trace: StepTrace, unit: int, axis: str) -> dict[str, Any]:
    maker = trace.born_at(trace.peak.time)
    words = [f"<b>{size_text(trace.peak.nbytes)}</b>"]
    if maker is not None and maker.op is not None:
        operation, _, place = maker_text(maker).partition(" ")
        words += [chart_text(part if len(part) <= 34 else part[:33] + "…") for part in (operation, place) if part]
    share = trace.peak.time / max(1, trace.num_events)
    side = "left" if share < 0.35 else "right" if share > 0.65 else "center"
    place_at = {"x": trace.peak.time, "xref": axis, "y": trace.peak.nbytes / unit, "yref": "y", "yanchor": "bottom"}
    words_in = {"text": "<br>".join(words), "align": side, "font": {"size": 12, "color": "var(--ink)"}}
    shift = {"left": 8, "right": -8, "center": 0}[side]
    box = {"bgcolor": "var(--card)", "borderpad": 2, "showarrow": False}
    return place_at | words_in | box | {"xanchor": side, "xshift": shift, "yshift": 6}


def _title(trace: StepTrace, axis: str) -> dict[str, Any]:
    name = trace.policy + "".join(f" + {technique}" for technique in trace.techniques)
    place = {"x": 0, "xref": f"{axis} domain", "xanchor": "left", "y": 1, "yref": "paper", "yanchor": "bottom"}
    words = {"text": f"<b>{chart_text(name if len(name) <= 40 else name[:39] + '…')}</b>"}
    return place | words | {"yshift": 8, "showarrow": False, "font": {"size": 14, "color": "var(--ink)"}}


def _time_axis(trace: StepTrace, at: int, count: int) -> dict[str, Any]:
    width = (1 - _GAP * (count - 1)) / count
    parts = sections(trace)
    # A short section has no room for its name; of many micro-batches, each phase is named where it first is.
    seen: set[str] = set()
    named = []
    for phase, start, end in parts:
        if phase not in seen and end - start >= 0.09 * trace.num_events:
            named.append((phase, (start + end) / 2))
            seen.add(phase)
    return {
        "domain": [_short(at * (width + _GAP)), _short(at * (width + _GAP) + width)],
        "anchor": "y",
        "range": [0, trace.num_events],
        "tickvals": [middle for _, middle in named],
        "ticktext": [phase for phase, _ in named],
        "ticks": "",
        "showgrid": False,
        "zeroline": False,
        "linecolor": "var(--rule)",
    }


def _boundary(time: int, axis: str) -> dict[str, Any]:
    line = {"color": "var(--soft)", "width": 1, "dash": "2px,3px"}
    return {"type": "line", "xref": axis, "yref": "paper", "x0": time, "x1": time, "y0": -0.03, "y1": 1, "line": line}


def _level(height: float) -> dict[str, Any]:
    line = {"color": "var(--bad)", "width": 1.2, "dash": "6px,4px"}
    return {"type": "line", "xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": height, "y1": height, "line": line}


def _layout(count: int, top: float, unit: str) -> dict[str, Any]:
    return {
        "height": _HEIGHT,
        "margin": {"l": 12, "r": 12, "t": _TOP, "b": _BOTTOM},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "y": -0.12, "yanchor": "top", "traceorder": "normal"},
        "yaxis": {
            "title": {"text": unit, "standoff": 8},
            "range": [0, _short(top)],
            "automargin": True,
            "zeroline": False,
        },
        "shapes": [],
        "annotations": [],
    }


def _note(traces: Sequence[StepTrace]) -> str:
    sentences = ["Each event is the birth or death of a block of memory."]
    for trace in traces:
        patterns = module_patterns({s.module for s in trace.storages if s.module})
        by_module: dict[str, int] = {}
        for holder in grouped(trace.alive(trace.peak.time), patterns):
            if holder.module is not None:
                name = holder.module or "the model itself"
                by_module[name] = by_module.get(name, 0) + holder.nbytes
        named = sorted(by_module.items(), key=lambda item: -item[1])[:NUM_NAMED]
        most = ", ".join(f"{module} ({size_text(nbytes)})" for module, nbytes in named)
        peak = f"{trace.policy}: {size_text(trace.peak.nbytes)} in the {phase_text(peak_phase(trace))}"
        sentences.append(f"{peak}{f'; of the modules, most is held by {most}' if most else ''}.")
    if len(traces) > 1:
        sentences.append(f"The dashed line is the peak of {traces[0].policy}.")
    return " ".join(sentences)


def _short(value: float) -> float:
    """Six digits are what a chart can show; they halve the page."""
    return float(f"{value:.6g}")
