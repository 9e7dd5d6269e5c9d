"""The page of a comparison: the verdicts as a table, and its charts."""

from __future__ import annotations

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
    speed_text,
)
from halfstep.compare.trial import Trial, by_policy
from halfstep.files import write_whole
from halfstep.page import chart_sections, document, header
from halfstep.report import Figure, number


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
    figures = {name: Figure(title, note, **figure) for name, title, note, figure in charts if figure}
    rows = "\n".join(_row(index, policy) for index, policy in enumerate(report.policies))
    reasons = "\n".join(_reason(index, policy) for index, policy in enumerate(report.policies))
    body = "\n".join(
        (
            header("halfstep compare", report.workload, report.headline, report.facts),
            f"<table>\n{_HEAD}\n<tbody>\n{rows}\n</tbody>\n</table>",
            f"<dl>\n{reasons}\n</dl>",
            chart_sections(figures),
        )
    )
    title = f"{report.workload}: {' / '.join(p.policy for p in report.policies)}"
    return document(title, body, figures, _STYLE)


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


_HEAD = """<thead><tr><th>policy</th><th>verdict</th><th>gap, 90 % interval</th><th>margin</th><th>final loss</th>
<th>peak MiB</th><th>samples/s</th><th>skipped</th><th>replays</th></tr></thead>"""

_STYLE = """
table { margin: 28px 0 20px; }
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
.charts { margin-top: 0; }
.memory, .speed { grid-column: auto; }
@media (max-width: 760px) {
  tbody th { display: block; text-align: left; }
  dl { grid-template-columns: 1fr; gap: 2px; }
  dd { margin-bottom: 10px; }
  .memory, .speed { grid-column: 1 / -1; }
}
"""
