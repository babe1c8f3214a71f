"""Reads run directories, and writes nothing there."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.base.errors import RunDirectoryError
from lockstep.report.history import Curves, Holder, RankTimes, Run, curves, happened, rank_times

_OF_THE_RUN = "run.json"
_END_OF_TIME_SECONDS = 2.5e11
"""Since 1970: the year 9892."""
_MOST_BITS = 62
"""Of a whole number: what a run counts is less."""


def read_runs(paths: Sequence[str]) -> list[Run]:
    """Raises `RunDirectoryError` where one is no run directory, stands there twice, or cannot be read."""
    folders: dict[Path, str] = {}
    for path in paths:
        folder = Path(path).resolve()
        if folder in folders:
            raise RunDirectoryError(f"{path} and {folders[folder]} are one run directory; a run is compared with others; give each once")
        folders[folder] = path
        _check(path)
    return [read_run(folder, name) for folder, name in zip(folders, _names(list(folders)), strict=True)]


def read_run(folder: Path, name: str) -> Run:
    """`name`: what it is called on the page. A file that is not there is an empty one."""
    with _readable(folder):
        unreadable: dict[str, int] = {}
        facts = _json(folder / _OF_THE_RUN, recipe=dict, plan=dict, environment=dict)
        result = _json(folder / "result.json", steps=int, fingerprint=str) if (folder / "result.json").is_file() else None

        def rows(file: str, fits: Callable[[Mapping[str, Any]], bool]) -> Iterator[dict[str, Any]]:
            return _rows(folder / file, fits, unreadable)

        return Run(
            name=name,
            path=str(folder),
            facts=facts,
            result=result,
            curves=_curves(rows),
            ranks=_rank_times(rows),
            events=happened(rows("events.jsonl", lambda row: isinstance(row["event"], str) and _is_time(row["time"]))),
            holder=_holder(folder / "lock"),
            unreadable=unreadable,
        )


_Rows = Callable[[str, Callable[[Mapping[str, Any]], bool]], Iterator[dict[str, Any]]]


def _curves(rows: _Rows) -> Curves:
    def fits(row: Mapping[str, Any]) -> bool:
        values = (value for name, value in row.items() if name != "not_finite")
        return _is_time(row["time"]) and isinstance(row.get("not_finite", {}), dict) and all(v is None or _is_number(v) for v in values)

    return curves(rows("metrics.jsonl", fits))


def _rank_times(rows: _Rows) -> RankTimes:
    def fits(row: Mapping[str, Any]) -> bool:
        lists = row["ranks"].values()
        return all(isinstance(each, list) and all(value is None or _is_number(value) for value in each) for each in lists)

    return rank_times(rows("ranks.jsonl", fits))


def _rows(path: Path, fits: Callable[[Mapping[str, Any]], bool], unreadable: dict[str, int]) -> Iterator[dict[str, Any]]:
    """The lines that are as a run writes them, which all have a step. A last line without an end is being written, or was when the
    run was killed; others are counted in `unreadable`."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
                is_one = isinstance(row, dict) and type(row["step"]) is int and _is_number(row["step"]) and fits(row)
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
                is_one = False
            if is_one:
                yield row
            elif line.endswith("\n"):
                unreadable[path.name] = unreadable.get(path.name, 0) + 1


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and value.bit_length() <= _MOST_BITS)


def _is_time(value: Any) -> bool:
    return _is_number(value) and 0 <= value < _END_OF_TIME_SECONDS


def _check(path: str) -> None:
    with _readable(path):
        folder = Path(path)
        if not folder.exists():
            raise RunDirectoryError(f"{path} is not there; a report is made of run directories; give one that a run has written to")
        if not folder.is_dir():
            raise RunDirectoryError(f"{path} is a file; a report is made of run directories; give the folder that it is in")
        if not (folder / _OF_THE_RUN).is_file():
            inside = sorted(found.parent.name for found in folder.glob(f"*/{_OF_THE_RUN}"))
            remedy = f"give one of those in it, {', '.join(inside[:4])}{', ...' if len(inside) > 4 else ''}" if inside else "give another"
            raise RunDirectoryError(f"{path} is no run directory: it has no {_OF_THE_RUN}, which a run writes when it starts; {remedy}")


def _json(path: Path, **kinds: type) -> dict[str, Any]:
    """`kinds`: of values in it, where they are there."""
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise RunDirectoryError(f"{path} is no JSON ({error}); a run writes it whole; give another run directory") from None
    if not isinstance(found, dict):
        raise RunDirectoryError(f"{path} holds a {type(found).__name__}; a run writes an object there; give another run directory")
    for name, kind in kinds.items():
        if not isinstance(found.get(name), kind | None):
            raise RunDirectoryError(
                f"{path} has {type(found[name]).__name__} as {name!r}, where a run writes {kind.__name__}; give another run directory"
            )
    return found


def _holder(path: Path) -> Holder | None:
    """Who holds the directory. The lock itself is not tried: a run that starts at that moment would be refused."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        pid, host = int(said["pid"]), str(said["host"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return Holder(pid, host, _is_alive(pid) if host == socket.gethostname() else None)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths: as many as tell them apart."""
    for length in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return names


@contextmanager
def _readable(what: Path | str) -> Iterator[None]:
    """Within it, what the system says becomes a `RunDirectoryError`."""
    try:
        yield
    except OSError as error:
        where = error.filename or what
        raise RunDirectoryError(f"{where} cannot be read ({error.strerror}); see that it is there, and yours to read") from error
