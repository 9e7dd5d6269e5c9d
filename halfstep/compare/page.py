"""The report as one HTML file that opens offline: plotly.js is inside, and the page forbids itself any connection."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from typing import Any

from halfstep.compare.figures import (
    color,
    difference_figure,
    loss_figure,
    memory_figure,
    scale_figure,
    speed_figure,
)
from halfstep.compare.report import (
    CompareReport,
    PolicyReport,
    gap_text,
    loss_text,
    memory_text,
    number,
    speed_text,
)
from halfstep.compare.trial import Trial, by_policy
from halfstep.errors import HalfstepError
from halfstep.files import write_whole


def write_html(report: CompareReport, trials: Sequence[Trial], path: str | os.PathLike[str]) -> None:
    """Write the page of ``report`` and of the ``trials`` it was made from; a reader never sees half a file."""
    write_whole(path, html_page(report, trials))


def html_page(report: CompareReport, trials: Sequence[Trial]) -> str:
    """The page as text."""
    arms = by_policy(trials)
    charts: list[tuple[str, str, str, dict[str, Any] | None]] = [
        (
            "loss",
            "Training loss",
            "Mean over the seeds that are finite at a step, as measured; the band is their range."
            " A cross is a loss that is NaN or infinite, or an early stop.",
            loss_figure(arms),
        ),
        (
            "difference",
            "Difference to the reference",
            "A dot is a seed, the diamond the gap with its 90 % interval, the grey band the margin."
            " Left of zero is better. A cross at the right edge is a seed that diverged.",
            difference_figure(report, arms) if len(arms) > 1 else None,
        ),
        ("scale", "Loss scale", "One line a seed. A skipped step left the weights unmoved.", scale_figure(arms)),
        ("memory", "Memory", "The largest of the seeds.", memory_figure(report.policies)),
        ("speed", "Throughput", "The median of the seeds.", speed_figure(report.policies)),
    ]
    sections = "\n".join(
        f'<section class="{name}"><h2>{title}</h2><p class="note">{note}</p><div id="{name}"></div></section>'
        for name, title, note, figure in charts
        if figure
    )
    figures = json.dumps({name: figure for name, _, _, figure in charts if figure}, allow_nan=False)
    return _PAGE.format(
        title=escape(f"{report.workload}: {' / '.join(p.policy for p in report.policies)}"),
        workload=escape(report.workload),
        headline=escape(report.headline),
        facts=escape(report.facts),
        rows="\n".join(_row(index, policy) for index, policy in enumerate(report.policies)),
        reasons="\n".join(_reason(index, policy) for index, policy in enumerate(report.policies)),
        sections=sections,
        figures=figures.replace("<", "\\u003c"),
        style=_STYLE,
        script=_SCRIPT,
        plotly=_plotly(),
    )


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise HalfstepError(
            "the HTML page", "plotly is not installed", "Install it with: pip install 'halfstep[torch]'."
        ) from None
    return str(get_plotlyjs())


def _row(index: int, policy: PolicyReport) -> str:
    verdict = policy.verdict
    cells = (
        ("gap, 90 % interval", gap_text(verdict)),
        ("margin", number(verdict.margin)),
        ("final loss", loss_text(policy)),
        ("peak MiB", memory_text(policy)),
        ("samples/s", speed_text(policy)),
        ("steps skipped", str(policy.steps_skipped)),
        ("replays", str(policy.replays)),
    )
    kind = verdict.word.replace(" ", "-")
    return (
        f'<tr><th scope="row">{_swatch(index)}{escape(policy.asked_and_ran)}</th>'
        f'<td data-label="verdict"><span class="word {kind}">{escape(verdict.word)}</span></td>'
        + "".join(f'<td data-label="{label}">{escape(text)}</td>' for label, text in cells)
        + "</tr>"
    )


def _reason(index: int, policy: PolicyReport) -> str:
    return f"<dt>{_swatch(index)}{escape(policy.policy)}</dt><dd>{escape(policy.reason)}</dd>"


def _swatch(index: int) -> str:
    return f'<i class="swatch" style="background:{color(index)}"></i>'


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<header>
<p class="eyebrow">halfstep compare <b>{workload}</b></p>
<h1>{headline}</h1>
<p class="note">{facts}</p>
</header>
<table>
<thead><tr><th>policy</th><th>verdict</th><th>gap, 90 % interval</th><th>margin</th><th>final loss</th><th>peak MiB</th>
<th>samples/s</th><th>skipped</th><th>replays</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
<dl>
{reasons}
</dl>
<noscript><p class="note">The charts need JavaScript; the verdict above is complete without them.</p></noscript>
<div class="charts">
{sections}
</div>
</main>
<script type="application/json" id="figures">{figures}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""

_STYLE = """
:root { --ground: #fbfbfa; --card: #ffffff; --ink: #1b2128; --soft: #5d6773; --rule: #e3e6ea;
  --good: #0b7a5b; --bad: #b3361b; --open: #8a5a00; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #12161b; --card: #191f26; --ink: #e8ebef; --soft: #9aa5b1; --rule: #2b333d;
    --good: #4cc9a0; --bad: #ff8a6b; --open: #e5b454; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: clamp(1.35rem, 3.2vw, 1.95rem); line-height: 1.25; font-weight: 650; letter-spacing: -0.01em;
  margin: 4px 0 8px; text-wrap: balance; }
h2 { font-size: 1.05rem; font-weight: 650; margin: 0; }
.eyebrow, .note { color: var(--soft); margin: 0; font-size: 0.9rem; }
.eyebrow b { color: var(--ink); font-weight: 600; }
table { width: 100%; border-collapse: collapse; margin: 28px 0 20px; font-size: 0.9rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: 9px 12px 9px 0; text-align: right; border-bottom: 1px solid var(--rule); vertical-align: baseline; }
thead th { color: var(--soft); font-weight: 500; font-size: 0.8rem; }
th:first-child, td:nth-child(2), thead th:nth-child(2) { text-align: left; }
tbody th { font-weight: 600; overflow-wrap: anywhere; }
.swatch { display: inline-block; width: 0.7em; height: 0.7em; border-radius: 2px; margin-right: 0.55em; }
.word { font-weight: 600; white-space: nowrap; color: var(--soft); }
.equivalent, .not-worse { color: var(--good); }
.worse, .materially-worse, .diverged { color: var(--bad); }
.inconclusive, .no-verdict { color: var(--open); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 6px 18px; font-size: 0.92rem; margin: 0 0 32px; }
dt { font-weight: 600; max-width: 14em; overflow-wrap: anywhere; }
dd { margin: 0; color: var(--soft); max-width: 76ch; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 20px; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 18px 20px 10px;
  grid-column: 1 / -1; min-width: 0; }
.memory, .speed { grid-column: auto; }
@media (max-width: 760px) {
  main { padding: 24px 14px 40px; }
  thead { display: none; }
  tr { display: block; padding: 10px 0; border-bottom: 1px solid var(--rule); }
  tbody th, td { display: flex; justify-content: space-between; gap: 16px; border: 0; padding: 3px 0; }
  tbody th { display: block; text-align: left; }
  td::before { content: attr(data-label); color: var(--soft); text-align: left; }
  dl { grid-template-columns: 1fr; gap: 2px; }
  dd { margin-bottom: 10px; }
  section { padding: 14px 12px 8px; }
  .memory, .speed { grid-column: 1 / -1; }
}
"""

_SCRIPT = """
const figures = JSON.parse(document.getElementById("figures").textContent);
function draw() {
  const css = getComputedStyle(document.documentElement);
  const value = (name) => css.getPropertyValue(name).trim();
  for (const [id, figure] of Object.entries(figures)) {
    const layout = structuredClone(figure.layout);
    layout.font = { family: getComputedStyle(document.body).fontFamily, size: 13, color: value("--soft") };
    layout.hoverlabel = { bgcolor: value("--card"), bordercolor: value("--rule"), font: { color: value("--ink") } };
    for (const axis of [layout.xaxis, layout.yaxis]) {
      Object.assign(axis, { gridcolor: value("--rule"), zerolinecolor: value("--soft"), linecolor: value("--rule") });
    }
    Plotly.react(id, structuredClone(figure.data), layout, { responsive: true, displayModeBar: false });
  }
}
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
"""
