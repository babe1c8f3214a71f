"""The HTML page of an audit: each finding with its evidence, its line and its remedy; what is
right; what was not seen. Pure.

One file that needs no network, for light and dark displays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from lockstep.audit.finding import Audit, Finding
from lockstep.audit.summary import extent, verdict
from lockstep.base.foreign_text import escape
from lockstep.verify.document import document, verdict_class

AROUND = 2
"""Lines of the source that are shown before and after the one of a finding."""
_STYLE = """
h3 { font-size: 1rem; margin: 1rem 0 .2rem } p { margin: .3rem 0 } a { color: var(--plan) }
table.areas td:first-child { width: 14rem }
table.source { font: 13px/1.5 ui-monospace, monospace; background: color-mix(in srgb, var(--line) 30%, transparent) }
table.source td { border: 0; padding: 0 .6rem; white-space: pre } table.source td.number { color: var(--faint); width: 1% }
table.source tr.here { background: color-mix(in srgb, var(--bad) 18%, transparent); font-weight: 600 }
"""


def page(audit: Audit, source: Mapping[str, Sequence[str]]) -> str:
    """Return the whole HTML document. `source`: the lines of each file that findings name."""
    title = f"lockstep audit {audit.script}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        (
            f"<p>{escape(extent(audit))}: <strong"
            f' class="{verdict_class(audit.passed)}">{escape(verdict(audit))}</strong>.</p>'
        ),
        *(f'<p class="faint">{escape(note)}</p>' for note in audit.notes),
        _error(audit),
        _table(audit.findings),
        *(_finding(number, each, source) for number, each in enumerate(audit.findings, 1)),
        _rows("Found right", [(area.value, text) for area, text in audit.right.items()]),
        _rows(
            "Not seen",
            [(area.value, text) for area, texts in audit.unseen.items() for text in texts],
        ),
    ]
    return document(title, parts, _STYLE)


def _error(audit: Audit) -> str:
    if not audit.error:
        return ""
    return (
        '<p class="bad">The script failed (exit status'
        f" {audit.status}).</p><pre>{escape(audit.error)}</pre>"
    )


def _table(findings: Sequence[Finding]) -> str:
    rows = "".join(
        f'<tr><td class="number">{number}</td><td><a'
        f' href="#{number}">{escape(each.title)}</a></td><td>{escape(each.line)}</td><td'
        f' class="number">{"" if each.step is None else each.step}</td></tr>'
        for number, each in enumerate(findings, 1)
    )
    head = (
        '<tr><th class="number"></th><th>finding</th><th>line</th><th class="number">step</th></tr>'
    )
    return f'<div class="wide"><table>{head}{rows}</table></div>' if findings else ""


def _finding(number: int, finding: Finding, source: Mapping[str, Sequence[str]]) -> str:
    names = (
        f'<p class="faint">Concerned: {escape(", ".join(finding.names))}</p>'
        if finding.names
        else ""
    )
    parts = [
        f'<h2 id="{number}" class="bad">{number}. {escape(finding.title)}</h2>',
        f"<p>Law: {escape(finding.law)}.</p>",
        f"<p>{escape(finding.evidence)}</p>{names}",
        _source(finding.line, source),
        f"<h3>Remedy</h3>{''.join(_remedy(finding.remedy))}",
    ]
    return f"<section>{''.join(parts)}</section>"


def _source(line: str, source: Mapping[str, Sequence[str]]) -> str:
    """Return the line of a finding with those around it; its name alone if the file is not
    there."""
    name, _, number = line.rpartition(":")
    lines = source.get(name, [])
    if not (number.isdecimal() and 0 < int(number) <= len(lines)):
        return f"<p>{escape(line)}</p>" if line else ""
    here = int(number)
    rows = "".join(
        f"<tr{' class=here' if at == here else ''}><td"
        f' class="number">{at}</td><td>{escape(lines[at - 1])}</td></tr>'
        for at in range(max(1, here - AROUND), min(len(lines), here + AROUND) + 1)
    )
    return f'<p>{escape(line)}</p><div class="wide"><table class="source">{rows}</table></div>'


def _remedy(text: str) -> Iterable[str]:
    """Yield the remedy: indented lines are code."""
    for is_code, lines in groupby(text.splitlines(), key=lambda line: line.startswith("    ")):
        block = "\n".join(line[4:] if is_code else line for line in lines)
        yield f"<pre><code>{escape(block)}</code></pre>" if is_code else f"<p>{escape(block)}</p>"


def _rows(title: str, rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(
        f"<tr><td>{escape(area)}</td><td>{escape(text)}</td></tr>" for area, text in rows
    )
    return (
        f'<h2>{title}</h2><div class="wide"><table class="areas">{cells}</table></div>'
        if rows
        else ""
    )
