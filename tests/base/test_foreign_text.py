"""Texts of others reach terminals without control codes and pages without tags, in every
command."""

from __future__ import annotations

import ast
import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from lockstep.base.foreign_text import console, one_line, printable
from lockstep.pages.markup import joined

SOURCES = Path(__file__).parents[2] / "src" / "lockstep"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 你\ttab\nline", "plain é 你\ttab\nline"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[2Jgone\rover", "\\x1b[2Jgone\\rover"),
        ("\x9b31m", "\\x9b31m"),
        ("a\r\nb", "a\nb"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\udcff", "\\udcff"),
    ],
)
def test_control_codes_are_shown_and_not_sent(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert one_line(text) == shown.replace("\n", "\\n")


@given(st.text())
def test_what_is_printable_is_left_alone_and_can_be_encoded(text: str) -> None:
    shown = printable(text)
    assert printable(shown) == shown
    assert "\x1b" not in shown
    shown.encode()
    assert not set('<>"') & set(joined(text))


def test_a_table_takes_no_markup_and_no_codes() -> None:
    from rich.table import Table

    table = Table(title="[red]x[/red]")
    table.add_column("[b]head")
    table.add_row("[/] :smile: \x1b]52;c;\x07")
    with redirect_stdout(io.StringIO()) as stream:
        console(80).print(table)
    assert "\x1b" not in stream.getvalue()
    assert all(
        part in stream.getvalue()
        for part in ("[red]x[/red]", "[b]head", "[/] :smile: \\x1b]52;c;\\x07")
    )


def test_no_command_prints_and_no_page_escapes_in_another_way() -> None:
    for path in sorted(SOURCES.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path.name == "markup.py":
            continue
        assert "html.escape" not in text, path
        assert "from html import escape" not in text, path
        if "cli" not in path.parts:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            assert node.func.id != "Console", f"{path}:{node.lineno}: take foreign_text.console"
            if node.func.id == "print":
                is_json = [ast.unparse(each).startswith("json.dumps(") for each in node.args] == [
                    True
                ]
                assert (is_json, node.keywords) == (True, []), (
                    f"{path}:{node.lineno}: take show or say"
                )
