"""A report as one HTML file that opens offline: nothing comes from outside, and the page forbids itself a connection.

Charts are Plotly figures as plain dicts of ``data`` and ``layout``; plotly.js is inside a page that has one, and a page
without any has no script at all. A figure may write a colour as ``var(--ink)``, and gets the one of the page's style,
light or dark.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping
from html import escape

from halfstep.errors import HalfstepError
from halfstep.files import write_whole
from halfstep.report import Cell, Figure, Report, Table


def write_html(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the page of ``report``; a reader never sees half a file."""
    write_whole(path, html_page(report))


def html_page(report: Report) -> str:
    """The page of ``report`` as text: its sheet, with the figures ahead of the tables."""
    sheet, figures = report.sheet(), report.figures()
    closing = "\n".join(f'<p class="closing">{escape(sentence)}</p>' for sentence in sheet.closing)
    parts = [
        header(f"halfstep {type(report).__name__.removesuffix('Report').lower()}", "", sheet.headline, sheet.facts),
        chart_sections(figures),
        *(table_section(table) for table in sheet.tables),
        closing,
    ]
    return document(sheet.headline, "\n".join(filter(None, parts)), figures)


def document(title: str, body: str, figures: Mapping[str, Figure], style: str = "") -> str:
    """A whole page around ``body``, which is markup with a place for every figure; ``style`` is CSS after the common.

    HalfstepError when there are figures and plotly is not installed.
    """
    scripts, policy = "", "default-src 'none'; style-src 'unsafe-inline'"
    if figures:
        policy += "; script-src 'unsafe-inline'; img-src data: blob:"
        drawn = {name: {"data": figure.data, "layout": figure.layout} for name, figure in figures.items()}
        text = json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        scripts = (
            f'<script type="application/json" id="figures">{text}</script>\n'
            f"<script>{_plotly()}</script>\n<script>{_SCRIPT}</script>\n"
        )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="{policy}">
<title>{escape(title)}</title>
<style>{_STYLE}{style}</style>
</head>
<body>
<main>
{body}
</main>
{scripts}</body>
</html>
"""


def header(command: str, subject: str, headline: str, facts: str) -> str:
    """The head of a page: what ran, on what, its sentence, and what it is about."""
    about = f" <b>{escape(subject)}</b>" if subject else ""
    note = f'\n<p class="note">{escape(facts)}</p>' if facts else ""
    return f'<header>\n<p class="eyebrow">{escape(command)}{about}</p>\n<h1>{escape(headline)}</h1>{note}\n</header>'


def table_section(table: Table) -> str:
    """A table with its title and note, in a box that scrolls when it is long or wide."""
    sides = ["right" if column.startswith(">") else "left" for column in table.columns]
    titles = [escape(column.removeprefix(">")) for column in table.columns]
    head = "".join(f'<th class="{side}">{title}</th>' for side, title in zip(sides, titles, strict=True))
    rows = "\n".join(
        "<tr>" + "".join(_cell(cell, *place) for cell, *place in zip(row, sides, titles, strict=True)) + "</tr>"
        for row in table.rows
    )
    title = f"<h2>{escape(table.title)}</h2>\n" if table.title else ""
    note = f'<p class="note">{escape(table.note)}</p>\n' if table.note else ""
    return (
        f'<div class="sheet">\n{title}<div class="scroll" tabindex="0"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table></div>\n{note}</div>"
    )


def chart_sections(figures: Mapping[str, Figure]) -> str:
    """The places where the page's script draws ``figures``."""
    if not figures:
        return ""
    sections = "\n".join(
        f'<section class="{escape(name)}"><h2>{escape(figure.title)}</h2><p class="note">{escape(figure.note)}</p>'
        f'<div id="{escape(name)}"></div></section>'
        for name, figure in figures.items()
    )
    return (
        '<noscript><p class="note">The charts need JavaScript; the tables are complete without them.</p></noscript>\n'
        f'<div class="charts">\n{sections}\n</div>'
    )


def chart_text(text: str) -> str:
    """``text`` for a name, a label or a hover text of a figure, where Plotly reads a little HTML."""
    return html.escape(text).replace("%{", "% {")


def _cell(cell: str | Cell, side: str, label: str) -> str:
    text = escape(str(cell))
    if isinstance(cell, Cell) and cell.tone:
        text = f'<span class="{escape(cell.tone)}">{text}</span>'
    return f'<td class="{side}" data-label="{label}">{text}</td>'


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise HalfstepError(
            "the HTML page", "plotly is not installed", "Install it with: pip install 'halfstep[torch]'."
        ) from None
    return str(get_plotlyjs())


_STYLE = """
:root { --ground: #fbfbfa; --card: #ffffff; --ink: #1b2128; --soft: #5d6773; --rule: #e3e6ea;
  --good: #0b7a5b; --bad: #b3361b; --open: #8a5a00;
  --heat-low: #dbe8f5; --heat-middle: #4a90cf; --heat-high: #0c2d5e; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #12161b; --card: #191f26; --ink: #e8ebef; --soft: #9aa5b1; --rule: #2b333d;
    --good: #4cc9a0; --bad: #ff8a6b; --open: #e5b454;
    --heat-low: #21364d; --heat-middle: #3b87c8; --heat-high: #d9ecff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: clamp(1.35rem, 3.2vw, 1.95rem); line-height: 1.25; font-weight: 650; letter-spacing: -0.01em;
  margin: 4px 0 8px; text-wrap: balance; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; font-weight: 650; margin: 0; }
.eyebrow, .note { color: var(--soft); margin: 0; font-size: 0.9rem; overflow-wrap: anywhere; }
.eyebrow b { color: var(--ink); font-weight: 600; }
table { width: 100%; border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 9px 12px 9px 0; text-align: right; border-bottom: 1px solid var(--rule); vertical-align: baseline; }
thead th { color: var(--soft); font-weight: 500; font-size: 0.8rem; }
.sheet { margin: 28px 0; }
.sheet .note { margin-top: 8px; }
.scroll { max-height: 75vh; overflow: auto; margin-top: 6px; }
.scroll thead th { position: sticky; top: 0; background: var(--ground); box-shadow: inset 0 -1px var(--rule);
  border-bottom: 0; white-space: nowrap; }
.scroll tbody tr:last-child td { border-bottom: 0; }
.left { text-align: left; min-width: 9ch; overflow-wrap: anywhere; }
.right { white-space: nowrap; }
.good, .bad, .open { font-weight: 600; white-space: nowrap; }
.good { color: var(--good); }
.bad { color: var(--bad); }
.open { color: var(--open); }
.closing { max-width: 76ch; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 20px; margin: 28px 0; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 18px 20px 10px;
  grid-column: 1 / -1; min-width: 0; }
@media (max-width: 760px) {
  main { padding: 24px 14px 40px; }
  thead { display: none; }
  tr { display: block; padding: 10px 0; border-bottom: 1px solid var(--rule); }
  tbody th, td { display: flex; justify-content: space-between; gap: 16px; border: 0; padding: 3px 0; }
  td::before { content: attr(data-label); color: var(--soft); text-align: left; flex: none; }
  td.left, td.right { text-align: right; white-space: normal; min-width: 0; overflow-wrap: anywhere; }
  section { padding: 14px 12px 8px; }
}
"""

_SCRIPT = """
const text = document.getElementById("figures").textContent;
function draw() {
  const css = getComputedStyle(document.documentElement);
  const value = (name) => css.getPropertyValue(name).trim();
  const figures = JSON.parse(text.replace(/var\\((--[a-z-]+)\\)/g, (_, name) => value(name)));
  for (const [id, { data, layout }] of Object.entries(figures)) {
    layout.font = { family: getComputedStyle(document.body).fontFamily, size: 13, color: value("--soft") };
    layout.hoverlabel = { bgcolor: value("--card"), bordercolor: value("--rule"), font: { color: value("--ink") } };
    for (const axis of [layout.xaxis, layout.yaxis]) {
      Object.assign(axis, { gridcolor: value("--rule"), zerolinecolor: value("--soft"), linecolor: value("--rule") });
    }
    Plotly.react(id, data, layout, { responsive: true, displayModeBar: false });
  }
}
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
"""
