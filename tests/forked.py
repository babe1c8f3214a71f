"""The command `lockstep`, and scripts, in a fork of this process, which has imported torch: no test waits for that.

Everything else is as in a process that was started: its own working directory, environment, output and exit status.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from lockstep.base.errors import install_excepthook
from lockstep.cli.main import main


def lockstep(*arguments: Any, folder: Path | None = None, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `lockstep ARGUMENTS`. Not for what it starts itself, such as the processes of `lockstep run`: they import."""
    return _run(["lockstep", *map(str, arguments)], main, folder, environ)


def script(*arguments: Any, folder: Path | None = None, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `python SCRIPT ARGUMENTS`."""
    path = str(arguments[0])

    def run() -> None:
        sys.path[0] = str(Path(path).absolute().parent)
        runpy.run_path(path, run_name="__main__")

    return _run(list(map(str, arguments)), run, folder, environ)


def _run(
    line: list[str], function: Callable[[], None], folder: Path | None, environ: Mapping[str, str] | None
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _be(line, function, folder, environ, output.fileno(), errors.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = [os.pread(file.fileno(), 1 << 26, 0).decode(errors="replace") for file in (output, errors)]
    return subprocess.CompletedProcess(line, status, *texts)


def _be(
    line: list[str], function: Callable[[], None], folder: Path | None, environ: Mapping[str, str] | None, output: int, errors: int
) -> NoReturn:
    status = 1
    try:
        for number, descriptor in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, errors)):
            os.dup2(descriptor, number)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv[:] = line
        if folder is not None:
            os.chdir(folder)
        if environ is not None:
            os.environ.clear()
            os.environ.update(environ)
        sys.excepthook = sys.__excepthook__
        install_excepthook()
        atexit._clear()  # what this process has to do at its end is not the child's
        function()
        atexit._run_exitfuncs()
        status = 0
    except SystemExit as end:
        status = _status(end)
    except BaseException as error:
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as end:
            status = _status(end)
        except BaseException:
            traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _status(end: SystemExit) -> int:
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)
        return 1
    return end.code or 0
