"""Draw docs/align.svg: what the copies of a padded output take beside its products.

Run ``python benchmarks/figure_align.py`` after a change; a test holds the file to what is drawn here.
"""

from __future__ import annotations

import math
from pathlib import Path

from chart import COLORS, Chart

from halfstep.hardware import Card, find_card

NUM_ROWS = 8192
CARDS = ("H100 SXM5", "A100 SXM4 80GB", "L4")
WIDTHS = [2**power for power in range(9, 15)]
TICKS_PCT = [1, 2, 5, 10, 20, 50, 100]


def copies_pct(card: Card, width: int, num_rows: int) -> float:
    """Time of the copies that padding makes, in percent of that of the products, both at the card's peak rates.

    For an output of N columns padded under a 16-bit policy: 4 N (M + K) bytes and 6 M K N operations, where M is
    ``num_rows`` and K is ``width``; N cancels.
    """
    copies = 4 * (num_rows + width) / (card.bandwidth_gb_per_s * 1e9)
    products = 6 * num_rows * width / (card.rates_tflops["fp16"] * 1e12)
    return 100 * copies / products


def draw() -> str:
    chart = Chart(
        f"Copies of a padded output in percent of its products' time, {NUM_ROWS} rows, peak rates",
        "in_features of the padded layer",
        {math.log2(width): str(width) for width in WIDTHS},
        {math.log(pct): f"{pct}%" for pct in TICKS_PCT},
    )
    for name, color in zip(CARDS, COLORS, strict=True):
        card = find_card(name)
        assert card is not None
        points = [(math.log2(width), math.log(copies_pct(card, width, NUM_ROWS))) for width in WIDTHS]
        chart.line(points, color)
        chart.dots(points, color)
        chart.label(points[-1][1], name, color)
    return chart.svg()


if __name__ == "__main__":
    (Path(__file__).parent.parent / "docs" / "align.svg").write_text(draw())
