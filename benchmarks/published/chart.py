"""A chart of predicted against measured, as SVG: both axes logarithmic, one color a source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from published.evaluation import Pair, by_source, mean_error

COLORS = (
    "#2563eb",
    "#dc2626",
    "#059669",
    "#d97706",
    "#7c3aed",
    "#0891b2",
    "#be185d",
    "#4d7c0f",
    "#6b7280",
)
WIDTH, HEIGHT, LEFT, TOP, SIDE = 760, 470, 62, 20, 400


def svg(pairs: Sequence[Pair], unit: str = "s") -> str:
    """Return the chart. The band is 12% to either side."""
    values = [value for pair in pairs for value in (pair.predicted, pair.measured)]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def x(value: float) -> float:
        return LEFT + SIDE * (math.log10(value) - low) / (high - low)

    def y(value: float) -> float:
        return TOP + SIDE - SIDE * (math.log10(value) - low) / (high - low)

    first, last = 10.0**low, 10.0**high
    band = [
        (x(first), y(first * 1.12)),
        (x(last / 1.12), y(last)),
        (x(last), y(last)),
        (x(last), y(last / 1.12)),
    ]
    band += [(x(first * 1.12), y(first)), (x(first), y(first))]
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
            ' font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<polygon fill="#e5e7eb" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in band)}"/>',
        (
            f'<path d="M{x(first):.1f} {y(first):.1f}L{x(last):.1f} {y(last):.1f}" stroke="#6b7280"'
            ' fill="none"/>'
        ),
    ]
    for power in range(low, high + 1):
        parts += _grid(x(10.0**power), y(10.0**power), f"{10.0**power:g} {unit}")
    for index, (source, each) in enumerate(
        sorted(by_source(pairs).items(), key=lambda item: -len(item[1]))
    ):
        color = COLORS[index % len(COLORS)]
        parts += [
            f'<circle cx="{x(pair.measured):.1f}" cy="{y(pair.predicted):.1f}" r="3" fill="{color}"'
            ' fill-opacity="0.55"/>'
            for pair in each
        ]
        parts += _legend(index, color, f"{source}: {len(each)}, {100 * mean_error(each):.1f}%")
    middle = TOP + SIDE / 2
    parts += [
        f'<text x="{LEFT + SIDE / 2}" y="{TOP + SIDE + 38}" text-anchor="middle">measured</text>',
        (
            f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14'
            f' {middle})">predicted</text>'
        ),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _grid(x: float, y: float, label: str) -> list[str]:
    return [
        (
            f'<path d="M{x:.1f} {TOP}V{TOP + SIDE}M{LEFT} {y:.1f}H{LEFT + SIDE}" stroke="#d1d5db"'
            ' stroke-width="0.6"/>'
        ),
        f'<text x="{x:.1f}" y="{TOP + SIDE + 18}" text-anchor="middle">{label}</text>',
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>',
    ]


def _legend(index: int, color: str, label: str) -> list[str]:
    y = TOP + 14 + 22 * index
    return [
        f'<circle cx="{LEFT + SIDE + 22}" cy="{y}" r="4" fill="{color}"/>',
        f'<text x="{LEFT + SIDE + 32}" y="{y + 4}" font-size="11">{escape(label)}</text>',
    ]
