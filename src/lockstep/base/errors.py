"""The exceptions that lockstep raises.

`UserError`s are mistakes that the user can mend: the text gives value, rule and remedy; every rank
raises them; a script ends with status 2 and no traceback. The others are failures of the world.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from lockstep.base.foreign_text import printable

USER_ERROR_STATUS = 2


class LockstepError(Exception):
    """Base class of all exceptions that lockstep raises on purpose."""


class UserError(LockstepError):
    """A mistake in what lockstep was given. Ends a script with status 2 and one line, not a
    traceback."""


class RecipeError(UserError):
    """A recipe that contradicts itself, or whose model, loss or optimizer does not do what a recipe
    asks of it."""


class PlanError(UserError):
    """A plan that cannot be read, cannot be built yet, or does not fit the processes at hand."""


class DataError(UserError):
    """A dataset, a batch or a metric that is not what the recipe says it is."""


class LossError(UserError):
    """A loss or a gradient from which no step can be taken: not a scalar, without gradient, NaN or
    infinite."""


class RunDirectoryError(UserError):
    """A run directory that cannot be used: held by a live run, already holding a run, not
    writable."""


class CheckpointError(UserError):
    """A checkpoint that cannot be used here, or a state that no checkpoint can hold."""


def first_few(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def cannot_write(path: object, error: OSError) -> RunDirectoryError:
    """Return the exception for a file of the run directory."""
    return RunDirectoryError(
        f"cannot write {path}: {error.strerror}; a run keeps its logs and its model in its run"
        " directory; make room, or give another run_dir"
    )


class LaunchError(UserError):
    """Processes that cannot be started or cannot meet: a missing script, an impossible count, a
    port in use."""


class MismatchError(LockstepError):
    """Ranks called different collectives, found by `--check`. The text has every rank's call and
    line."""


class DivergenceError(LockstepError):
    """Replicas hold different parameters. The text has the ranks, the steps and the first
    tensor."""


class HangError(LockstepError):
    """The run made no progress for longer than `--hang-after`. The text names the ranks that the
    others wait for."""


class WorkerError(LockstepError):
    """A worker process failed. The text is the first failing rank's traceback, or the signal that
    killed it."""


def say(text: str) -> None:
    """Print on stderr. A closed pipe or terminal does not end the run."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(printable(text), file=sys.stderr, flush=True)


def install_excepthook() -> None:
    """Print an uncaught `UserError` as one message and exit with status 2.

    Called again after torch has installed its hook, which prints nothing if an earlier hook exits.
    """
    previous = sys.excepthook
    if getattr(previous, "is_lockstep", False):
        return

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, UserError):
            previous(kind, error, traceback)
            return
        say(f"lockstep: {kind.__name__}: {error}")
        # The interpreter honours a SystemExit from the hook; without it an uncaught exception ends
        # with status 1.
        raise SystemExit(USER_ERROR_STATUS)

    hook.is_lockstep = True  # type: ignore[attr-defined]
    sys.excepthook = hook
