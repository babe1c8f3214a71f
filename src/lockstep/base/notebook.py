"""Writes output of the kernel process and its forked worker processes to a notebook cell."""

from __future__ import annotations

import io
import sys
from typing import TextIO


class WholeLines(io.TextIOBase):
    """A text stream that writes whole lines to `stream`. `print` makes several writes for a line,
    so the lines of several processes would mix."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._rest = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    def fileno(self) -> int:
        return self.stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        lines, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self.stream.write(lines + newline)
        return len(text)

    def flush(self) -> None:
        rest, self._rest = self._rest, ""
        if rest:
            self.stream.write(rest)
        self.stream.flush()


def is_notebook(stream: object) -> bool:
    if isinstance(stream, WholeLines):
        stream = stream.stream
    return type(stream).__module__.partition(".")[0] == "ipykernel"


def progress_stream() -> TextIO | None:
    """Return stdout in a notebook, which shows stderr on red. Return stderr outside of a
    notebook."""
    return sys.stdout if is_notebook(sys.stdout) else sys.stderr
