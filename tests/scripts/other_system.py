"""Run a Python file as on another system, as far as that can be shown on Linux:

    python other_system.py win32|darwin FILE|-m MODULE ARGUMENTS...

`sys.platform` names that system, and what it lacks is gone: functions of `os` and `signal`,
modules, /proc and /dev/shm. On `win32`, folders cannot be opened, no file is synced that is open
for reading alone, files are text unless opened with O_BINARY, and an open file cannot be removed.
Torch and the other packages are imported before that, with the real platform. The writer process of
checkpoints runs in the same way.
"""

from __future__ import annotations

import builtins
import faulthandler
import importlib
import io
import multiprocessing
import os
import runpy
import select
import shutil
import signal
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

LIGHT = (
    "blake3",
    "crc32c",
    "fsspec",
    "fsspec.implementations.local",
    "mmap",
    "shutil",
    "tempfile",
    "asyncio",
    "platform",
    "inspect",
)
HEAVY = (
    *(
        "click",
        "click.testing",
        "rich.console",
        "rich.live",
        "rich.table",
        "rich.text",
        "numpy",
        "safetensors.torch",
        "webbrowser",
    ),
    *(
        "torch",
        "torch._dynamo",
        "torch.distributed",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.utils.data",
    ),
    *(
        "torch.distributed.tensor.parallel",
        "torch.nn.parallel",
        "torch.profiler",
        "torch.distributed.elastic.agent.server.api",
    ),
    *(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "torch.distributed.checkpoint",
        "multiprocessing.queues",
    ),
    *(
        "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
        "torch._inductor",
        "torch.distributed.elastic.rendezvous.api",
    ),
    *(
        "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
        "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    ),
)
LINUX_ALONE = {
    os: (
        "memfd_create",
        "sched_getaffinity",
        "pidfd_open",
        "posix_fallocate",
        "O_DIRECT",
        "MFD_CLOEXEC",
        "MFD_ALLOW_SEALING",
    ),
    signal: ("sigtimedwait", "SIGRTMIN", "SIGRTMAX", "pidfd_send_signal"),
}
POSIX_ALONE = {
    os: (
        *(
            "fork",
            "forkpty",
            "register_at_fork",
            "killpg",
            "setsid",
            "getpgid",
            "getuid",
            "geteuid",
            "getgid",
            "getegid",
            "nice",
        ),
        *(
            "pread",
            "pwrite",
            "preadv",
            "pwritev",
            "sysconf",
            "statvfs",
            "fstatvfs",
            "uname",
            "getloadavg",
            "mkfifo",
            "O_CLOEXEC",
        ),
    ),
    signal: (
        *(
            "SIGHUP",
            "SIGUSR1",
            "SIGUSR2",
            "SIGQUIT",
            "SIGKILL",
            "SIGCHLD",
            "SIGURG",
            "SIGALRM",
            "SIGSTOP",
            "SIGCONT",
            "SIGPIPE",
        ),
        *("alarm", "setitimer", "pthread_sigmask", "pthread_kill", "sigwait", "sigpending"),
    ),
    faulthandler: ("register", "unregister"),
    select: ("poll", "epoll"),
}
MISSING_MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "pty", "tty", "syslog")
HIDDEN = ("/proc/", "/sys/", "/dev/shm")
O_BINARY = 1 << 29


def remove(names: dict[ModuleType, tuple[str, ...]]) -> None:
    for module, missing in names.items():
        for name in missing:
            if hasattr(module, name):
                delattr(module, name)


def hide_linux_files() -> None:
    opened = builtins.open

    def open_(file: Any, *args: Any, **kwargs: Any) -> Any:
        if str(file).startswith(HIDDEN):
            raise FileNotFoundError(2, "No such file or directory", str(file))
        return opened(file, *args, **kwargs)

    builtins.open = io.open = open_  # type: ignore[assignment]


def be_windows() -> None:
    import fcntl

    real_open, real_fsync, real_unlink = os.open, os.fsync, os.unlink
    flock, status, real_popen = fcntl.flock, fcntl.fcntl, subprocess.Popen
    exclusive, flags_of = fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.F_GETFL

    def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", path)
        is_ours = str(sys._getframe(1).f_globals.get("__name__")).startswith("lockstep")
        if is_ours and path != os.devnull:
            assert flags & O_BINARY, f"{path} is opened as text"
        return real_open(path, flags & ~O_BINARY, *args, **kwargs)

    def fsync(descriptor: int) -> None:
        if status(descriptor, flags_of) & 3 == os.O_RDONLY:
            raise OSError(9, "Bad file descriptor")
        real_fsync(descriptor)

    def unlink(path: Any, **kwargs: Any) -> None:
        with os.scandir(f"/proc/{os.getpid()}/fd") as found:
            if any(os.path.realpath(each.path) == os.path.realpath(path) for each in found):
                raise PermissionError(
                    32,
                    "The process cannot access the file because it is being used by another"
                    " process",
                    path,
                )
        real_unlink(path, **kwargs)

    def locking(descriptor: int, mode: int, count: int) -> None:
        try:
            flock(descriptor, exclusive)
        except BlockingIOError:
            raise PermissionError(13, "Permission denied") from None

    def kill(process: int, number: int) -> None:
        raise AssertionError(f"os.kill({process}, {number}) would end that process")

    class Popen(real_popen):  # type: ignore[type-arg,misc,valid-type]
        def __init__(self, args: Any, *more: Any, **named: Any) -> None:
            assert not named.get("pass_fds"), "pass_fds not supported on Windows."
            super().__init__(args, *more, **named)

    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    free, capacity = os.statvfs, shutil.disk_usage("/").total
    shutil.disk_usage = lambda path: SimpleNamespace(
        total=capacity, free=free(path).f_bavail * free(path).f_frsize
    )  # type: ignore[assignment,misc]
    os.open, os.fsync, os.unlink, os.remove, os.kill = open_, fsync, unlink, unlink, kill  # type: ignore[assignment]
    os.O_BINARY = O_BINARY  # type: ignore[attr-defined]
    subprocess.Popen = Popen  # type: ignore[misc]
    sys.modules["msvcrt"] = SimpleNamespace(locking=locking, LK_NBLCK=2)  # type: ignore[assignment]
    for name in MISSING_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    remove(POSIX_ALONE)


def be(system: str) -> None:
    """Make this process one of that system."""
    hide_linux_files()
    remove(LINUX_ALONE)
    if system == "win32":
        be_windows()
    run_writers_there(system)
    sys.platform = system


def run_writers_there(system: str) -> None:
    start = subprocess.Popen.__init__

    def started(self: Any, args: Any, *more: Any, **named: Any) -> None:
        if isinstance(args, list) and args[1:4] == ["-P", "-m", "lockstep.checkpoint.writer"]:
            args = [args[0], __file__, system, *args[2:]]
        start(self, args, *more, **named)

    subprocess.Popen.__init__ = started  # type: ignore[method-assign]


def main() -> None:
    system, *rest = sys.argv[1:]
    is_module = rest[0] == "-m"
    for name in LIGHT if is_module else (*LIGHT, *HEAVY):
        importlib.import_module(name)
    if not is_module:
        multiprocessing.set_start_method("spawn")
    be(system)
    sys.argv = rest[1:] if is_module else rest
    if is_module:
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(rest[0])
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main()
