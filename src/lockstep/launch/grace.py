"""What a worker and its launcher say to each other about the end, by files in the launcher's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_needs_time: Path | None = None
_is_over: Path | None = None


def tell_by(needs_time: Path, is_over: Path) -> None:
    """Say where these files are: the one that this worker makes, and the launcher's. Called once, before the user's code runs."""
    global _needs_time, _is_over
    _needs_time, _is_over = needs_time, is_over


@contextmanager
def needing_time() -> Iterator[None]:
    """Within it, the launcher does not kill this process for being slow to end."""
    if _needs_time is None:
        yield
        return
    _needs_time.touch()
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            _needs_time.unlink()


def is_over() -> bool:
    """Whether the launcher ends the run because a worker failed: then it is no time for another step."""
    return _is_over is not None and _is_over.exists()
