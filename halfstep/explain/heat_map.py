"""The heat map of ranges: modules by exponent, with the limits of the format drawn in, as a Plotly figure.

Colours are the page's, which knows whether it is light or dark.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from halfstep.explain.module_range import SCALED, ModuleRange
from halfstep.formats import FORMATS, Format
from halfstep.page import chart_text
from halfstep.report import Figure

_LOWEST = -3
"""log10 of the smallest share, in percent, that has a colour of its own."""
_TAIL = 12
"""Bins drawn below the lowest limit; what is smaller still shares the last one."""
_COLORS = ((0.0, "var(--heat-low)"), (0.6, "var(--heat-middle)"), (1.0, "var(--heat-high)"))


def heat_map(title: str, rows: Sequence[ModuleRange]) -> Figure:
    """The histograms of ``rows``, all of one kind, in percent of the non-zero values of each."""
    format, is_own = _format_of(rows)
    power = max(round(math.log2(row.scale)) for row in rows)
    # From the lowest row of labels up.
    sets = [(_limits(format, 0), "unscaled", "dot")] if power and is_own else []
    words = f"scale 2<sup>{power}</sup>" if power else ""
    sets.append((_limits(format, power), words, "solid") if is_own else (_limits(format, 0), format.name, "dot"))
    limits = [limit for limits, _, _ in sets for limit in limits.values()]
    low = max(min(min(row.histogram.exponents) for row in rows), math.floor(min(limits)) - _TAIL)
    high = max(max(row.histogram.exponents) for row in rows)
    span = (min(low, *limits) - 1, max(high + 1, *limits) + 1)
    layout = _layout(rows, span, len(sets))
    for level, (own, words, dash) in enumerate(sets):
        layout["shapes"] += [_line(at, name, dash) for name, at in own.items()]
        layout["annotations"] += [_label(at, name, level) for name, at in own.items()]
        layout["annotations"].append(_row_label(words, level))
    in_force = sets[-1][0]
    layout["shapes"] += [_shade(span[0], in_force["zero"]), _shade(in_force["max"], span[1])] if is_own else []
    return Figure(title, _text(rows, format, is_own), [_cells(rows, range(low, high + 1))], layout)


def _format_of(rows: Sequence[ModuleRange]) -> tuple[Format, bool]:
    """The format whose limits are drawn, and whether it is that of most rows.

    The limits of bf16 and fp32 are far from all values, so that those of fp16 stand there for comparison.
    """
    name = Counter(row.format for row in rows).most_common(1)[0][0]
    return (FORMATS[name], True) if FORMATS[name].max < 1e10 else (FORMATS["fp16"], False)


def _limits(format: Format, power: int) -> dict[str, float]:
    """Where values go to zero, become subnormal and overflow, as exponents before they are scaled by 2^power."""
    return {
        "zero": math.log2(format.smallest_subnormal) - 1 - power,
        "subnormal": math.log2(format.tiny) - power,
        "max": math.log2(format.max) - power,
    }


def _cells(rows: Sequence[ModuleRange], bins: range) -> dict[str, Any]:
    shares: list[list[float | None]] = []
    texts = []
    for row in rows:
        counts = Counter[int]()
        for exponent, count in row.histogram.exponents.items():
            counts[max(exponent, bins[0])] += count
        total = row.histogram.num_nonzero
        shares.append([round(math.log10(100 * counts[e] / total), 2) if counts[e] else None for e in bins])
        name = chart_text(row.module or "(the model)")
        texts.append([f"{name}<br>{_bin(e, bins)}: {counts[e]:,} of {total:,}" if counts[e] else "" for e in bins])
    ticks = list(range(_LOWEST, 3))
    return {
        "type": "heatmap",
        "x": [e + 0.5 for e in bins],
        "y": list(range(len(rows))),
        "z": shares,
        "text": texts,
        "hovertemplate": "%{text}<extra></extra>",
        "hoverongaps": False,
        "xgap": 1,
        "ygap": 1,
        "zmin": _LOWEST,
        "zmax": 2,
        "colorscale": _COLORS,
        "colorbar": {
            "thickness": 10,
            "outlinewidth": 0,
            "len": min(260, _height(rows) * len(rows)),
            "lenmode": "pixels",
            "y": 1,
            "yanchor": "top",
            "tickvals": ticks,
            "ticktext": [f"{10.0**tick:g} %" for tick in ticks],
        },
    }


def _bin(exponent: int, bins: range) -> str:
    if exponent == bins[0]:
        return f"below 2<sup>{exponent + 1}</sup>"
    return f"2<sup>{exponent}</sup> to 2<sup>{exponent + 1}</sup>"


def _height(rows: Sequence[ModuleRange]) -> int:
    """Of a row, in pixels; very many share the height of a long page."""
    return max(24, 110 // len(rows)) if len(rows) <= 12 else 15 if len(rows) <= 150 else max(3, 2400 // len(rows))


def _layout(rows: Sequence[ModuleRange], span: tuple[float, float], levels: int) -> dict[str, Any]:
    height = _height(rows)
    every = math.ceil(12 / height)
    step = 5 if span[1] - span[0] < 90 else 10
    ticks = range(math.ceil(span[0] / step) * step, math.floor(span[1]) + 1, step)
    top = 8 + 17 * levels
    return {
        "height": top + 58 + height * len(rows),
        "margin": {"l": 12, "r": 12, "t": top, "b": 12},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "xaxis": {
            "title": {"text": "magnitude of a value", "standoff": 8, "font": {"size": 13}},
            "range": list(span),
            "tickvals": list(ticks),
            "ticktext": [f"2<sup>{tick}</sup>" for tick in ticks],
            "showgrid": False,
            "zeroline": False,
            "automargin": True,
        },
        "yaxis": {
            "range": [len(rows) - 0.5, -0.5],
            "tickvals": list(range(0, len(rows), every)),
            "ticktext": [_short(row.module or "(the model)") for row in rows[::every]],
            "tickfont": {"size": 12 if height > 15 else 11},
            "ticks": "",
            "showgrid": False,
            "zeroline": False,
            "automargin": True,
        },
        "shapes": [],
        "annotations": [],
    }


def _paint(name: str) -> str:
    return "var(--open)" if name == "subnormal" else "var(--bad)"


def _line(at: float, name: str, dash: str) -> dict[str, Any]:
    line = {"color": _paint(name), "width": 1.5, "dash": dash}
    return {"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def _label(at: float, name: str, level: int) -> dict[str, Any]:
    place = {"x": at, "y": 1, "yref": "paper", "yanchor": "bottom", "yshift": 17 * level, "showarrow": False}
    return place | {"text": name, "font": {"size": 12, "color": _paint(name)}}


def _row_label(words: str, level: int) -> dict[str, Any]:
    """What a row of labels is of, in the column of the modules' names."""
    place = {"x": 0, "xref": "paper", "xanchor": "right", "xshift": -4, "y": 1, "yref": "paper", "yanchor": "bottom"}
    return place | {"yshift": 17 * level, "showarrow": False, "text": words, "font": {"size": 12}}


def _shade(x0: float, x1: float) -> dict[str, Any]:
    place = {"type": "rect", "x0": x0, "x1": x1, "yref": "paper", "y0": 0, "y1": 1}
    return place | {"fillcolor": "var(--bad)", "opacity": 0.08, "line": {"width": 0}, "layer": "below"}


def _short(name: str) -> str:
    """The end of a long name tells more than its beginning."""
    return chart_text(name if len(name) <= 34 else "…" + name[-33:])


def _text(rows: Sequence[ModuleRange], format: Format, is_own: bool) -> str:
    what = "Each row is a module, each cell the share of its non-zero values that have this magnitude"
    what += ", before scaling." if rows[0].kind in SCALED else "."
    if is_own:
        return f"{what} {format.name} rounds what is left of zero to zero, and what is right of max to infinity."
    return f"{what} The limits of {rows[0].format} are beyond this chart; those of fp16 stand there for comparison."
