"""What a worker and its launcher say to each other about the end, by files in the launcher's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.launch.failure import Record

_needs_time: Path | None = None
_is_over: Path | None = None
_again: Path | None = None
_passed_on: Path | None = None
_record: Path | None = None


def tell_by(needs_time: Path, is_over: Path, again: Path, passed_on: Path, record: Path) -> None:
    """Say where these files are: the launcher's `is_over` and `passed_on`, and those that this worker makes. Called once, before the
    user's code runs."""
    global _needs_time, _is_over, _again, _passed_on, _record
    _needs_time, _is_over, _again, _passed_on, _record = needs_time, is_over, again, passed_on, record


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


def ask_again(why: str) -> None:
    """Have the launcher start the run again after the failure that ends it, and not count that: something was changed for it."""
    if _again is not None:
        part = _again.with_suffix(".part")
        part.write_text(why, encoding="utf-8")
        part.replace(_again)


def tell_failure(record: Record) -> None:
    """Leave the record of a failure that ends this process from another thread than its main one."""
    if _record is not None:
        record.write(_record)


def is_over() -> bool:
    """Whether the launcher ends the run because a worker failed: then it is no time for another step."""
    return _is_over is not None and _is_over.exists()


def is_passed_on() -> bool:
    """Whether the launcher has passed a signal on, which this process may have got itself too: Slurm signals all processes of a job."""
    return _passed_on is not None and _passed_on.exists()
