"""Line charts as SVG, for the figures of docs/; plain Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LEFT, RIGHT, TOP, BOTTOM, WIDTH, HEIGHT = 70, 170, 50, 50, 720, 380
COLORS = ("#b3401f", "#1f5fb3", "#2f7d4f")

Points = Sequence[tuple[float, float]]


class Chart:
    """Lines and dots over two axes. Both are linear from the first tick to the last; a logarithm is the caller's.

    x_ticks, y_ticks: place to label, in ascending order.
    """

    def __init__(self, title: str, x_label: str, x_ticks: Mapping[float, str], y_ticks: Mapping[float, str]) -> None:
        self._x_ends, self._y_ends = (min(x_ticks), max(x_ticks)), (min(y_ticks), max(y_ticks))
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            'font-size="13">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        ]
        self._text(LEFT, 26, title, "start", "#000")
        for place, label in y_ticks.items():
            y = self._y(place)
            self._lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#ddd"/>')
            self._text(LEFT - 8, y + 4, label, "end")
        for place, label in x_ticks.items():
            self._text(self._x(place), HEIGHT - BOTTOM + 20, label)
        self._text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label)

    def _x(self, place: float) -> float:
        low, high = self._x_ends
        return round(LEFT + (place - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)

    def _y(self, place: float) -> float:
        low, high = self._y_ends
        return round(HEIGHT - BOTTOM - (place - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    def _text(self, x: float, y: float, words: str, anchor: str = "middle", color: str = "#333") -> None:
        self._lines.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}">{words}</text>')

    def line(self, points: Points, color: str) -> None:
        path = " ".join(f"{self._x(x)},{self._y(y)}" for x, y in points)
        self._lines.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')

    def dots(self, points: Points, color: str) -> None:
        for x, y in points:
            self._lines.append(f'<circle cx="{self._x(x)}" cy="{self._y(y)}" r="3.5" fill="{color}"/>')

    def label(self, height: float, words: str, color: str) -> None:
        """Right of the axes, at a height of the y axis."""
        self._text(WIDTH - RIGHT + 10, self._y(height) + 4, words, "start", color)

    def svg(self) -> str:
        return "\n".join([*self._lines, "</svg>"]) + "\n"
