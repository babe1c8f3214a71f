"""The output of a notebook's cell, to which the kernel and the processes forked from it write."""

from __future__ import annotations

import io
import sys
from typing import TextIO


class WholeLines(io.TextIOBase):
    """A stream that passes on whole lines, and the rest when it is flushed, so that those of
    several processes do not mix: a notebook's stream passes on each write by itself, and `print`
    makes several."""

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
    """True if the stream is shown below a notebook's cell, where a carriage return begins its last
    line anew."""
    if isinstance(stream, WholeLines):
        stream = stream.stream
    return type(stream).__module__.partition(".")[0] == "ipykernel"


def progress_stream() -> TextIO | None:
    """The stream for a progress display: stderr, but in a notebook, which shows it on red, stdout.
    None if there is none."""
    return sys.stdout if is_notebook(sys.stdout) else sys.stderr
