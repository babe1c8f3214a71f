"""The exceptions that lockstep raises. A `UserError` is a mistake that the user can fix. Every rank
raises the `UserError`, and the script ends with status 2. Exceptions that are not a `UserError`
are failures of processes, machines or storage, and end the script with status 1. Each exception is
printed as one message without a traceback."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

from lockstep.base.foreign_text import printable

USER_ERROR_STATUS = 2


class LockstepError(Exception):
    """Base class of all exceptions of lockstep."""


E = TypeVar("E", bound=LockstepError)


class UserError(LockstepError):
    """A mistake in the user's input or script. The script ends with status 2."""


class RecipeError(UserError):
    """A recipe that contradicts itself, or a model, loss or optimizer that breaks a rule of
    recipes."""


class PlanError(UserError):
    """A plan that cannot be parsed, is not supported, or does not fit the number of processes."""


class DataError(UserError):
    """A dataset, batch or metric that does not have the form that the recipe needs."""


class LossError(UserError):
    """A loss or gradient from which no optimizer step can be taken: the loss is not a scalar or has
    no gradient, or a value is NaN or infinite."""

    def __init__(self, text: str, *, not_finite_in: int | None = None) -> None:
        """`not_finite_in` is the step, as in metrics.jsonl, whose loss or gradient is NaN or
        infinite."""
        super().__init__(text)
        self.not_finite_in = not_finite_in


class RunDirectoryError(UserError):
    """A run directory that cannot be used: a live run uses it, it contains another run, or it is
    not writable."""


class CheckpointError(UserError):
    """A checkpoint that cannot be loaded into this run, or a state that cannot be saved."""


def first_few(names: Sequence[object]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(str, names[:5])) + more


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return the suggestion at the end of an error about an unknown name.

    >>> did_you_mean("tesnor", ["tensor", "shard"])
    '; did you mean tensor?'
    """
    names = {name.lower(): name for name in known}
    closest = difflib.get_close_matches(given.lower(), names, n=1)
    return f"; did you mean {names[closest[0]]}?" if closest else ""


def cannot_write(path: object, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"cannot write {path}: {error.strerror}; a run keeps its logs and its model in its run"
        " directory; make room, or give another run_dir"
    )


class LaunchError(UserError):
    """Processes cannot be started or cannot connect, because the script is missing, the number of
    processes is impossible, or a port is in use."""


class MismatchError(LockstepError):
    """Ranks called different collectives, which `--check` detects. The text has the call and the
    line of every rank."""


class DivergenceError(LockstepError):
    """Replicas hold different parameters. The text names the ranks, the steps and the first
    tensor."""


class WrongResultError(LockstepError):
    """Ranks computed different gradients of one microbatch under bitwise numerics. The text names
    the ranks that may be wrong, and the first tensor."""


class HangError(LockstepError):
    """The run made no progress for longer than `--hang-after`. The text names the ranks for which
    the other ranks wait."""


class WorkerError(LockstepError):
    """A worker process failed. The text is the first failing rank's traceback, or the signal that
    killed it."""


def named_error(name: str, text: str, base: type[E]) -> E | None:
    return next((kind(text) for kind in _kinds(base) if kind.__name__ == name), None)


def _kinds(base: type[E]) -> Iterator[type[E]]:
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)


def with_notes(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def named(error: BaseException) -> str:
    return f"{type(error).__name__}: {with_notes(error)}"


def exit_status(error: BaseException) -> int:
    return USER_ERROR_STATUS if isinstance(error, UserError) else 1


def say(text: str) -> None:
    """Print to stderr. Ignores a closed pipe or terminal."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(printable(text), file=sys.stderr, flush=True)


def install_excepthook() -> None:
    """Print an uncaught `LockstepError` as one message, and exit with its status. Call this
    function again after the import of torch, which installs another hook."""
    previous = sys.excepthook
    if getattr(previous, "is_lockstep", False):
        return

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, LockstepError):
            previous(kind, error, traceback)
            return
        say(f"lockstep: {named(error)}")
        if hasattr(sys, "ps1"):  # an interactive Python does not end
            return
        # A SystemExit from the hook sets the exit status; without it, an uncaught exception gives
        # status 1.
        raise SystemExit(exit_status(error))

    hook.is_lockstep = True  # type: ignore[attr-defined]
    sys.excepthook = hook
