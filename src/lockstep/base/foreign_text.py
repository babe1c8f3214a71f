"""Shows text from untrusted sources, and escapes its control codes. The text may be a name, an
error message, or the output of a script."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_CODES = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """Remove colours, and escape all remaining control characters."""
    if text.isascii() and text.isprintable():
        return text
    plain = _COLOURS.sub("", text).replace("\r\n", "\n")
    return _CODES.sub(lambda match: match[0].encode("unicode_escape").decode(), plain)


def one_line(text: str) -> str:
    """Escape line breaks. A second line could be mistaken for a message of lockstep."""
    return printable(text).replace("\n", "\\n")


def show(text: str) -> None:
    print(printable(text))


def console(width: int) -> Console:
    """Return a console on stdout that interprets no markup. `width` is used unless stdout is a
    terminal."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

    class PrintableConsole(Console):
        # control characters are removed before the text's width is measured
        def render_str(self, text: str, **given: Any) -> Text:
            return super().render_str(printable(text), **given)

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Any:
            for segment in super().render(renderable, options):
                yield (
                    segment if segment.control else Segment(printable(segment.text), segment.style)
                )

    return PrintableConsole(
        file=sys.stdout,
        width=None if sys.stdout.isatty() else width,
        highlight=False,
        markup=False,
        emoji=False,
    )
