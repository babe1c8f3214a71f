"""Atomic file writes, file locks, and safe reads of untrusted files. Refuses links, FIFOs and
devices without blocking. All errors are `OSError`s."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from lockstep.base.system import BINARY


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file, so that readers see either the old content or the new content. After a crash,
    the file has either the old content or the new content."""
    with replace_atomically(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield the path of an empty temporary file. At the end of the `with`, the file is synced and
    renamed to `path`."""
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")
    try:
        temporary.touch(exist_ok=False)
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    if sys.platform == "win32" and path.is_dir():
        return  # Windows has no such call for folders
    descriptor = os.open(path, (os.O_RDWR if sys.platform == "win32" else os.O_RDONLY) | BINARY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_LOCKED_BYTE = 1 << 30
"""Position of the locked byte. The locked byte is after the content, because Windows hides locked
bytes from all other processes."""


def try_lock(descriptor: int, *, shared: bool = False) -> None:
    """Lock a file until it is closed. Raises `BlockingIOError` if another process holds the lock.
    Raises `OSError` if the file system has no locks. Windows has no shared locks."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(error.errno, error.strerror) from None
    else:
        import fcntl

        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


T = TypeVar("T")
MOST_BYTES = 4 << 20
"""Maximum size of a JSON file such as `run.json`, and of one line of a log."""
MOST_DEPTH = 64
MOST_BITS = 62
NUMBER = (int, float)
_SAFE = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | BINARY
)
_FOLDER = getattr(os, "O_DIRECTORY", 0)
_BY_FOLDER = os.open in os.supports_dir_fd
"""True if the system can open a file relative to an open folder. Opening relative to a folder
protects the path against replacement by a link."""


def open_below(folder: Path, name: str, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file. No part of the file's path below `folder` may be a link."""
    path = folder / name
    if not _BY_FOLDER:
        return _checked(_open_unless_link(path, flags, mode), path)
    *parents, last = name.split("/")
    at = os.open(folder, os.O_RDONLY | _FOLDER)
    try:
        for parent in parents:
            at, outer = _open_part(parent, os.O_RDONLY | _FOLDER, mode, at, path), at
            os.close(outer)
        return _checked(_open_part(last, flags, mode, at, path), path)
    finally:
        os.close(at)


def open_named(path: Path) -> int:
    """Open a regular file that the user named. The file may be a link."""
    return _checked(os.open(path, os.O_RDONLY | (_SAFE & ~getattr(os, "O_NOFOLLOW", 0))), path)


def read_below(folder: Path, name: str, most_bytes: int) -> bytes:
    with open(open_below(folder, name), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > most_bytes else file.read(most_bytes + 1)
    if max(size, len(content)) > most_bytes:
        raise OSError(
            errno.EFBIG,
            f"it has {size:,} bytes, and a run writes {most_bytes:,} at most",
            str(folder / name),
        )
    return content


def read_object(folder: Path, name: str, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    return parse_object(read_below(folder, name, most_bytes).decode(errors="surrogateescape"))


def parse_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}, and not an object")
    level: list[Any] = [found]
    for _ in range(MOST_DEPTH):
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        level = [value for values in inside for value in values if isinstance(value, dict | list)]
        if not level:
            return found
    raise ValueError("its values are nested too deep")


def finite(value: Any, not_finite: dict[str, str] | None = None, path: str = "") -> Any:
    """Return JSON values with None for each NaN and infinity. `not_finite` gets the text of each
    replaced value (such as "nan"), by path."""
    if isinstance(value, Mapping):
        prefix = f"{path}." if path else ""
        return {key: finite(item, not_finite, f"{prefix}{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item, not_finite, f"{path}[{place}]") for place, item in enumerate(value)]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if not_finite is not None:
        not_finite[path] = str(value)
    return None


def check_kinds(found: Mapping[str, Any], kinds: Mapping[str, Any], path: str = "") -> None:
    for name, kind in kinds.items():
        value, inside = found.get(name), isinstance(kind, Mapping)
        if value is None:
            continue
        is_right = isinstance(value, dict if inside else kind) and (
            type(value) is not bool or kind is bool
        )
        if not is_right or (type(value) is int and value.bit_length() > MOST_BITS):
            expected = "an object" if inside else "a number" if kind is NUMBER else kind.__name__
            raise ValueError(
                f"has {type(value).__name__} as {path + name!r}, but a run writes {expected}"
            )
        if inside:
            check_kinds(value, kind, f"{path}{name}.")


def lines_below(folder: Path, name: str) -> Iterator[str]:
    """Yield the lines of a file. A line longer than `MOST_BYTES` is yielded as "" and ends the
    iteration."""
    with open(open_below(folder, name), encoding="utf-8", errors="replace") as file:
        while line := file.readline(MOST_BYTES):
            if len(line) == MOST_BYTES and not line.endswith("\n"):
                yield ""
                return
            yield line


def _open_part(name: str, flags: int, mode: int, folder: int, path: Path) -> int:
    try:
        return os.open(name, flags | _SAFE, mode, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENOTDIR):
            what = "no folder, or a link to one" if error.errno == errno.ENOTDIR else "a link"
            raise OSError(errno.ELOOP, f"{name} is {what}", str(path)) from None
        if error.errno == errno.ENXIO:  # it is a FIFO, opened for writing
            raise OSError(errno.EINVAL, "it is not a regular file", str(path)) from None
        raise type(error)(error.errno, error.strerror, str(path)) from None


def _open_unless_link(path: Path, flags: int, mode: int) -> int:
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{path.name} is a link", str(path))
    return os.open(path, flags | _SAFE, mode)


def _checked(descriptor: int, path: Path) -> int:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def from_json(kind: type[T], values: Mapping[str, Any]) -> T:
    """Make a dataclass from JSON values. Raises `ValueError` if the values do not fit the
    fields."""
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(values.keys() - known.keys()):
        raise ValueError(f"it has no field {unknown[0]!r}")
    for name, each in known.items():
        if name not in values and each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{name!r} is missing")
    kinds = get_type_hints(kind)
    return kind(**{name: _value(kinds[name], value, name) for name, value in values.items()})


def _value(kind: Any, value: Any, name: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        (kind,) = [each for each in inner if each is not NoneType]
        return _value(kind, value, name)
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, dict):
        return {key: _value(inner[1], each, name) for key, each in value.items()}
    if origin is not None and not issubclass(origin, Mapping) and isinstance(value, list):
        return tuple(_value(inner[0], each, name) for each in value)
    if kind is Any:
        return value
    if type(value) is (str if kind is Path else kind) or (kind is float and type(value) is int):
        return kind(value)
    raise ValueError(f"{name!r} is {value!r}")
