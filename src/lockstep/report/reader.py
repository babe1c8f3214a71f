"""Read run directories, without writing anything there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.base.container import process_id_space
from lockstep.base.errors import RunDirectoryError
from lockstep.report.history import LockHolder, MemoryProfile, RunHistory, curves, memory_profile, rank_times, run_events

_RUN_FILE = "run.json"
_LATEST_TIME_SECONDS = 2.5e11
"""Latest valid time, in seconds since 1970: the year 9892."""
_MOST_BITS = 62
"""Bits of the largest valid integer."""


def read_runs(paths: Sequence[str]) -> list[RunHistory]:
    """Read several run directories. Raises `RunDirectoryError` if one is invalid, unreadable, or given twice."""
    folders: dict[Path, str] = {}
    for path in paths:
        folder = Path(path).resolve()
        if folder in folders:
            raise RunDirectoryError(f"{path} and {folders[folder]} are the same run directory; give each once")
        folders[folder] = path
        _check(path)
    return [read_run(folder, name) for folder, name in zip(folders, _names(list(folders)), strict=True)]


def read_run(folder: Path, name: str) -> RunHistory:
    """Read one run directory. A missing file counts as empty. `name`: the run's name on the page."""
    with _readable(folder):
        unreadable: dict[str, int] = {}
        metadata = _json(folder / _RUN_FILE, recipe=dict, plan=dict, environment=dict)
        result = _json(folder / "result.json", steps=int, fingerprint=str) if (folder / "result.json").is_file() else None

        def rows(file: str, fits: Callable[[Mapping[str, Any]], bool]) -> Iterator[dict[str, Any]]:
            return _rows(folder / file, fits, unreadable)

        return RunHistory(
            name=name,
            path=str(folder),
            metadata=metadata,
            result=result,
            curves=curves(rows("metrics.jsonl", _is_metrics_row)),
            ranks=rank_times(rows("ranks.jsonl", _is_ranks_row)),
            events=run_events(rows("events.jsonl", _is_event_row)),
            holder=_holder(folder / "lock"),
            memory=_memory(folder, unreadable),
            unreadable=unreadable,
        )


def _is_metrics_row(row: Mapping[str, Any]) -> bool:
    values = (value for name, value in row.items() if name != "not_finite")
    return _is_time(row["time"]) and isinstance(row.get("not_finite", {}), dict) and all(v is None or _is_number(v) for v in values)


def _is_ranks_row(row: Mapping[str, Any]) -> bool:
    lists = row["ranks"].values()
    return all(isinstance(each, list) and all(value is None or _is_number(value) for value in each) for each in lists)


def _is_event_row(row: Mapping[str, Any]) -> bool:
    return isinstance(row["event"], str) and _is_time(row["time"])


def _rows(path: Path, fits: Callable[[Mapping[str, Any]], bool], unreadable: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the valid lines, which all have a step. Counts invalid ones in `unreadable`, but no last line without a
    line end: it is being written, or the run was killed while it wrote."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
                is_valid = isinstance(row, dict) and type(row["step"]) is int and _is_number(row["step"]) and fits(row)
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
                is_valid = False
            if is_valid:
                yield row
            elif line.endswith("\n"):
                unreadable[path.name] = unreadable.get(path.name, 0) + 1


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and value.bit_length() <= _MOST_BITS)


def _is_time(value: Any) -> bool:
    return _is_number(value) and 0 <= value < _LATEST_TIME_SECONDS


def _check(path: str) -> None:
    with _readable(path):
        folder = Path(path)
        if not folder.exists():
            raise RunDirectoryError(f"{path} does not exist; a report needs run directories; give one that a run has written to")
        if not folder.is_dir():
            raise RunDirectoryError(f"{path} is a file; a report needs run directories; give the folder that contains it")
        if not (folder / _RUN_FILE).is_file():
            inside = sorted(found.parent.name for found in folder.glob(f"*/{_RUN_FILE}"))
            remedy = f"give one of those in it, {', '.join(inside[:4])}{', ...' if len(inside) > 4 else ''}" if inside else "give another"
            raise RunDirectoryError(f"{path} is not a run directory: it has no {_RUN_FILE}, which a run writes when it starts; {remedy}")


def _json(path: Path, **kinds: type) -> dict[str, Any]:
    """Read a JSON object. `kinds`: types that its values must have, if present."""
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise RunDirectoryError(f"{path} is not valid JSON ({error}); a run never writes it in part; give another run directory") from None
    if not isinstance(found, dict):
        raise RunDirectoryError(f"{path} holds a {type(found).__name__}; a run writes an object there; give another run directory")
    for name, kind in kinds.items():
        if not isinstance(found.get(name), kind | None):
            raise RunDirectoryError(
                f"{path} has {type(found[name]).__name__} as {name!r}, but a run writes {kind.__name__}; give another run directory"
            )
    return found


def _memory(folder: Path, unreadable: dict[str, int]) -> MemoryProfile | None:
    """Read the memory of the profiled steps. Counts its one line in `unreadable` if that is invalid."""
    path = folder / "profile" / "memory.json"
    if not path.is_file():
        return None
    try:
        return memory_profile(json.loads(path.read_text(encoding="utf-8", errors="replace")))
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError):
        unreadable["profile/memory.json"] = 1
        return None


def _holder(path: Path) -> LockHolder | None:
    """Return the process that holds the directory. Trying the lock could refuse a run that starts at that moment."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        pid, host = int(values["pid"]), str(values["host"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return LockHolder(pid, host, _is_alive(pid) if values.get("process_ids") == process_id_space() else None)


def _is_alive(pid: int) -> bool | None:
    """True if there is such a process on this machine; None on Windows, where asking could interrupt it."""
    if sys.platform == "win32":
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the last parts of each path: as few as make the names unique."""
    for length in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return names


@contextmanager
def _readable(what: Path | str) -> Iterator[None]:
    """Turn any `OSError` of the block into a `RunDirectoryError`."""
    try:
        yield
    except OSError as error:
        where = error.filename or what
        raise RunDirectoryError(f"{where} cannot be read ({error.strerror}); check that it exists and that you may read it") from error
