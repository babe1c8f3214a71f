"""Makes temporary folders, and removes folders of killed processes. Reads only folders and files
that this user owns, without following links and without blocking."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lockstep.base.errors import LaunchError
from lockstep.base.files import try_lock
from lockstep.base.system import signals_blocked

_NAME = re.compile(r"lockstep-([a-z]+-)?[a-z0-9_]{8}")
_ALIVE = "alive"
"""The file that a process keeps locked while it uses the folder."""
_NEW = "new"
_EMPTY_SECONDS = 60.0
"""Age at which a folder without a locked file is removed."""
_REGULAR_ONLY: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class _OwnFolder:
    def __init__(self, prefix: str) -> None:
        self._process = os.getpid()
        self._temporary = tempfile.TemporaryDirectory(prefix=prefix)
        self.path = Path(self._temporary.name)
        unlocked = self.path / _NEW
        self._descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT)
        try_lock(self._descriptor, shared=True)
        unlocked.rename(self.path / _ALIVE)  # locked before another process can find it
        # at the end of a fork, this finalizer would remove the folder
        self._temporary._finalizer.detach()  # type: ignore[attr-defined]

    def remove(self) -> None:
        if os.getpid() != self._process:
            return  # this process is a fork, which has only a copy of this object
        os.close(self._descriptor)
        with suppress(OSError):  # `cleanup` also removes from folders without write permission
            _empty(self.path)
        self._temporary.cleanup()


_own: list[_OwnFolder] = []


@contextmanager
def locked_folder(prefix: str = "lockstep-") -> Iterator[Path]:
    """Make a temporary folder for a `with` block. Also removes the folders of killed processes."""
    with ExitStack() as stack:
        with signals_blocked():
            folder = _make(prefix)
            stack.callback(_remove, folder)
        yield folder.path


def _make(prefix: str) -> _OwnFolder:
    try:
        remove_left_folders(Path(tempfile.gettempdir()))
        folder = _OwnFolder(prefix)
    except OSError as error:
        raise LaunchError(
            "no temporary folder can be made:"
            f" {error.strerror}{f' ({error.filename})' if error.filename else ''}; lockstep's"
            " processes exchange files there; set TMPDIR to a writable folder with free space"
        ) from None
    if not _own:
        atexit.register(remove_own_folders)
    _own.append(folder)
    return folder


def _remove(folder: _OwnFolder) -> None:
    with signals_blocked():  # an exception or the end by a signal would leave a part of the folder
        if folder not in _own:
            return  # already done by `remove_own_folders`
        _own.remove(folder)
        folder.remove()
        if not _own:
            atexit.unregister(remove_own_folders)


def remove_own_folders() -> None:
    """Remove this process's temporary folders. Registered with atexit. A process must call this
    function before `os._exit`."""
    for folder in list(_own):
        _remove(folder)


def hold_folder(folder: Path) -> int | None:
    """Keep the `locked_folder` of another process, even if that process is killed. Returns the
    descriptor of the lock."""
    with suppress(OSError):
        descriptor = _open_own(folder / _ALIVE)
        try_lock(descriptor, shared=True)
        return descriptor
    return None


def remove_left_folders(parent: Path) -> None:
    with suppress(OSError), os.scandir(parent) as entries:
        for name in [entry.name for entry in entries if _NAME.fullmatch(entry.name)]:
            _remove_if_left(parent / name)


def _remove_if_left(folder: Path) -> None:
    with suppress(OSError):  # another user's folder, or another process was faster
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or not _is_own(status):
            return
        if time.time() - status.st_mtime > _EMPTY_SECONDS:
            with suppress(OSError):  # it is not empty
                if os.listdir(folder) == [_NEW]:
                    os.unlink(folder / _NEW)
                folder.rmdir()
        descriptor = _open_own(folder / _ALIVE)
        try:
            try_lock(descriptor)
            _empty(folder)
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)


def _empty(folder: Path) -> None:
    """Remove everything except the file `alive`."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry)
            elif entry.name != _ALIVE:
                os.unlink(entry)


def _open_own(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | _REGULAR_ONLY)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and _is_own(status):
        return descriptor
    os.close(descriptor)
    raise PermissionError(f"{path} is not a file of this user")


def _is_own(found: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or found.st_uid == os.geteuid()
