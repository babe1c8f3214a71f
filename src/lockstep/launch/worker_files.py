"""Files in the launcher's temporary folder, by which a worker and its launcher tell each other
about the worker's end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.base.errors import LaunchError
from lockstep.base.files import from_json, parse_object, write_atomically
from lockstep.options import variable

if TYPE_CHECKING:
    from lockstep.launch.failures import FailureRecord

WORKER = variable("worker")
STARTED_BY = variable("started_by")
"""The environment variable by which the launcher finds processes that a worker has left running.
Every process that a worker starts inherits the variable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStart:
    """The launcher's parameters for a worker process or spare process: JSON in one environment
    variable. A worker removes the variable, because its child processes must not write to the same
    files."""

    launcher: int
    files: str | None = None
    """The common beginning of the paths of the process's files (`WorkerFiles.stem`). None for a
    spare process, which has no rank yet."""
    channel: int | None = None
    is_replacement: bool = False
    imports: Sequence[str] = ()

    def variables(self) -> dict[str, str]:
        return {WORKER: json.dumps(asdict(self))}

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> WorkerStart | None:
        if WORKER not in environ:
            return None
        try:
            return from_json(cls, parse_object(environ[WORKER]))
        except ValueError as error:
            raise damaged_start(environ[WORKER], error) from None

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> WorkerStart | None:
        start = cls.read(environ)
        environ.pop(WORKER, None)
        return start


def damaged_start(text: str, error: Exception) -> LaunchError:
    return LaunchError(
        f"{WORKER}={text} is not for this process ({error}); a launcher of lockstep sets it for"
        f" each process that it starts; unset {WORKER}"
    )


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """The paths of the files that one worker shares with its launcher."""

    stem: Path

    def _own(self, suffix: str) -> Path:
        return self.stem.with_name(f"{self.stem.name}.{suffix}")

    @property
    def marker(self) -> str:
        """The entry "NAME=VALUE" in the environment of all processes that the worker has
        started."""
        return f"{STARTED_BY}={self.stem}"

    @property
    def failure(self) -> Path:
        return self._own("failure")

    @property
    def torch_error(self) -> Path:
        return self._own("torch")

    @property
    def crash(self) -> Path:
        return self._own("crash")

    @property
    def saving(self) -> Path:
        """Exists while the worker saves. The launcher does not kill a worker that is saving."""
        return self._own("saving")

    @property
    def saved(self) -> Path:
        """Exists if the worker saved its last step before an error or a signal ended it."""
        return self._own("saved")

    @property
    def restart_request(self) -> Path:
        """Contains the reason why the worker asks the launcher for a restart."""
        return self._own("restart")

    def remove_own(self) -> None:
        for path in (
            self.failure,
            self.torch_error,
            self.crash,
            self.saving,
            self.saved,
            self.restart_request,
        ):
            path.unlink(missing_ok=True)

    @property
    def shutdown(self) -> Path:
        """Exists after the launcher has begun to end all workers."""
        return self.stem.with_name("shutdown")

    @property
    def options_read(self) -> Path:
        return self.stem.with_name("options-read")

    @property
    def signal_forwarded(self) -> Path:
        return self.stem.with_name("signal-forwarded")


_files: WorkerFiles | None = None


def use_files(stem: str | None) -> WorkerFiles | None:
    """Called once, before the user's code runs."""
    global _files
    _files = WorkerFiles(Path(stem)) if stem is not None else None
    return _files


@contextmanager
def defer_kill() -> Iterator[None]:
    if _files is None:
        yield
        return
    with suppress(OSError):  # an error here must not prevent the save
        _files.saving.touch()
    try:
        yield
    finally:
        with suppress(OSError):
            _files.saving.unlink(missing_ok=True)


def is_saving() -> bool:
    return _files is not None and _files.saving.exists()


def note_saved() -> None:
    if _files is not None:
        with suppress(OSError):
            _files.saved.touch()


def request_restart(reason: str) -> None:
    """Make the launcher restart the workers after this worker's failure. The restart does not count
    for `--max-restarts`."""
    if _files is not None:
        write_atomically(_files.restart_request, reason)


def note_options_read() -> None:
    if _files is not None:
        _files.options_read.touch()


def write_failure(record: FailureRecord) -> None:
    """Write the record of a failure. Called outside of the main thread, before the process ends."""
    if _files is not None:
        record.write(_files.failure)


def is_shutting_down() -> bool:
    """True after the launcher has begun to end all workers. A process must take no steps after the
    launcher has begun to end it."""
    return _files is not None and _files.shutdown.exists()


def was_signal_forwarded() -> bool:
    """True if the launcher has passed on a signal. Slurm may have sent the same signal to this
    process too."""
    return _files is not None and _files.signal_forwarded.exists()
