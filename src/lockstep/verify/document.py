"""The frame and the style of a self-contained HTML page, for light and dark displays. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.base.foreign_text import escape

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
pre { overflow-x: auto; background: color-mix(in srgb, var(--line) 30%, transparent); padding: .6rem }
"""


def document(title: str, parts: Iterable[str], style: str = "") -> str:
    """Return the whole HTML document. `style`: rules that this page alone needs."""
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    )
    head += (
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta'
        ' name="color-scheme" content="light dark">'
    )
    return f"{head}<style>{_STYLE}{style}</style></head><body>{''.join(parts)}</body></html>\n"


def verdict_class(good: bool) -> str:
    """Return the class of what is right, or wrong."""
    return "good" if good else "bad"
