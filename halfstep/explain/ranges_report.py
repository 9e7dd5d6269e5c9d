"""The report of ``halfstep ranges``: its sentence, its tables, its JSON and its heat maps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfstep.diagnosis.advice import Advice, advice_table
from halfstep.explain.heat_map import heat_map
from halfstep.explain.histogram import Histogram, best_scale
from halfstep.explain.module_range import KINDS, SCALED, UPDATE, ModuleRange
from halfstep.formats import FORMATS, Format
from halfstep.report import Cell, Figure, Report, Sheet, Table

NUM_SHOWN = 20
_TITLES = dict(
    zip(KINDS, ("Activations", "Gradients of outputs", "Gradients of weights", "Weight updates"), strict=True)
)


@dataclass(frozen=True)
class RangesReport(Report):
    """What ``halfstep ranges`` returns.

    workload, policy, device, step: what was looked at. where: the step in words. scale: the loss scale there.
    best_scale:  the one that loses least of all gradients together; None without a gradient.
    modules:     one row a module and kind, in the model's order.
    gradients:   all gradients that the scale has to suit, each tensor once, with their formats.
    totals:      the histograms of all activations and of all gradients.
    is_finite:   whether the policy's own run was.
    fp32_is_finite: whether fp32's was; None if the model cannot run in it.
    notes:       what could not be measured.
    """

    workload: str
    policy: str
    device: str
    step: int
    where: str
    scale: float
    best_scale: float | None
    modules: tuple[ModuleRange, ...]
    gradients: tuple[tuple[Histogram, Format], ...]
    totals: Mapping[str, Histogram]
    is_finite: bool
    fp32_is_finite: bool | None
    advice: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Whether a value overflows, a share that matters is flushed to zero, or the run is not finite."""
        return not self.is_finite or any(row.overflows or row.flushes for row in self.modules)

    def to_dict(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "policy": self.policy,
            "device": self.device,
            "step": self.step,
            "scale": self.scale,
            "best_scale": self.best_scale,
            "found": self.found,
            "finite": self.is_finite,
            "finite_in_fp32": self.fp32_is_finite,
            "modules": [row.to_dict() for row in self.modules],
            "advice": [advice.to_dict() for advice in self.advice],
            "notes": list(self.notes),
        }

    def figures(self) -> Mapping[str, Figure]:
        shown = without_repeats(self.modules)
        figures = {}
        for kind in KINDS:
            if rows := [row for row in shown if row.kind == kind and row.histogram.num_nonzero]:
                figures[kind.replace(" ", "-")] = heat_map(_TITLES[kind], rows)
        return figures

    # The sheet.

    def sheet(self) -> Sheet:
        tables = [self._scale_table(), self._format_table()]
        tables += [self._kind_table(kind) for kind in KINDS if any(row.kind == kind for row in self.modules)]
        if self.advice:
            tables.append(advice_table(self.advice))
        ran = "fp32" if self.fp32_is_finite is not None else "that policy"
        facts = (
            f"{self.workload} in {self.policy} on {self.device}, {self.where}, loss scale {scale_text(self.scale)}."
            f" The values are those of the same micro-batch in {ran}."
        )
        return Sheet(self.headline, facts, tables, self.notes)

    @property
    def headline(self) -> str:
        if not self.is_finite and self.fp32_is_finite is False:
            return f"Not the precision: fp32 is not finite either at step {self.step}."
        rows = without_repeats(self.modules)
        over = [row for row in rows if row.overflows]
        if over:
            worst = min(over, key=lambda row: row.loss.headroom_bits or 0.0)
            largest, limit = worst.histogram.largest * worst.scale, FORMATS[worst.format].max
            return (
                f"The {worst.kind} of {_name(worst)} overflows {worst.format}{self._at(worst)}: it reaches"
                f" {largest:.3g}, and the largest number is {limit:.5g}.{_and_more(over)}"
            )
        flushed = [row for row in rows if row.flushes]
        if flushed:
            worst = max(flushed, key=lambda row: row.zero_pct)
            return (
                f"{worst.format} flushes {share_text(worst.zero_pct)} of the {worst.kind} of {_name(worst)} to zero"
                f"{self._at(worst)}.{_and_more(flushed)}"
            )
        if not self.is_finite:
            return (
                f"Every module's values fit, but the step is not finite in {self.policy}: it fails inside a module or"
                " in the loss function, which halfstep trace names."
            )
        fits = f"{self.workload} fits in {self.policy} at step {self.step}"
        return f"{fits}: nothing overflows, and nothing that matters is flushed to zero."

    def _at(self, row: ModuleRange) -> str:
        return f" at a loss scale of {scale_text(self.scale)}" if row.kind in SCALED else ""

    def _scale_table(self) -> Table:
        named = {"unscaled": 1.0, "now": self.scale, "best": self.best_scale}
        rows = []
        for scale in sorted({scale for scale in named.values() if scale is not None}):
            losses = [(histogram, histogram.loss(format, scale)) for histogram, format in self.gradients]
            count = sum(histogram.num_nonzero for histogram, _ in losses) or 1
            rooms = [loss.headroom_bits for _, loss in losses if loss.headroom_bits is not None]
            over = any(loss.overflows for _, loss in losses)
            rows.append(
                (
                    scale_text(scale),
                    ", ".join(name for name, value in named.items() if value == scale),
                    share_text(100 * sum(loss.flushed for _, loss in losses) / count),
                    share_text(100 * sum(loss.subnormal for _, loss in losses) / count),
                    Cell(_bits(min(rooms, default=None)), "bad" if over else ""),
                )
            )
        formats = " and ".join(dict.fromkeys(format.name for _, format in self.gradients)) or self.policy
        columns = (">loss scale", "which", ">flushed to zero", ">subnormal", ">headroom, bits")
        return Table(columns, rows, title=f"All gradients in {formats}, by loss scale")

    def _format_table(self) -> Table:
        activations, gradients = self.totals["activations"], self.totals["gradients"]
        rows = []
        for name in ("fp16", "bf16", "e5m2", "e4m3"):
            format, best = FORMATS[name], best_scale([(gradients, FORMATS[name])])
            forward = activations.loss(format)
            cells: list[str | Cell] = [name, share_text(activations.share(forward.flushed))]
            cells.append(Cell(_bits(forward.headroom_bits), "bad" if forward.overflows else ""))
            for scale in (1.0, best or 1.0):
                loss = gradients.loss(format, scale)
                cells += [share_text(gradients.share(loss.flushed)), share_text(gradients.share(loss.subnormal))]
            rows.append((*cells, "-" if best is None else scale_text(best)))
        columns = ["format", ">activations flushed", ">headroom, bits", ">gradients flushed", ">subnormal"]
        columns += [">flushed at best", ">subnormal at best", ">best scale"]
        return Table(columns, rows, title="If everything were held in one format")

    def _kind_table(self, kind: str) -> Table:
        rows = [row for row in without_repeats(self.modules) if row.kind == kind]
        shown = sorted(rows, key=_badness, reverse=True)[:NUM_SHOWN]
        is_scaled = kind in SCALED and self.scale != 1.0
        columns = ["module", "format", f">largest x {scale_text(self.scale)}" if is_scaled else ">largest"]
        columns += [">flushed unscaled", f">flushed at {scale_text(self.scale)}"] if is_scaled else [_ZERO[kind]]
        columns += [">subnormal", ">headroom, bits"] + ([">best scale"] if kind in SCALED else [])
        cells = [self._cells(row, is_scaled) for row in shown]
        rest = (
            f"The worst {len(shown)} of {len(rows)} modules; JSON and page have all. " if len(rows) > len(shown) else ""
        )
        return Table(columns, cells, title=_TITLES[kind], note=(rest + _note(kind, rows)).strip())

    def _cells(self, row: ModuleRange, is_scaled: bool) -> list[str | Cell]:
        cells: list[str | Cell] = [row.module or "(the model)", row.format if row.meets else f"({row.format})"]
        cells.append(f"{row.histogram.largest * row.scale:.2e}")
        if is_scaled:
            cells.append(share_text(row.histogram.share(row.unscaled.flushed)))
        cells.append(Cell(share_text(row.zero_pct), "bad" if row.flushes else ""))
        cells.append(share_text(row.histogram.share(row.loss.subnormal)))
        cells.append(Cell(_bits(row.loss.headroom_bits), "bad" if row.overflows else ""))
        if row.kind in SCALED:
            cells.append("-" if row.best_scale is None else scale_text(row.best_scale))
        return cells


_ZERO = dict.fromkeys(KINDS, ">flushed to zero") | {UPDATE: ">lost"}


def _note(kind: str, rows: Sequence[ModuleRange]) -> str:
    if kind == UPDATE:
        return "Lost: it would move no weight, if weights were kept in this format instead of fp32."
    if any(not row.meets and row.format in ("fp16", "bf16") for row in rows):
        return "A format in brackets is met by none of the values, which autocast keeps in fp32: what it would cost."
    return ""


def _badness(row: ModuleRange) -> tuple[float, ...]:
    room = row.loss.headroom_bits
    return (row.overflows, row.flushes, row.meets, row.zero_pct, -1000.0 if room is None else -room)


def without_repeats(rows: Iterable[ModuleRange]) -> list[ModuleRange]:
    """The rows without those of a container that gives exactly what a part of it gives."""
    rows = list(rows)
    parts: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        parts.setdefault(_content(row), []).append(row.module)
    return [
        row
        for row in rows
        if not any(
            name.startswith(f"{row.module}." if row.module else "") and name != row.module
            for name in parts[_content(row)]
        )
    ]


def _content(row: ModuleRange) -> tuple[Any, ...]:
    return (row.kind, row.histogram.largest, *row.histogram.exponents.items())


# --- text ----------------------------------------------------------------------------------------------------------


def _name(row: ModuleRange) -> str:
    return row.module or "the model itself"


def _and_more(rows: Sequence[ModuleRange]) -> str:
    others = len({row.module for row in rows}) - 1
    return f" So it goes with {others} more module{'s' if others > 1 else ''}." if others else ""


def share_text(value: float) -> str:
    """A share that is not 0 never looks like 0, and one that is not all never like all."""
    if 0 < value < 0.01:
        return "< 0.01 %"
    if 99.9 < value < 100:
        return "> 99.9 %"
    return f"{value:.2f} %" if value < 1 else f"{value:.1f} %" if value < 100 else "100 %"


def _bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def scale_text(value: float) -> str:
    return f"{value:.0f}" if value >= 1 else f"1/{1 / value:.0f}"
