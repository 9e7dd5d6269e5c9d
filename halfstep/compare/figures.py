"""The charts of a comparison as plain Plotly figures: dicts of ``data`` and ``layout``, ready for JSON.

A value that is not finite is never drawn as if it were one and never left out: it is a cross at its step. Nothing is
smoothed. Colours and line styles follow the order of the policies, so that one policy looks the same in every chart;
text and grid colours are the page's, which knows whether it is light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any

from halfstep.compare.report import CompareReport, PolicyReport, percent, quantity_text
from halfstep.compare.trial import Trial
from halfstep.page import chart_text

Figure = dict[str, Any]
Arms = Mapping[str, Sequence[Trial]]

REFERENCE_COLOR = "#7d8896"
# After Okabe and Ito (2008), which colour-blind readers can tell apart, at a lightness that shows on both grounds.
COLORS = ("#2b8cd6", "#e0871b", "#12a07a", "#cc6fa6", "#8a78dd", "#d2542c")
DASHES = ("solid", "solid", "5px,4px", "2px,3px", "9px,4px", "9px,3px,2px,3px", "12px,5px")
_NEUTRAL = "#8b95a1"


def color(index: int) -> str:
    """The colour of the policy at ``index``; the reference is grey."""
    return REFERENCE_COLOR if index == 0 else COLORS[(index - 1) % len(COLORS)]


def loss_figure(arms: Arms) -> Figure:
    """Mean and range of the seeds that are finite at a step, and a cross for each loss that is NaN or inf."""
    data: list[Figure] = []
    for index, (name, arm) in enumerate(arms.items()):
        steps = [
            [loss for loss in losses if loss is not None and math.isfinite(loss)]
            for losses in zip_longest(*(trial.losses for trial in arm))
        ]
        x, group = list(range(1, len(steps) + 1)), {"legendgroup": chart_text(name)}
        if len(arm) > 1:
            edge = {"x": x, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False, **group}
            data.append({**edge, "y": [_round(min(s, default=None)) for s in steps]})
            band = [_round(max(s, default=None)) for s in steps]
            data.append({**edge, "y": band, "fill": "tonexty", "fillcolor": color(index) + "2e"})
        data.append(
            {
                **_line(name, index),
                **group,
                "x": x,
                "y": [_round(fmean(s) if s else None) for s in steps],
                "customdata": [len(s) for s in steps],
                "hovertemplate": f"{chart_text(name)}: %{{y:.4g}}, mean of %{{customdata}}<extra></extra>",
            }
        )
    crosses = [_crosses(name, arm, index) for index, (name, arm) in enumerate(arms.items())]
    data += [trace for trace in crosses if trace["x"]]
    if any(trace["x"] for trace in crosses):
        data.append(_key("x", "not finite, or stopped"))
    finite = [loss for arm in arms.values() for t in arm for loss in t.losses if math.isfinite(loss)]
    log = bool(finite) and min(finite) > 0 and max(finite) > 30 * min(finite)
    layout = _layout(380, x="step", y="training loss" + (" (logarithmic)" if log else ""), legend=True)
    layout["xaxis"]["range"] = _steps(arms)
    layout["yaxis"]["type"] = "log" if log else "linear"
    layout["hovermode"] = "x"
    return {"data": data, "layout": layout}


def difference_figure(report: CompareReport, arms: Arms) -> Figure | None:
    """For each candidate the difference of every seed, their mean with its 90 % interval, and the margin as a band.

    None if no seed has a finite loss on both sides.
    """
    reference, *candidates = report.policies
    base = {trial.seed: trial.final_loss for trial in arms[reference.policy]}
    pairs = [
        [(t.seed, t.final_loss - base[t.seed]) for t in arms[policy.policy] if t.seed in base] for policy in candidates
    ]
    margin = next((p.verdict.margin for p in candidates if p.verdict.margin is not None), None)
    bounds = [v for p in candidates for v in (p.verdict.ci_low, p.verdict.ci_high) if v is not None]
    finite = [d for arm in pairs for _, d in arm if math.isfinite(d)]
    if not finite:
        return None
    reach = max(abs(value) for value in [*finite, *bounds, margin or 0.0])
    reach = reach or 1.0
    data: list[Figure] = []
    for index, (policy, arm) in enumerate(zip(candidates, pairs, strict=True), 1):
        verdict, paint, y = policy.verdict, color(index), -index
        dots = [(s, d) for s, d in arm if math.isfinite(d)]
        marks = {"mode": "markers", "showlegend": False, "hovertemplate": "%{text}<extra></extra>"}
        data.append(
            {
                **marks,
                "x": [_round(d) for _, d in dots],
                "y": [y + 0.2 for _ in dots],
                "text": [f"seed {s}: {d:+.4g}" for s, d in dots],
                "marker": {"color": paint, "size": 10, "opacity": 0.55},
            }
        )
        failed = [s for s, d in arm if not math.isfinite(d)]
        data.append(
            {
                **marks,
                "x": [_round(1.12 * reach) for _ in failed],
                "y": [y + 0.2 - 0.12 * i for i in range(len(failed))],
                "text": [f"seed {s} has no difference: it diverged" for s in failed],
                "marker": {"color": paint, "size": 11, "symbol": "x"},
            }
        )
        if verdict.gap is not None and verdict.ci_low is not None and verdict.ci_high is not None:
            ends = {"array": [verdict.ci_high - verdict.gap], "arrayminus": [verdict.gap - verdict.ci_low]}
            data.append(
                {
                    **marks,
                    "x": [verdict.gap],
                    "y": [y - 0.12],
                    "error_x": {
                        "type": "data",
                        "symmetric": False,
                        "color": paint,
                        "thickness": 2.5,
                        "width": 7,
                        **ends,
                    },
                    "text": [f"gap {verdict.gap:+.4g}, 90 % [{verdict.ci_low:+.4g}, {verdict.ci_high:+.4g}]"],
                    "marker": {"color": paint, "size": 13, "symbol": "diamond"},
                }
            )
    layout = _layout(
        130 + 90 * len(candidates), x=f"final loss minus {chart_text(reference.policy)}'s, same seed", y=""
    )
    layout["xaxis"] |= {"range": [-1.22 * reach, 1.22 * reach], "zeroline": True, "zerolinewidth": 1.5}
    layout["yaxis"] |= {
        "tickvals": [-index for index in range(1, len(candidates) + 1)],
        "ticktext": [_short(policy.policy) for policy in candidates],
        "range": [-len(candidates) - 0.6, -0.4],
        "showgrid": False,
    }
    if margin:
        layout["margin"]["t"] = 28
        layout["shapes"] = [
            {"type": "rect", "xref": "x", "yref": "paper", "x0": -margin, "x1": margin, "y0": 0, "y1": 1}
            | {"fillcolor": _NEUTRAL + "2b", "line": {"width": 0}, "layer": "below"}
        ]
        layout["annotations"] = [
            {"text": f"margin ±{margin:.3g}", "x": 0, "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False}
        ]
    return {"data": data, "layout": layout}


def scale_figure(arms: Arms) -> Figure | None:
    """The loss scale of every seed, with the steps that were skipped or replayed; None if there is nothing to see."""
    shown = {
        name: arm
        for name, arm in arms.items()
        if any(t.steps_skipped or t.num_replays or any(scale != 1 for scale in t.scales) for t in arm)
    }
    if not shown:
        return None
    data: list[Figure] = []
    for index, (name, arm) in enumerate(arms.items()):
        for number, trial in enumerate(arm if name in shown else ()):
            line = _line(name, index) | {"showlegend": number == 0, "legendgroup": chart_text(name), "opacity": 0.75}
            line["line"] = line["line"] | {"shape": "hv", "width": 1.5, "dash": "solid", "color": color(index)}
            hover = f"{chart_text(name)}, seed {trial.seed}, step %{{x}}: %{{y:g}}"
            steps = list(range(1, len(trial.scales) + 1))
            data.append(
                line
                | {
                    "x": steps,
                    "y": list(trial.scales),
                }
                | _hover(hover)
            )
            skipped = [step for step, applied in enumerate(trial.applied, 1) if not applied]
            replayed = [step for step, replays in enumerate(trial.replays, 1) if replays]
            for what, at, symbol in (("skipped", skipped, "x"), ("replayed", replayed, "circle-open")):
                marker = _mark(symbol, color(index))
                points = {"x": at, "y": [trial.scales[step - 1] for step in at], "mode": "markers", "marker": marker}
                data.append(
                    points | {"showlegend": False, "legendgroup": chart_text(name)} | _hover(f"{hover}, {what}")
                )
    data += [_key("x", "skipped"), _key("circle-open", "replayed")]
    exponents = [math.log2(scale) for arm in shown.values() for t in arm for scale in t.scales if scale > 0]
    low, high = math.floor(min(exponents, default=0)), math.ceil(max(exponents, default=0))
    powers = range(low, high + 1, max(1, (high - low) // 6))
    layout = _layout(320, x="step", y="loss scale", legend=True)
    layout["xaxis"]["range"] = _steps(arms)
    layout["yaxis"] |= {
        "type": "log",
        "tickvals": [2.0**p for p in powers],
        "ticktext": [f"2<sup>{p}</sup>" for p in powers],
    }
    return {"data": data, "layout": layout}


def memory_figure(policies: Sequence[PolicyReport]) -> Figure | None:
    """Peak memory of each policy, and the change against the reference."""
    changes = [policy.memory_saving_pct for policy in policies]
    notes = [percent(-change) if change is not None else "" for change in changes]
    return _bars(policies, [policy.peak_memory_mib for policy in policies], notes, "peak memory (MiB)")


def speed_figure(policies: Sequence[PolicyReport]) -> Figure | None:
    """Samples a second of each policy, and the ratio to the reference."""
    notes = [f"{policy.speedup:.2f}x" if policy.speedup is not None else "" for policy in policies]
    return _bars(policies, [policy.samples_per_s for policy in policies], notes, "throughput (samples/s)")


def _bars(
    policies: Sequence[PolicyReport], values: Sequence[float | None], notes: Sequence[str], title: str
) -> Figure | None:
    known = [i for i, value in enumerate(values) if value is not None]
    if not known:
        return None
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": [_round(values[i]) for i in known],
        "y": [-i for i in known],
        "text": [quantity_text(values[i]) + (f" ({notes[i]})" if i and notes[i] else "") for i in known],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": [color(i) for i in known]},
        "width": 0.62,
        "hoverinfo": "skip",
    }
    layout = _layout(110 + 44 * len(known), x=title, y="")
    layout["yaxis"] |= {"tickvals": [-i for i in known], "ticktext": [_short(policies[i].policy) for i in known]}
    layout["yaxis"]["showgrid"] = False
    layout["xaxis"] |= {"range": [0, 1.45 * max(value for value in values if value is not None)], "nticks": 5}
    return {"data": [bars], "layout": layout}


def _crosses(name: str, arm: Sequence[Trial], index: int) -> Figure:
    """A cross at every step whose loss is not finite and at every early stop, at the height of the last finite loss."""
    x, y, text = [], [], []
    fallback = next((loss for t in arm for loss in t.losses if math.isfinite(loss)), 1.0)
    for trial in arm:
        height, label = fallback, f"{chart_text(name)}, seed {trial.seed}, step"
        for step, loss in enumerate(trial.losses, 1):
            if math.isfinite(loss):
                height = loss
                continue
            x.append(step)
            y.append(_round(height))
            text.append(f"{label} {step}: {loss}")
        if trial.stopped is not None:
            x.append(len(trial.losses))
            y.append(_round(height))
            text.append(f"{label} {len(trial.losses)}: stopped, {chart_text(trial.stopped)}")
    trace = {"x": x, "y": y, "text": text, "mode": "markers", "marker": _mark("x", color(index)), "showlegend": False}
    return trace | {"legendgroup": chart_text(name)} | _hover("%{text}")


def _line(name: str, index: int) -> Figure:
    """The reference lies broad and pale under the others, so that a candidate on top of it shows both."""
    style = {"color": color(index), "width": 2, "dash": DASHES[index % len(DASHES)]}
    if index == 0:
        style |= {"color": color(0) + "99", "width": 6}
    return {"name": chart_text(name), "mode": "lines", "line": style}


def _steps(arms: Arms) -> list[float]:
    last = max((trial.steps for arm in arms.values() for trial in arm), default=1)
    return [-0.01 * last, 1.02 * last]


def _key(symbol: str, meaning: str) -> Figure:
    """An entry of the legend that explains a mark, whatever the policy."""
    return {"name": meaning, "x": [None], "y": [None], "mode": "markers", "marker": _mark(symbol, _NEUTRAL)}


def _mark(symbol: str, paint: str) -> Figure:
    return {"symbol": symbol, "size": 8, "color": paint, "line": {"width": 1.5 if symbol.endswith("open") else 0}}


def _hover(template: str) -> Figure:
    return {"hovertemplate": f"{template}<extra></extra>"}


def _layout(height: int, x: str, y: str, legend: bool = False) -> Figure:
    return {
        "height": height,
        "margin": {"l": 12, "r": 16, "t": 40 if legend else 12, "b": 12},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "xaxis": {"title": {"text": x, "standoff": 8}, "automargin": True, "zeroline": False},
        "yaxis": {"title": {"text": y, "standoff": 8}, "automargin": True, "zeroline": False},
    }


def _short(name: str) -> str:
    """A policy's name for an axis, where a long one would leave no room for the chart."""
    return chart_text(name if len(name) <= 16 else name[:15].rstrip() + "…")


def _round(value: float | None) -> float | None:
    """Six digits are what a chart can show; they halve the page."""
    return None if value is None else float(f"{value:.6g}")
