"""The registry of events: each that the package records has a meaning, and the page has them all.

`python tests/base/test_events.py` writes the page's table anew."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from lockstep.base.events import EVENTS, severity

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "run-directory.md"
TABLE = re.compile(r"(?<=\| event \| severity \| what happened \|\n\|---\|---\|---\|\n)(\|.*\n)+")


def recorded() -> Iterator[str]:
    """The names that the package gives to `event(...)` and `Remark(...)`."""
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if re.search(r"(event|Remark)\s*\(", text) else ():
            if isinstance(node, ast.Call) and node.args:
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                first = node.args[0]
                if called in ("event", "_event", "Remark") and isinstance(first, ast.Constant):
                    yield first.value


def table() -> str:
    rows = sorted(
        (name, kind, meaning) for kind, events in EVENTS.items() for name, meaning in events.items()
    )
    return "".join(f"| `{name}` | {kind} | {meaning} |\n" for name, kind, meaning in rows)


def test_each_event_is_registered_once_and_recorded() -> None:
    registered = [name for events in EVENTS.values() for name in events]
    assert sorted(registered) == sorted(set(recorded()))


def test_the_page_has_the_table_of_the_registry() -> None:
    found = TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == table(), "run python tests/base/test_events.py"


def test_an_event_of_a_script_is_information() -> None:
    assert (severity("run-failed"), severity("my-own")) == ("error", "info")


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), "utf-8")
