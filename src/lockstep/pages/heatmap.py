"""Makes heat maps over rows and steps, as small PNGs for light and dark displays."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence

from lockstep.pages.chart import axis_labels, figure
from lockstep.pages.markup import Html, element
from lockstep.pages.scale import Unit, format_number, step_scale

SHADES = 63
MOST_NAMES = 16
_NARROWEST = 0.2
"""Minimum width of a colour scale, as a fraction of its median. A narrower range of values is
noise."""
RAMP = ("#f3f6d9", "#d5ecb9", "#9fd8b5", "#5fc0c0", "#329bc2", "#2470b1", "#22489b", "#182a6b")


def render_heatmap(
    title: str,
    rows: Sequence[Sequence[float]],
    names: Sequence[str],
    *,
    index: int,
    last_step: int,
    spoken: str,
    unit: Unit = "seconds",
) -> Html:
    low, high = color_limits(rows)
    shades = [[shade(value, low, high) for value in row] for row in rows]
    light, dark = (
        f"data:image/png;base64,{base64.b64encode(png(shades, palette(dark=each))).decode()}"
        for each in (False, True)
    )
    picture = Html(
        f'<picture><source srcset="{dark}" media="(prefers-color-scheme: dark)">'
        f'<img src="{light}" alt=""></picture>'
    )
    values = [value for row in rows for value in row]
    below = "≤ " if any(value < low for value in values) else ""
    above = "≥ " if any(value > high for value in values) else ""
    ends = [
        element("span", below + format_number(low, unit)),
        element("b"),
        element("span", above + format_number(high, unit)),
    ]
    every = -(-len(names) // MOST_NAMES)
    labels = [
        element("i", name, kind="y", style=f"top:{100 * (row + 0.5) / len(rows):.2f}%")
        for row, name in enumerate(names)
        if row % every == 0
    ]
    return figure(
        title,
        element("span", ends, kind="ramp"),
        [picture, axis_labels(step_scale(last_step), "step", None), labels],
        kind="heatmap",
        data_heatmap=index,
        spoken=spoken,
        style=f"height:{min(260, max(44, 13 * len(rows)))}px",
    )


def color_limits(rows: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the range of the colour scale: the 1st to the 99th percentile, widened to
    `_NARROWEST`."""
    values = sorted(value for row in rows for value in row if math.isfinite(value))
    if not values:
        return 0.0, 1.0
    few = len(values) // 100
    low, middle, high = values[few], values[len(values) // 2], values[-1 - few]
    room = max(0.0, _NARROWEST * middle - (high - low)) / 2
    return max(0.0, low - room), max(high + room, low + 1e-9)


def shade(value: float, low: float, high: float) -> int:
    if not math.isfinite(value):
        return 0
    return 1 + round((SHADES - 1) * min(1.0, max(0.0, (value - low) / (high - low))))


def palette(*, dark: bool) -> bytes:
    stops = [bytes.fromhex(colour[1:]) for colour in (reversed(RAMP) if dark else RAMP)]
    colours = bytearray(3)
    for each in range(SHADES):
        whole, fraction = divmod(each * (len(stops) - 1) / (SHADES - 1), 1)
        here, there = stops[int(whole)], stops[min(int(whole) + 1, len(stops) - 1)]
        colours += bytes(round(a + (b - a) * fraction) for a, b in zip(here, there, strict=True))
    return bytes(colours)


def png(rows: Sequence[Sequence[int]], colours: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0),
        b"PLTE": colours,
        b"tRNS": b"\0",
        b"IDAT": zlib.compress(b"".join(b"\0" + bytes(row) for row in rows), 9),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks.items())
