"""A command's folder of temporary files, and its end by a signal, after which the folder is
gone."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.base.errors import LaunchError
from lockstep.base.system import signals
from lockstep.base.temporary_folder import locked_folder


@contextmanager
def work_folder(keep: str | None, prefix: str, contents: str) -> Iterator[Path]:
    """A temporary folder, or the new or empty directory `keep`, which stays. `contents`: of it, in
    an error. Raises `LaunchError`."""
    if keep is None:
        with locked_folder(prefix) as folder:
            yield folder
        return
    path = Path(keep).absolute()
    if path.exists() and any(path.iterdir()):
        raise LaunchError(
            f"--keep {keep}; the directory is not empty; {contents} go to an empty one; name"
            " another, or remove it"
        )
    path.mkdir(parents=True, exist_ok=True)
    yield path


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM, and SIGHUP unless it is ignored, into an exception, so that leaving the `with`
    blocks ends what was started."""
    before = {number: signal.getsignal(number) for number in signals("SIGTERM", "SIGHUP")}
    for number, handler in before.items():
        if number == signal.SIGTERM or handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
