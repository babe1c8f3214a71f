"""Runs a function of `ls.spawn` in a worker: receives the function, calls it, returns its result.
Does not import torch."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import pickle
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from lockstep.base.errors import LaunchError
from lockstep.base.garbage import freeze_for_good
from lockstep.base.notebook import WholeLines, is_notebook
from lockstep.base.system import PASSED_ON
from lockstep.launch import worker
from lockstep.launch.seeding import seed_workers_generators


class SpawnedCall:
    """The function and arguments of `ls.spawn`. The function and arguments are unpickled only for
    the call, so an error of unpickling is recorded as the worker's failure."""

    def __init__(self, main: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._content: tuple[Callable[..., Any], tuple[Any, ...]] | bytes = (main, args)

    def __getstate__(self) -> bytes:
        try:
            return bytes(ForkingPickler.dumps(self._content))
        except Exception as error:
            raise LaunchError(
                "the function or its arguments cannot be sent to another process"
                f" ({type(error).__name__}: {error}); both are pickled; define the function at the"
                " top level of a file, and pass only arguments that can be pickled"
            ) from error

    def __setstate__(self, state: bytes) -> None:
        self._content = state

    def load(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (
            ForkingPickler.loads(self._content)
            if isinstance(self._content, bytes)
            else self._content
        )


def work(call: SpawnedCall, result: Connection | None, forked: bool) -> None:
    """Call the function, and send its return value through `result`. The process starts with the
    signals `PASSED_ON` blocked."""
    if forked:
        forget_parent()
        freeze_for_good()
        seed_workers_generators()
        # A fork has none of OpenMP's other threads, and would hang waiting for them.
        sys.modules["torch"].set_num_threads(1)
    lead_session()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
        elif is_notebook(stream):
            setattr(sys, name, WholeLines(stream))

    def body() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        main, args = call.load()
        value = main(*args)
        if result is not None:
            result.send_bytes(_pickled(value))

    worker.run(body, worker.begin())


def forget_parent() -> None:
    """In a fork, unregister the parent's atexit functions."""
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def lead_session() -> None:
    os.setsid()
    for number in PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )


def _pickled(value: object) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise LaunchError(
            f"the function returned a {type(value).__name__} that cannot be sent back"
            f" ({type(error).__name__}: {error}); the result of rank 0 is pickled; return something"
            " that pickles, or write it to a file"
        ) from error
