"""Reads run directories, and never writes to them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.base.container import process_id_space
from lockstep.base.errors import RunDirectoryError, first_few
from lockstep.base.files import MOST_BITS, read_object
from lockstep.logging.run_files import (
    CHECKSUM,
    EVENTS,
    EXPERTS,
    METRICS,
    RANKS,
    RUN,
    is_there,
    read_metadata,
    read_result,
    read_rows,
    readable,
)
from lockstep.report.history import (
    LockHolder,
    MemoryProfile,
    RunHistory,
    load_history,
    memory_profile,
    metric_curves,
    rank_times,
    run_events,
)

_LATEST_TIME_SECONDS = 2.5e11
_MOST_PROCESS_ID = 2**31
_MOST_MEMORY_BYTES = 64 << 20
_MEMORY = "profile/memory.json"


def read_runs(paths: Sequence[str]) -> list[RunHistory]:
    folders: dict[Path, str] = {}
    for path in paths:
        folder = Path(os.path.realpath(path))
        if folder in folders:
            raise RunDirectoryError(
                f"{path} and {folders[folder]} are the same run directory; give each once"
            )
        folders[folder] = path
        _check(path)
    return list(map(read_run, folders, _names(list(folders))))


def read_run(folder: Path, name: str) -> RunHistory:
    unreadable: dict[str, int] = {}

    def rows(file: str, fits: Callable[[Mapping[str, Any]], bool]) -> Iterator[dict[str, Any]]:
        return read_rows(folder, file, fits, unreadable)

    return RunHistory(
        name=name,
        path=str(folder),
        metadata=read_metadata(folder),
        result=read_result(folder),
        curves=metric_curves(rows(METRICS, _is_metrics_row)),
        ranks=rank_times(rows(RANKS, _is_ranks_row)),
        loads=load_history(rows(EXPERTS, _is_experts_row)),
        events=run_events(rows(EVENTS, _is_event_row)),
        holder=_holder(folder),
        memory=_memory(folder, unreadable),
        unreadable=unreadable,
    )


def _is_metrics_row(row: Mapping[str, Any]) -> bool:
    not_finite = row.get("not_finite", {})
    return (
        _is_time(row["time"])
        and isinstance(not_finite, dict)
        and all(value in ("nan", "inf", "-inf") for value in not_finite.values())
        and _are_numbers(
            value for name, value in row.items() if name not in ("not_finite", CHECKSUM)
        )
    )


def _is_ranks_row(row: Mapping[str, Any]) -> bool:
    hosts = row.get("hosts", [])
    return (
        isinstance(hosts, list)
        and all(isinstance(host, str) for host in hosts)
        and all(isinstance(each, list) and _are_numbers(each) for each in row["ranks"].values())
    )


def _is_experts_row(row: Mapping[str, Any]) -> bool:
    return all(isinstance(each, list) and _are_numbers(each) for each in row["loads"].values())


def _is_event_row(row: Mapping[str, Any]) -> bool:
    return isinstance(row["event"], str) and _is_time(row["time"])


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and value.bit_length() <= MOST_BITS)


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(value is None or _is_number(value) for value in values)


def _is_time(value: Any) -> bool:
    return _is_number(value) and 0 <= value < _LATEST_TIME_SECONDS


def _check(path: str) -> None:
    with readable(path):
        folder = Path(path)
        if not folder.exists():
            raise RunDirectoryError(
                f"{path} does not exist; a report needs run directories; give one that a run has"
                " written to"
            )
        if not folder.is_dir():
            raise RunDirectoryError(
                f"{path} is a file; a report needs run directories; give the folder that"
                " contains it"
            )
        if not (folder / RUN).is_file():
            inside = sorted(found.parent.name for found in folder.glob(f"*/{RUN}"))
            remedy = "give another"
            if inside:
                remedy = f"give one of those in it, {first_few(inside)}"
            raise RunDirectoryError(
                f"{path} is not a run directory: it has no {RUN}, which a run writes when it"
                f" starts; {remedy}"
            )


def _memory(folder: Path, unreadable: dict[str, int]) -> MemoryProfile | None:
    if not is_there(folder, _MEMORY):
        return None
    try:
        with readable(folder / _MEMORY):
            return memory_profile(read_object(folder, _MEMORY, _MOST_MEMORY_BYTES))
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError):
        unreadable[_MEMORY] = 1
        return None


def _holder(folder: Path) -> LockHolder | None:
    """Read the lock file without locking it. Taking the lock could make a starting run fail."""
    try:
        values = read_object(folder, "lock", 4096)
        pid, host = values["pid"], str(values["host"])
    except (OSError, ValueError, KeyError):
        return None
    if type(pid) is not int or not 0 < pid < _MOST_PROCESS_ID:
        return None
    is_here = values.get("process_ids") == process_id_space()
    return LockHolder(pid, host, _is_alive(pid) if is_here else None)


def _is_alive(pid: int) -> bool | None:
    """Return None on Windows, where the check could interrupt the process."""
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
    for length in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return names
