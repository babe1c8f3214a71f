"""Reads an untrusted run directory. Accepts only regular files of limited size, whose values have
the right types. Does not import torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from lockstep.base.errors import RunDirectoryError
from lockstep.base.files import (
    MOST_BITS,
    NUMBER,
    check_kinds,
    lines_below,
    read_object,
)

RUN, RESULT, METRICS, RANKS, EXPERTS, EVENTS = (
    "run.json",
    "result.json",
    "metrics.jsonl",
    "ranks.jsonl",
    "experts.jsonl",
    "events.jsonl",
)
CHECKSUM = "gradient_checksum"
"""The gradient's checksum, the only text value in metrics.jsonl: 16 hexadecimal digits."""
RESERVED_NAMES = frozenset({"step", "time", "not_finite", CHECKSUM})
"""Keys of a line of metrics.jsonl that are not metrics."""
_RUN_KINDS = {
    "recipe": dict, "plan": {"text": str}, "world_size": int, "checkpoints": str,
    "place_in_script": int,
    "environment": {"host": str, "device": {"name": str}, "command_line": list,
    "working_directory": str},
}  # fmt: skip
_RESULT_KINDS = {
    "steps": int, "fingerprint": str, "plan": str, "world_size": int, "metrics": dict,
    "best": {"metric": str, "value": NUMBER, "step": int, "checkpoint": str},
}  # fmt: skip


def read_metadata(folder: Path) -> dict[str, Any]:
    return _read(folder, RUN, _RUN_KINDS)


def read_result(folder: Path) -> dict[str, Any] | None:
    """Return None if the run has not ended."""
    return _read(folder, RESULT, _RESULT_KINDS) if is_there(folder, RESULT) else None


def read_rows(
    folder: Path, name: str, fits: Callable[[Mapping[str, Any]], bool], unreadable: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """Yield the rows that have a step, and for which `fits` returns True. Counts all remaining
    lines in `unreadable`, except an incomplete last line."""
    if not is_there(folder, name):
        return
    with readable(folder / name):
        for line in lines_below(folder, name):
            try:
                row = json.loads(line)
                is_valid = isinstance(row, dict) and is_count(row["step"]) and fits(row)
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
                is_valid = False
            if is_valid:
                yield row
            elif not line or line.endswith("\n"):
                unreadable[name] = unreadable.get(name, 0) + 1


def is_there(folder: Path, name: str) -> bool:
    """True if the file exists. Also true for a broken link."""
    return os.path.lexists(folder / name)


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0 and value.bit_length() <= MOST_BITS


@contextmanager
def readable(what: Path | str) -> Iterator[None]:
    """Convert an `OSError` into a `RunDirectoryError`. The error's text names the file, or
    `what`."""
    try:
        yield
    except OSError as error:
        where = error.filename or what
        raise RunDirectoryError(
            f"{where} cannot be read ({error.strerror}); a run writes regular files; check the"
            " file's type and your permission to read it"
        ) from error


def _read(folder: Path, name: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    path = folder / name
    try:
        with readable(path):
            found = read_object(folder, name)
    except ValueError as error:
        raise RunDirectoryError(
            f"{path} is not valid JSON ({error}); a run never writes it in part; give another run"
            " directory"
        ) from None
    try:
        check_kinds(found, kinds)
    except ValueError as error:
        raise RunDirectoryError(f"{path} {error}; give another run directory") from None
    return found


def default_run_path(script: str | None, now: datetime) -> Path:
    """Return `runs/<script>-<date>-<time>`, numbered if the folder exists."""
    stem = Path(script).stem if script and not script.startswith("-") else "run"
    first = Path("runs") / f"{stem}-{now:%Y%m%d-%H%M%S}"
    return next(
        path for path in (numbered(first, number) for number in count(1)) if not path.exists()
    )


def numbered(path: Path, number: int) -> Path:
    return path if number == 1 else path.with_name(f"{path.name}-{number}")
