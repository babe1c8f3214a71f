"""Makes HTML. The functions `joined`, `element` and `table` escape text."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lockstep.base.foreign_text import printable


class Html(str):
    """Text that is HTML already, and is not escaped."""

    __slots__ = ()


Content: TypeAlias = "str | Iterable[Content] | None"
"""Text, which is escaped, or HTML. None adds nothing to the page."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of numbers, or of texts with `number=False`. A string is the name of a column of
    texts."""

    name: Content
    number: bool = True


class Row(list[Content]):
    """The cells of a table's row, and its HTML attributes."""

    def __init__(self, cells: Iterable[Content], **attributes: Any) -> None:
        super().__init__(cells)
        self.attributes = attributes


def joined(*contents: Content) -> Html:
    parts = []
    for content in contents:
        if isinstance(content, Html):
            parts.append(content)
        elif isinstance(content, str):
            parts.append(Html(html.escape(printable(content))))
        elif content is not None:
            parts.append(joined(*content))
    return Html("".join(parts))


def element(name: str, *contents: Content, **attributes: Any) -> Html:
    """Return an HTML element with the CSS class `kind`. `_` in the name of an attribute stands for
    `-`. Attributes that are None are left out."""
    given = "".join(
        f' {"class" if key == "kind" else key.replace("_", "-")}="{joined(str(value))}"'
        for key, value in attributes.items()
        if value is not None and (value or key != "kind")
    )
    return Html(f"<{name}{given}>{joined(contents)}</{name}>")


def paragraph(*contents: Content, kind: str = "") -> Html:
    inside = joined(contents)
    return element("p", inside, kind=kind) if inside else inside


def remark(*contents: Content) -> Html:
    return paragraph(contents, kind="note")


def graded(text: str, good: bool) -> Html:
    return element("strong", text, kind="good" if good else "bad")


def section(name: str, title: str, *contents: Content) -> Html:
    inside = joined(contents)
    return element("section", element("h2", title), inside, id=name) if inside else inside


def table(
    columns: Sequence[Column | str],
    rows: Iterable[Sequence[Content]],
    *,
    caption: str = "",
    kind: str = "",
    box: str = "wide card",
    row_heads: bool = False,
) -> Html:
    """Return a table in a box that scrolls; empty if the table has no rows. With `row_heads`, the
    first cell is the heading of its row."""
    heads = [each if isinstance(each, Column) else Column(each, number=False) for each in columns]
    body = []
    for row in rows:
        cells = []
        for place, cell in enumerate(row):
            is_number = place < len(heads) and heads[place].number
            if isinstance(cell, Html) and cell.startswith(("<td", "<th")):
                cells.append(cell)
            elif row_heads and not place:
                cells.append(element("th", cell, scope="row"))
            else:
                cells.append(element("td", cell, kind="number" if is_number else ""))
        body.append(element("tr", cells, **(row.attributes if isinstance(row, Row) else {})))
    if not body:
        return Html()
    titles = [element("th", each.name, scope="col", kind="number" * each.number) for each in heads]
    head = element("thead", element("tr", titles)) if heads else None
    name = element("caption", caption) if caption else None
    return element("div", element("table", name, head, element("tbody", body), kind=kind), kind=box)


def legend_key(name: Content, mark: str, colour: str | None = None, **attributes: Any) -> Html:
    style = None if colour is None else f"--colour:var(--{colour})"
    return element("span", element("b", kind=mark, style=style), name, kind="key", **attributes)


def swatch(colour: str) -> Html:
    return element("b", kind="swatch", style=f"--colour:var(--{colour})")


def tiles(values: Iterable[tuple[str, Content]]) -> Html:
    items = [element("div", element("dt", name), element("dd", value)) for name, value in values]
    return element("dl", items, kind="tiles")


def bar(parts: Iterable[tuple[str, float, str]], longest: float) -> Html:
    """Return a bar of parts side by side. A part is (colour, value, tooltip). `longest` is the
    value of a full bar."""
    inside = []
    for colour, value, tip in parts:
        style = f"--colour:var(--{colour});width:{100 * value / longest:.2f}%"
        inside.append(element("b", style=style, title=tip or None))
    return element("div", inside, kind="bar")
