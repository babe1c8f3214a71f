"""The ways out for texts that others may have written: to a terminal and to an HTML page. Neither
executes them.

Event reasons, names of metrics, outputs of scripts and names of files can hold codes that move a
terminal's cursor, set its title or its clipboard, and tags. Everything that a command prints goes
through `show`, `say` or `console`, and everything that a page holds through `escape`.
"""

from __future__ import annotations

import html
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_CODES = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Control characters but tabs and line ends, those that turn the direction of writing, invisible
ones, and halves of pairs."""


def printable(text: str) -> str:
    """Return a text without colours, and with other control characters as Python writes them:
    \\x1b."""
    if text.isascii() and text.isprintable():
        return text
    plain = _COLOURS.sub("", text).replace("\r\n", "\n")
    return _CODES.sub(lambda match: match[0].encode("unicode_escape").decode(), plain)


def one_line(text: str) -> str:
    """Return a text as `printable` does, in one line: a second line could pass for lockstep's
    own."""
    return printable(text).replace("\n", "\\n")


def escape(value: object) -> str:
    """Return a value as text for an HTML page: between tags, or in quotes as the value of an
    attribute."""
    return html.escape(printable(str(value)), quote=True)


def show(text: str) -> None:
    """Print a text on stdout."""
    print(printable(text))


def console(width: int | None) -> Console:
    """Return a console on stdout, on which texts are no markup. `width`: None if the terminal's."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

    class PrintableConsole(Console):
        def render_str(self, text: str, **given: Any) -> Text:  # before its width is measured
            return super().render_str(printable(text), **given)

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Any:
            for segment in super().render(renderable, options):
                yield (
                    segment if segment.control else Segment(printable(segment.text), segment.style)
                )

    return PrintableConsole(
        file=sys.stdout, width=width, highlight=False, markup=False, emoji=False
    )
