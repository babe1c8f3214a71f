"""Loader workers: processes that fetch microbatches ahead of time for the training process."""

from __future__ import annotations

import errno
import multiprocessing.queues
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.multiprocessing import get_sharing_strategy
from torch.utils.data import DataLoader, Dataset

from lockstep.base.container import LARGER_SHARED_MEMORY
from lockstep.base.errors import LaunchError, WorkerError
from lockstep.base.processes import die_with_parent, temporary_folder
from lockstep.base.system import signals
from lockstep.base.torch_private import shut_down_workers
from lockstep.data.fetch import Fetcher
from lockstep.data.streams import StreamFetcher

_MOST_SOCKET_BYTES = 107 if sys.platform == "linux" else 103
"""Maximum length of a path in the system's `sockaddr_un`."""
_FOLDER = "pymp-"
REST_SECONDS = 0.01
"""Sleep before the workers are forked. Gloo's threads finish shortly after a collective. In Python
3.11.7, a child that is forked while a thread frees a tensor hangs (python/cpython#112275)."""
LATER_SECONDS = 30
"""A worker process ends this long after SIGTERM."""


class LoaderWorkers:
    def __init__(
        self, fetcher: Fetcher | StreamFetcher, count: int, *, pinned: bool, prefetch: int = 2
    ) -> None:
        """Each process fetches `prefetch` microbatches ahead."""
        self._folder = _new_folder()
        self._current = _RequestSampler()
        self._loader = DataLoader(
            _RequestDataset(fetcher),
            batch_size=None,
            sampler=self._current,
            num_workers=count,
            collate_fn=_identity,
            pin_memory=pinned,
            prefetch_factor=prefetch,
            worker_init_fn=partial(_set_up_worker, self._folder, os.getpid()),
            persistent_workers=True,
            generator=torch.Generator(),
            # A dataset or a collate function may be a lambda or defined in a notebook: it cannot be
            # pickled, so workers are forked.
            multiprocessing_context="fork" if sys.platform == "linux" else None,
        )
        self._batches: Any = None

    def fetch(self, requests: Iterable[Any]) -> Iterator[Any]:
        """The DataLoader takes requests ahead of time. A new call of `fetch` ends the previous
        call. An error of a worker has the worker's traceback as its cause."""
        self._current.requests = requests
        if self._batches is None:
            time.sleep(REST_SECONDS)
        self._batches = self._begin()
        for batch in self._batches:
            if isinstance(batch, WorkerException):
                batch.reraise()
            yield batch

    def _begin(self) -> Any:
        try:
            return iter(self._loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            # workers are forks, which pickle nothing
            if self._loader.multiprocessing_context is not None:
                raise
            raise LaunchError(
                f"loader workers on {sys.platform}, and something that they need cannot be pickled"
                f" ({error}); there they are fresh interpreters; define the dataset and the"
                " recipe's functions at the top level of a file, or plan workers=0"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EROFS):
                raise
            raise LaunchError(
                f"no room in /dev/shm for loader workers ({error.strerror}); it holds their"
                f" semaphores and batches; {LARGER_SHARED_MEMORY}, or plan workers=0"
            ) from error

    def close(self) -> None:
        """A process that is still busy after 5 seconds is terminated."""
        batches, self._batches = self._batches, None
        try:
            shut_down_workers(self._loader, batches)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class WorkerException:
    error: bytes | None
    """The pickled exception. None if the exception cannot be pickled."""
    text: str

    @classmethod
    def of(cls, error: Exception) -> WorkerException:
        text = "".join(traceback.format_exception(error))
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            return cls(None, text)
        return cls(pickled, text)

    def reraise(self) -> None:
        if self.error is None:
            raise WorkerError(f"a loader process failed:\n{self.text}")
        raise pickle.loads(self.error) from RemoteTraceback(self.text)


class RemoteTraceback(Exception):
    """Shows the traceback of another process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _RequestDataset(Dataset[Any]):
    def __init__(self, fetcher: Fetcher | StreamFetcher) -> None:
        self._fetcher = fetcher

    def __getitem__(self, request: Any) -> Any:
        try:
            return self._fetcher[request]
        except Exception as error:
            return WorkerException.of(error)


class _RequestSampler:
    """Yields the requests of the current `fetch` to a persistent DataLoader."""

    def __init__(self) -> None:
        self.requests: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.requests)


def _identity(batch: Any) -> Any:
    return batch


def _new_folder() -> str:
    limit = _MOST_SOCKET_BYTES - len(f"/{_FOLDER}12345678/listener-12345678")
    folder = temporary_folder(limit)
    length = len(os.fsencode(folder))
    if get_sharing_strategy() == "file_descriptor" and length > limit:  # type: ignore[no-untyped-call]
        raise LaunchError(
            f"workers with the temporary folder {folder!r} (TMPDIR), whose name has {length}"
            " bytes; loader workers make sockets in it, and the system's limit on the path of a"
            f" socket leaves {limit} bytes for this name; set TMPDIR to a shorter path, such as"
            " /tmp, or plan workers=0"
        )
    return tempfile.mkdtemp(prefix=_FOLDER, dir=folder)


def _set_up_worker(folder: str, parent: int, worker: int) -> None:
    """The kernel kills the worker together with the training process, because the worker holds
    copies of sockets on which other ranks wait. After SIGTERM, the worker continues for
    `LATER_SECONDS`, so that the training step can end. The worker ends if it cannot send a batch.
    If a batch were skipped, the training process would wait forever."""
    multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
    die_with_parent(parent)
    for number in signals("SIGUSR1", "SIGINT"):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform != "win32":  # on Windows, no other process sends SIGTERM
        signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(LATER_SECONDS))
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end_at_once)  # type: ignore[attr-defined]


def _end_at_once(error: Exception, batch: object) -> None:
    if "shared memory" in str(error):
        error.add_note(
            "lockstep: /dev/shm is full, through which loader workers hand over batches;"
            f" {LARGER_SHARED_MEMORY}, or workers=0"
        )
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)
