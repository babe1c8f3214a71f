"""Renders the specimens of the zoo: one file holds a training script with one fault, and its clean
twin.

A line that ends in `# fault` is only in the faulty script, and one that ends in `# clean` only in
the clean twin. The lines of a fault, and those that end in `# here`, are the places that a finding
may name. Pure, but for `specimens`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

_MARK = re.compile(r"(?P<code>.*?)\s*# (?P<marks>(?:fault|clean|here)(?:, here)?)$")
_FIELD = re.compile(r"(?P<field>Cause|Source|Launch): (?P<value>.+)$")


@dataclass(frozen=True, slots=True)
class Header:
    """The facts in the docstring of a specimen."""

    cause: str
    """Value of a `lockstep.audit.finding.Cause`."""
    source: str
    """The public issue, or the habit of tutorials, that the fault is taken from."""
    launch: str = "torchrun"
    """`python` if the script starts its own processes."""


@dataclass(frozen=True, slots=True)
class Specimen:
    """One file of the zoo."""

    path: Path
    family: str
    """Name of its folder: the library that the script is written with."""
    name: str
    cause: str
    source: str
    launch: str = "torchrun"


def _split(line: str) -> tuple[str, set[str]]:
    """Return a line without its marks, and the marks."""
    found = _MARK.match(line)
    return (found["code"], set(found["marks"].split(", "))) if found else (line, set())


def render(text: str, *, faulty: bool) -> str:
    """Return the faulty script, or its clean twin. Both have as many lines as the text."""
    dropped = "clean" if faulty else "fault"
    lines = [_split(line) for line in text.split("\n")]
    return "\n".join("" if dropped in marks else code for code, marks in lines)


def places(text: str) -> set[int]:
    """Return the numbers of the lines, from 1, at which a finding may point."""
    return {
        number
        for number, line in enumerate(text.split("\n"), start=1)
        if _split(line)[1] & {"fault", "here"}
    }


def header(text: str) -> Header:
    """Return the facts in the docstring. A value may go on in the next lines."""
    fields: dict[str, str] = {}
    field = ""
    for line in (ast.get_docstring(ast.parse(render(text, faulty=True))) or "").split("\n"):
        if found := _FIELD.match(line):
            field = found["field"].lower()
            fields[field] = found["value"].strip()
        elif field and line.strip():
            fields[field] += f" {line.strip()}"
    return Header(**fields)


def specimens(folder: Path) -> list[Specimen]:
    """Return all specimens in the folders of a folder, by family and name."""
    found = []
    for path in sorted(folder.glob("*/[a-z]*.py")):
        facts = header(path.read_text(encoding="utf-8"))
        found.append(
            Specimen(path, path.parent.name, path.stem, facts.cause, facts.source, facts.launch)
        )
    return found
