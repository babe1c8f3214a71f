"""Makes the HTML page of an audit: findings, facts that are right, and checks that could not be
made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from lockstep.audit.finding import Audit, Finding
from lockstep.pages.document import document
from lockstep.pages.markup import (
    Column,
    Html,
    Row,
    element,
    graded,
    joined,
    paragraph,
    remark,
    section,
    table,
)

AROUND = 2


def audit_page(audit: Audit, source: Mapping[str, Sequence[str]]) -> str:
    outcome = graded(audit.verdict, audit.passed)
    failed = f"The script failed (exit status {audit.status})."
    return document(
        "lockstep audit",
        f"lockstep audit {audit.script}",
        table(
            [Column(""), "finding", "line", Column("step")],
            (
                [
                    str(number),
                    element("a", each.title, href=f"#{number}"),
                    each.line,
                    "" if each.step is None else str(each.step),
                ]
                for number, each in enumerate(audit.findings, 1)
            ),
        ),
        (_finding(number, each, source) for number, each in enumerate(audit.findings, 1)),
        _areas("right", "Found right", [(area.value, text) for area, text in audit.right.items()]),
        _areas(
            "unseen",
            "Not seen",
            [(area.value, text) for area, texts in audit.unseen.items() for text in texts],
        ),
        header=[
            element("h1", audit.script),
            paragraph(f"{audit.extent}: ", outcome, "."),
            map(remark, audit.notes),
            [paragraph(failed, kind="bad"), element("pre", audit.error)] if audit.error else None,
        ],
    )


def _finding(number: int, finding: Finding, source: Mapping[str, Sequence[str]]) -> Html:
    return element(
        "section",
        element("h2", f"{number}. {finding.title}", id=number, kind="bad"),
        paragraph(f"Law: {finding.law}."),
        paragraph(finding.evidence),
        remark(f"Concerned: {', '.join(finding.names)}") if finding.names else None,
        _source(finding.line, source),
        element("h3", "Remedy"),
        _remedy(finding.remedy),
    )


def _source(line: str, source: Mapping[str, Sequence[str]]) -> Html:
    name, _, number = line.rpartition(":")
    lines = source.get(name, [])
    if not (number.isdecimal() and 0 < int(number) <= len(lines)):
        return paragraph(line)
    here = int(number)
    shown = range(max(1, here - AROUND), min(len(lines), here + AROUND) + 1)
    rows = (
        Row(
            [element("td", str(at), kind="number"), lines[at - 1]],
            kind="here" if at == here else "",
        )
        for at in shown
    )
    return joined(paragraph(line), table((), rows, kind="source"))


def _remedy(text: str) -> Iterator[Html]:
    for is_code, lines in groupby(text.splitlines(), key=lambda line: line.startswith("    ")):
        block = "\n".join(line[4:] if is_code else line for line in lines)
        yield element("pre", element("code", block)) if is_code else paragraph(block)


def _areas(name: str, title: str, rows: Sequence[tuple[str, str]]) -> Html:
    return section(name, title, table((), rows, kind="areas"))
