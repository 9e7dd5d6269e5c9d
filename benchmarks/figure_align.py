"""Draw docs/align.svg: what the copies of a padded output take beside its products.

Run ``python benchmarks/figure_align.py`` after a change; a test holds the file to what is drawn here.
"""

from __future__ import annotations

import math
from pathlib import Path

from halfstep.hardware import Card, find_card

NUM_ROWS = 8192
CARDS = {"H100 SXM5": "#b3401f", "A100 SXM4 80GB": "#1f5fb3", "L4": "#2f7d4f"}
WIDTHS = [2**power for power in range(9, 15)]
TICKS_PCT = [1, 2, 5, 10, 20, 50, 100]
LEFT, RIGHT, TOP, BOTTOM, WIDTH, HEIGHT = 70, 150, 50, 50, 720, 380


def copies_pct(card: Card, width: int, num_rows: int) -> float:
    """Time of the copies that padding makes, in percent of that of the products, both at the card's peak rates.

    For an output of N columns padded under a 16-bit policy: 4 N (M + K) bytes and 6 M K N operations, where M is
    ``num_rows`` and K is ``width``; N cancels.
    """
    copies = 4 * (num_rows + width) / (card.bandwidth_gb_per_s * 1e9)
    products = 6 * num_rows * width / (card.rates_tflops["fp16"] * 1e12)
    return 100 * copies / products


def x_of(width: float) -> float:
    share = math.log2(width / WIDTHS[0]) / math.log2(WIDTHS[-1] / WIDTHS[0])
    return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)


def y_of(pct: float) -> float:
    share = math.log(pct / TICKS_PCT[0]) / math.log(TICKS_PCT[-1] / TICKS_PCT[0])
    return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


def text(x: float, y: float, words: str, anchor: str = "middle", color: str = "#333") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}">{words}</text>'


def draw() -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        text(
            LEFT,
            26,
            f"Copies of a padded output in percent of its products' time, {NUM_ROWS} rows, peak rates",
            "start",
            "#000",
        ),
    ]
    for pct in TICKS_PCT:
        y = y_of(pct)
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        lines.append(text(LEFT - 8, y + 4, f"{pct}%", "end"))
    for width in WIDTHS:
        lines.append(text(x_of(width), HEIGHT - BOTTOM + 20, str(width)))
    lines.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "in_features of the padded layer"))
    for name, color in CARDS.items():
        card = find_card(name)
        assert card is not None
        points = [(x_of(width), y_of(copies_pct(card, width, NUM_ROWS))) for width in WIDTHS]
        path = " ".join(f"{x},{y}" for x, y in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        lines += [f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in points]
        lines.append(text(points[-1][0] + 10, points[-1][1] + 4, name, "start", color))
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent.parent / "docs" / "align.svg").write_text(draw())
