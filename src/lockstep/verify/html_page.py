"""The HTML page of a verification: the verdicts, and each plan's divergence beside that of the
perturbed runs. Pure.

One file that needs no network, for light and dark displays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lockstep.base.foreign_text import escape
from lockstep.verify.document import document, verdict_class
from lockstep.verify.verdict import COLUMNS, Report, Verdict

WIDTH, HEIGHT = 320, 180
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 10, 24
KINDS = ("gradients", "parameters", "loss")

_STYLE = """
.charts { display: flex; flex-wrap: wrap; gap: 1rem } figure { margin: 0 } figcaption { color: var(--faint); font-size: .85rem }
svg text { fill: var(--faint); font-size: 10px }
"""


def page(report: Report) -> str:
    """Return the whole HTML document."""
    title = f"lockstep verify {report.script}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        (
            f"<p>{report.steps} steps: <strong"
            f' class="{verdict_class(report.passed)}">{report.summary()}</strong>.</p>'
        ),
        _table(report),
        _microbatch_size(report),
        *(f'<p class="faint">{escape(note)}</p>' for note in report.notes),
        *(_plan(report, verdict) for verdict in report.verdicts),
        (
            "<h2>How to read it</h2><p>A curve is the distance from the run on one process, all"
            " tensors pooled, relative to their size. The lower edge is zero: the same bits. The"
            " band is the distance between runs on one process that differ by noise of one unit in"
            " the last place: it is what rounding alone does to this model. A curve in, near or"
            " below the band is right. A plan fails if some tensor is more than"
            f" {report.tolerance:g} × rounding away; a plan with numerics=bitwise fails if any bit"
            " differs.</p>"
        ),
    ]
    return document(title, parts, _STYLE)


def _table(report: Report) -> str:
    rows = []
    for verdict in report.verdicts:
        plan, processes, outcome, *rest = map(escape, verdict.row(report.tolerance))
        cells = (
            f'<td>{plan}</td><td class="number">{processes}</td><td'
            f' class="{verdict_class(verdict.passed)}">{outcome}</td>'
        )
        rows.append(f"<tr>{cells}{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>")
    head = "".join(
        f'<th class="number">{name}</th>' if name == "processes" else f"<th>{name}</th>"
        for name in COLUMNS
    )
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _microbatch_size(report: Report) -> str:
    mismatch = report.microbatch_size_mismatch
    if mismatch is not None:
        text = (
            '<p class="bad">The same batch with another microbatch size:'
            f" {escape(mismatch.text())}</p>"
        )
        return f"{text}<p>{escape(mismatch.why())}</p>"
    if report.microbatch_size_checked:
        return "<p>The same batch has the same gradient with another microbatch size.</p>"
    return ""


def _plan(report: Report, verdict: Verdict) -> str:
    parts = [f"<h2>{escape(verdict.plan)}</h2>"]
    if not verdict.ran:
        parts.append(
            '<p class="bad">The run failed (exit status'
            f" {verdict.exit_status}).</p><pre>{escape(verdict.error)}</pre>"
        )
    if verdict.mismatch is not None:
        parts.append(f'<p class="bad">{escape(verdict.mismatch.text())}</p>')
        parts.append(f"<p>{escape(verdict.mismatch.why())}</p>")
    parts += [f"<p>{escape(each.text())}</p>" for each in verdict.compression]
    parts += [f'<p class="faint">{escape(note)}</p>' for note in verdict.notes]
    if verdict.comparisons:
        curves = verdict.comparisons[0].divergence
        charts = [
            chart(kind, curves[kind], report.rounding_spread.get(kind, []), passed=verdict.passed)
            for kind in KINDS
        ]
        parts.append(f'<div class="charts">{"".join(charts)}</div>')
    return "".join(parts)


def chart(
    title: str, curve: Sequence[float], band: Sequence[tuple[float, float]], *, passed: bool
) -> str:
    """Return an SVG figure of the distance over the steps, on a logarithmic scale. Zero is on the
    lower edge."""
    numbers = [
        value
        for value in [*curve, *(value for pair in band for value in pair)]
        if value > 0 and math.isfinite(value)
    ]
    low = math.floor(math.log10(min(numbers, default=1e-8)))
    high = max(math.ceil(math.log10(max(numbers, default=1e-7))), low + 1)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step / max(1, len(curve) - 1))

    def y(value: float) -> float:
        position = (
            0.0
            if value <= 0
            else 1.0
            if math.isinf(value)
            else (math.log10(value) - low) / (high - low)
        )
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * min(1.0, max(0.0, position))

    parts = []
    for power in range(low, high + 1, -(-(high - low) // 4)):
        at = y(10.0**power)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"'
            ' stroke="var(--line)"/>'
        )
        parts.append(f'<text x="{LEFT - 5}" y="{at + 3:.1f}" text-anchor="end">1e{power}</text>')
    if band:
        edge = [f"{x(step):.1f},{y(pair[1]):.1f}" for step, pair in enumerate(band)]
        edge += [
            f"{x(step):.1f},{y(pair[0]):.1f}" for step, pair in reversed(list(enumerate(band)))
        ]
        parts.append(
            f'<polygon points="{" ".join(edge)}" fill="var(--band)" fill-opacity="0.5"'
            ' stroke="var(--band)"/>'
        )
    colour = "var(--plan)" if passed else "var(--bad)"
    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in enumerate(curve))
    parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    parts += [
        f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.5" fill="{colour}"/>'
        for step, value in enumerate(curve)
    ]
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">step 0</text>')
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{len(curve) - 1}</text>'
    )
    label = f"{title}: relative distance from one process"
    svg = (
        f'<svg role="img" aria-label="{label}" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0'
        f' {WIDTH} {HEIGHT}">{"".join(parts)}</svg>'
    )
    return f"<figure>{svg}<figcaption>{label}</figcaption></figure>"
