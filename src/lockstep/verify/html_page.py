"""The HTML page of a verification: the verdicts, and each plan's divergence beside that of the perturbed runs. Pure.

One file that needs no network, for light and dark displays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from lockstep.verify.verdict import COLUMNS, Report, Verdict

WIDTH, HEIGHT = 320, 180
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 10, 24
KINDS = ("gradients", "parameters", "loss")

_STYLE = """
:root { --ground: #fff; --text: #1b1f24; --faint: #6a737d; --line: #d0d7de; --band: #9ec5f0; --plan: #0b57a4 }
:root { --good: #1a7f37; --bad: #c62828 }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14181d; --text: #e4e8ec; --faint: #98a2ad; --line: #353c44; --band: #2d5686; --plan: #7fb8ff }
  :root { --good: #56d364; --bad: #ff7b72 }
}
body { background: var(--ground); color: var(--text); font: 15px/1.5 system-ui, sans-serif }
body { margin: 2rem auto; max-width: 68rem; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem }
table { border-collapse: collapse; width: 100% } th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
.good { color: var(--good) } .bad { color: var(--bad) } .faint { color: var(--faint) }
.wide { overflow-x: auto }
.charts { display: flex; flex-wrap: wrap; gap: 1rem } figure { margin: 0 } figcaption { color: var(--faint); font-size: .85rem }
svg text { fill: var(--faint); font-size: 10px }
pre { overflow-x: auto; background: color-mix(in srgb, var(--line) 30%, transparent); padding: .6rem }
"""


def page(report: Report) -> str:
    """Return the whole HTML document."""
    title = f"lockstep verify {report.script}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p>{report.steps} steps: <strong class="{_colour(report.passed)}">{report.summary()}</strong>.</p>',
        _table(report),
        _microbatch_size(report),
        *(f'<p class="faint">{escape(note)}</p>' for note in report.notes),
        *(_plan(report, verdict) for verdict in report.verdicts),
        "<h2>How to read it</h2><p>A curve is the distance from the run on one process, all tensors pooled, relative to their size. The "
        "lower edge is zero: the same bits. The band is the distance between runs on one process that differ by noise of one unit in the "
        "last place: it is what rounding alone does to this model. A curve in, near or below the band is right. A plan fails if some "
        f"tensor is more than {report.tolerance:g} × rounding away; a plan with numerics=bitwise fails if any bit differs.</p>",
    ]
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
    return f"{head}<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"


def _table(report: Report) -> str:
    rows = []
    for verdict in report.verdicts:
        plan, processes, outcome, *rest = map(escape, verdict.row(report.tolerance))
        cells = f'<td>{plan}</td><td class="number">{processes}</td><td class="{_colour(verdict.passed)}">{outcome}</td>'
        rows.append(f"<tr>{cells}{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>")
    head = "".join(f'<th class="number">{name}</th>' if name == "processes" else f"<th>{name}</th>" for name in COLUMNS)
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _microbatch_size(report: Report) -> str:
    mismatch = report.microbatch_size_mismatch
    if mismatch is not None:
        text = f'<p class="bad">The same batch with another microbatch size: {escape(mismatch.text())}</p>'
        return f"{text}<p>{escape(mismatch.why())}</p>"
    if report.microbatch_size_checked:
        return "<p>The same batch has the same gradient with another microbatch size.</p>"
    return ""


def _plan(report: Report, verdict: Verdict) -> str:
    parts = [f"<h2>{escape(verdict.plan)}</h2>"]
    if not verdict.ran:
        parts.append(f'<p class="bad">The run failed (exit status {verdict.exit_status}).</p><pre>{escape(verdict.error)}</pre>')
    if verdict.mismatch is not None:
        parts.append(f'<p class="bad">{escape(verdict.mismatch.text())}</p>')
        parts.append(f"<p>{escape(verdict.mismatch.why())}</p>")
    parts += [f"<p>{escape(each.text())}</p>" for each in verdict.compression]
    parts += [f'<p class="faint">{escape(note)}</p>' for note in verdict.notes]
    if verdict.comparisons:
        curves = verdict.comparisons[0].divergence
        charts = [chart(kind, curves[kind], report.rounding_spread.get(kind, []), passed=verdict.passed) for kind in KINDS]
        parts.append(f'<div class="charts">{"".join(charts)}</div>')
    return "".join(parts)


def chart(title: str, curve: Sequence[float], band: Sequence[tuple[float, float]], *, passed: bool) -> str:
    """Return an SVG figure of the distance over the steps, on a logarithmic scale. Zero is on the lower edge."""
    numbers = [value for value in [*curve, *(value for pair in band for value in pair)] if value > 0 and math.isfinite(value)]
    low = math.floor(math.log10(min(numbers, default=1e-8)))
    high = max(math.ceil(math.log10(max(numbers, default=1e-7))), low + 1)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step / max(1, len(curve) - 1))

    def y(value: float) -> float:
        position = 0.0 if value <= 0 else 1.0 if math.isinf(value) else (math.log10(value) - low) / (high - low)
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * min(1.0, max(0.0, position))

    parts = []
    for power in range(low, high + 1, -(-(high - low) // 4)):
        at = y(10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="var(--line)"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{at + 3:.1f}" text-anchor="end">1e{power}</text>')
    if band:
        edge = [f"{x(step):.1f},{y(pair[1]):.1f}" for step, pair in enumerate(band)]
        edge += [f"{x(step):.1f},{y(pair[0]):.1f}" for step, pair in reversed(list(enumerate(band)))]
        parts.append(f'<polygon points="{" ".join(edge)}" fill="var(--band)" fill-opacity="0.5" stroke="var(--band)"/>')
    colour = "var(--plan)" if passed else "var(--bad)"
    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in enumerate(curve))
    parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    parts += [f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.5" fill="{colour}"/>' for step, value in enumerate(curve)]
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">step 0</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{len(curve) - 1}</text>')
    label = f"{title}: relative distance from one process"
    svg = f'<svg role="img" aria-label="{label}" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(parts)}</svg>'
    return f"<figure>{svg}<figcaption>{label}</figcaption></figure>"


def _colour(good: bool) -> str:
    return "good" if good else "bad"
