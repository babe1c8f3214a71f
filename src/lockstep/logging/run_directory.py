"""The run directory: all files of one run. Only this run writes to the run directory. No file is
overwritten."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from lockstep.base import accelerator
from lockstep.base.closing import Closing
from lockstep.base.container import process_id_space, usable_cpus
from lockstep.base.errors import RecipeError, RunDirectoryError
from lockstep.base.files import (
    finite,
    open_below,
    parse_object,
    read_object,
    replace_atomically,
    try_lock,
    write_atomically,
)
from lockstep.base.version import __version__
from lockstep.logging.run_files import EVENTS, EXPERTS, METRICS, RANKS, RESULT, RUN

_RUN_FILES = (RUN, METRICS, RANKS, EXPERTS, EVENTS, RESULT, "model.safetensors")
_FOLDERS = ("checkpoints", "profile", "huggingface")
_FOLLOWED = "followed-by.txt"
_OTHER_FILES = ("out-of-memory.json", "output.txt", _FOLLOWED)
_PREFIXES = ("events.out.tfevents.", "hang-")
_LOCK = "lock"
Holder = dict[str, Any]
"""The process that holds the lock, and the time when the process acquired the lock."""
_SAVED_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
)

_ERROR_NUMBER = re.compile(r"\(os error (\d+)\)")


class RunDirectory(Closing):
    """A run directory to which only this process writes. The file `lock` has a kernel lock, which
    ends with the process."""

    def __init__(self, path: Path, lock: _FileLock, *, is_resumed: bool, extends: bool) -> None:
        self.path = path
        self._lock = lock
        self._extends = extends
        self.is_resumed = is_resumed
        self.has_ended = is_resumed and not extends and (path / RESULT).exists()
        """True if the resumed run has ended before, and is repeated from its last checkpoint."""

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        resume: bool = False,
        extend: bool = False,
        reopen: bool = False,
        lost_holders: Sequence[Holder] = (),
    ) -> RunDirectory:
        """Open a run directory. With `resume`, the directory may contain an unfinished run. With
        `extend`, the directory may contain an ended run, whose result `keep_result` renames. With
        `reopen`, the directory may contain an ended run that will have the same result, or an
        evaluation."""
        path = path.absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
            _check_kinds(path)
            lock = _FileLock.acquire(path / _LOCK, lost_holders)
        except (FileExistsError, NotADirectoryError):
            raise RunDirectoryError(
                f"run directory {path} is, or lies below, something that is not a folder; a run"
                " directory is a folder; choose another path"
            ) from None
        except OSError as error:
            raise RunDirectoryError(
                f"run directory {path} cannot be written to ({error.strerror}:"
                f" {error.filename or path}); a run directory is a folder in which files can be"
                " created and locked; choose another, or change its permissions"
            ) from error
        except ValueError as error:
            raise RunDirectoryError(
                f"run directory {str(path)!a} has a name that this system cannot write ({error}); a"
                f" name is made of what its locale can encode ({sys.getfilesystemencoding()} here);"
                " use plain letters, or set LC_ALL=C.UTF-8"
            ) from error
        outputs = (path / "checkpoints", path / "model.safetensors")
        resume |= reopen and not any(map(Path.exists, outputs))
        is_resumed = resume and (path / RUN).exists()
        extends = is_resumed and extend and (path / RESULT).exists()
        refused: Sequence[str] = (RESULT,) if is_resumed else _RUN_FILES
        if is_resumed and (reopen or extends):
            refused = ()
        for name in refused:
            # an empty file comes from a run that was killed at its start
            if (path / name).exists() and (path / name).stat().st_size:
                lock.release()
                ended, remedy = "", "choose another directory"
                if name == RESULT:
                    ended = " that has ended"
                    remedy = f"go on with more steps (--allow-change steps), {remedy}"
                raise RunDirectoryError(
                    f"run directory {path} already holds a run{ended} ({name}); nothing of an"
                    f" earlier run is overwritten; {remedy}, or remove this one"
                )
        return cls(path, lock, is_resumed=is_resumed, extends=extends)

    def recorded(self) -> dict[str, Any]:
        try:
            return read_object(self.path, RUN)
        except (OSError, ValueError) as error:
            raise RunDirectoryError(
                f"{self.path / RUN} cannot be read ({error}); choose another run directory"
            ) from error

    def keep_result(self) -> None:
        """Rename the result.json of an ended run that will train for more steps."""
        if not self._extends:
            return
        self._extends = False
        number = next(
            number for number in count(1) if not (self.path / f"result-{number}.json").exists()
        )
        for file in (self.path / RESULT, self.path / "model.safetensors"):
            if file.exists():
                file.rename(file.with_stem(f"{file.stem}-{number}"))

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file. NaN and infinity become null, and `not_finite` lists their paths."""
        not_finite: dict[str, str] = {}
        row = finite(value, not_finite) | ({"not_finite": not_finite} if not_finite else {})
        text = json.dumps(row, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        # surrogateescape writes back the bytes that the locale could not decode
        write_atomically(self.path / name, text.encode(errors="surrogateescape"))

    def save_tensors(self, name: str, state_dict: Mapping[str, Any]) -> None:
        """Write tensors. Tied tensors are written under each of their names."""
        check_tensors(state_dict)
        storages: set[int] = set()
        tensors: dict[str, torch.Tensor] = {}
        for key, value in state_dict.items():
            tensor = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            storage = tensor.untyped_storage().data_ptr()
            tensors[key] = tensor.clone() if storage in storages else tensor
            storages.add(storage)
        with replace_atomically(self.path / name) as temporary:
            mode = temporary.stat().st_mode
            try:
                save_file(tensors, temporary)
            except SafetensorError as error:
                if found := _ERROR_NUMBER.search(str(error)):
                    number = int(found[1])
                    raise OSError(number, os.strerror(number), str(self.path / name)) from error
                raise
            temporary.chmod(mode)  # safetensors creates a file that only its owner can read

    @property
    def is_taken(self) -> bool:
        """True after another process has taken over the directory."""
        return self._lock.is_taken

    @property
    def holder(self) -> Holder | None:
        return self._lock.holder

    def close(self) -> None:
        """Release the lock. Has no effect if called again, or in a fork."""
        self._lock.release()


def _check_kinds(path: Path) -> None:
    with os.scandir(path) as entries:
        for entry in entries:
            name, is_folder = entry.name, entry.name in _FOLDERS
            is_file = name in (*_RUN_FILES, _LOCK, *_OTHER_FILES) or name.startswith(_PREFIXES)
            if not is_folder and not is_file:
                continue
            if not (entry.is_dir if is_folder else entry.is_file)(follow_symlinks=False):
                what = f"no {'folder' if is_folder else 'regular file'}"
                if entry.is_symlink():
                    what = "a link"
                remedy = "remove it"
                if name == "checkpoints":
                    remedy = "ls.Saving(folder=...) names a folder of checkpoints elsewhere"
                raise RunDirectoryError(
                    f"run directory {path} holds {name}, which is {what}; a run writes to its own"
                    f" files and folders there; {remedy}, or choose another directory"
                )


def note_followed(path: Path, by: Path) -> None:
    """Record that the script has continued after the ended run in `path`, with the run in the
    directory `by`."""
    with suppress(OSError):  # the directory may have been removed
        if (path / RESULT).exists():
            write_atomically(path / _FOLLOWED, f"{by}\n".encode(errors="surrogateescape"))


def is_followed(path: Path) -> bool:
    """True if the script has started another run after the run in `path`."""
    return os.path.exists(path / _FOLLOWED)  # False too for a name that is too long


class _FileLock:
    _held: ClassVar[weakref.WeakSet[_FileLock]] = weakref.WeakSet()

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor: int | None = descriptor
        self._held.add(self)

    @classmethod
    def acquire(cls, path: Path, lost: Sequence[Holder] = ()) -> _FileLock:
        while True:
            descriptor = open_below(path.parent, path.name, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                try_lock(descriptor)
                current = _is_same_file(path, descriptor)
                if current:
                    _claim(descriptor, path)
            except BaseException as error:
                if isinstance(error, BlockingIOError) and _holder(descriptor) in lost:
                    path.unlink(missing_ok=True)
                    os.close(descriptor)
                    continue
                if isinstance(error, BlockingIOError):
                    error = _in_use(descriptor, path)
                os.close(descriptor)
                raise error from None
            if current:
                return cls(path, descriptor)
            # the last holder removed the file between our open and our lock
            os.close(descriptor)

    @property
    def is_taken(self) -> bool:
        return (
            self._descriptor is not None
            and self._path.exists()
            and not _is_same_file(self._path, self._descriptor)
        )

    @property
    def holder(self) -> Holder | None:
        return None if self._descriptor is None else _holder(self._descriptor)

    def release(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                if not self.is_taken:
                    self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = None
            if sys.platform == "win32":  # Windows does not remove an open file
                with suppress(OSError):
                    self._path.unlink()

    @classmethod
    def _forget_in_child(cls) -> None:
        """Close the lock's descriptor in a fork: the fork would hold the lock after the end of its
        parent."""
        for lock in list(cls._held):
            if lock._descriptor is not None:
                os.close(lock._descriptor)
                lock._descriptor = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_FileLock._forget_in_child)


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> Holder | None:
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        holder = parse_object(os.read(descriptor, 4096).decode())
    except ValueError:
        return None
    return holder if {"pid", "host", "started"} <= holder.keys() else None


def _claim(descriptor: int, path: Path) -> None:
    if os.fstat(descriptor).st_size and _holder(descriptor) is None:
        raise RunDirectoryError(
            f"run directory {path.parent} holds a file named {path.name!r} that no run wrote; a run"
            " records its claim in that file; choose another directory"
        )
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "process_ids": process_id_space(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, json.dumps(holder).encode() + b"\n")


def _in_use(descriptor: int, path: Path) -> RunDirectoryError:
    who = "another process"
    if holder := _holder(descriptor):
        who = f"process {holder['pid']} on {holder['host']}, since {holder['started']}"
    return RunDirectoryError(
        f"run directory {path.parent} is in use by a live run ({who}); one run writes to a"
        " directory; choose another, or end that run first"
    )


def check_tensors(state_dict: Mapping[str, Any]) -> None:
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            what = f"a {type(value).__name__}"
        elif value.is_meta or value.layout != torch.strided or value.dtype not in _SAVED_DTYPES:
            what = f"a tensor of layout {value.layout}, type {value.dtype}, on device"
            what += f" {value.device}"
        else:
            continue
        raise RecipeError(
            f"state dict entry {name!r} is {what}; model.safetensors holds dense tensors of"
            " integers, floats, bools and complex64; change its type, or leave it out of the state"
            " dict (a buffer: persistent=False; get_extra_state: return a tensor)"
        )


def describe_environment(device: torch.device) -> dict[str, Any]:
    return {
        "versions": {
            "lockstep": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            **(accelerator.library_versions() if accelerator.is_accelerator(device) else {}),
        },
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "cpus_usable": usable_cpus(),
        "threads": {
            "intra_op": torch.get_num_threads(),
            "inter_op": torch.get_num_interop_threads(),
        },
        "device": {"type": str(device), **device_kind(device)},
        "command_line": sys.orig_argv,
        "working_directory": os.getcwd(),
    }


def device_kind(device: torch.device) -> dict[str, str]:
    return {"name": device_name(device), **accelerator.traits(device)}


def device_name(device: torch.device) -> str:
    if (name := accelerator.name(device)) is not None:
        return name
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
