"""Loader processes: the same microbatches as in the training process, made ahead of time."""

from __future__ import annotations

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

from lockstep.base.errors import LaunchError, WorkerError
from lockstep.base.parent_death import die_with_parent
from lockstep.base.torch_private import shut_down_workers
from lockstep.data.fetch import Fetcher
from lockstep.data.shards import StreamFetcher

_MOST_SOCKET_BYTES = 107 if sys.platform == "linux" else 103
"""Of a socket's path, as the system's `sockaddr_un` has room for."""

_FOLDER = "pymp-"
"""What the name of a folder for sockets begins with; multiprocessing's own have the same."""
REST_SECONDS = 0.01
"""Before workers are forked. A thread of Gloo that lets go of a tensor takes a lock of Python's for an instant, without the GIL; in a child
forked in that instant Python 3.11.7 waits for it for ever (python/cpython#112275, mended in later ones): one worker in a few hundred. Such
threads work on when a collective returns, and are done soon after."""
LATER_SECONDS = 30
"""From SIGTERM to a worker to its end."""


class Workers:
    """`count` processes that make microbatches, started by the first `fetch` and kept until `close`."""

    def __init__(self, fetcher: Fetcher | StreamFetcher, count: int, *, pinned: bool, prefetch: int = 2) -> None:
        """`prefetch`: microbatches that each makes ahead. `pinned`: the batches come in pinned memory.

        Raises `LaunchError` where the temporary folder's name is too long for sockets."""
        _check_temporary_folder()
        self._folder = tempfile.mkdtemp(prefix=_FOLDER)
        self._current = _Current()
        self._loader = DataLoader(
            _Task(fetcher),
            batch_size=None,
            sampler=self._current,
            num_workers=count,
            collate_fn=_as_it_is,
            pin_memory=pinned,
            prefetch_factor=prefetch,
            worker_init_fn=partial(_set_up, self._folder, os.getpid()),
            persistent_workers=True,
            generator=torch.Generator(),
            # A dataset or a collate may be a lambda or live in a notebook: only a fork takes it along.
            multiprocessing_context="fork" if sys.platform == "linux" else None,
        )
        self._batches: Any = None

    def fetch(self, requests: Iterable[Any]) -> Iterator[Any]:
        """Batches in the order of `requests`, of which `prefetch` a worker are taken ahead. One call at a time: another ends it.

        Raises what a worker raised, with its traceback as the cause.
        """
        self._current.requests = requests
        if self._batches is None:
            time.sleep(REST_SECONDS)
        self._batches = iter(self._loader)
        for batch in self._batches:
            if isinstance(batch, Failure):
                batch.reraise()
            yield batch

    def close(self) -> None:
        """End the processes. One that is busy may finish its microbatch; after 5 seconds it is terminated."""
        batches, self._batches = self._batches, None
        try:
            shut_down_workers(self._loader, batches)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way from a worker."""

    error: bytes | None
    """Pickled. None: it cannot be."""
    text: str
    """Its traceback."""

    @classmethod
    def of(cls, error: Exception) -> Failure:
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
    """The cause of an exception that was raised in another process: the text is its traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Task(Dataset[Any]):
    def __init__(self, fetcher: Fetcher | StreamFetcher) -> None:
        self._fetcher = fetcher

    def __getitem__(self, request: Any) -> Any:
        try:
            return self._fetcher[request]
        except Exception as error:
            return Failure.of(error)


class _Current:
    """The sampler of a loader that lasts: each iteration takes the requests of the moment."""

    def __init__(self) -> None:
        self.requests: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.requests)


def _as_it_is(batch: Any) -> Any:
    return batch


def _check_temporary_folder() -> None:
    """Tensors come from a worker over a socket in a folder within the temporary one."""
    folder = tempfile.gettempdir()
    limit = _MOST_SOCKET_BYTES - len(f"/{_FOLDER}12345678/listener-12345678")
    length = len(os.fsencode(folder))
    if get_sharing_strategy() == "file_descriptor" and length > limit:  # type: ignore[no-untyped-call]
        raise LaunchError(
            f"workers with the temporary folder {folder!r} (TMPDIR), whose name has {length} bytes; loader workers make sockets below it, "
            f"whose names the system limits, which leaves {limit} bytes; set TMPDIR to a shorter path, such as /tmp, or plan workers=0"
        )


def _set_up(folder: str, parent: int, worker: int) -> None:
    """Have the sockets in a folder that the training process removes: a worker that ends while it sends leaves its own behind.

    Have the system end this process when the training process is killed: it holds copies of the sockets that peers wait on.

    Have it stay for the step at hand where it is asked to end together with the training process. And have it end where a batch cannot be
    sent (the queue's own thread finds that out, and would leave the batch out: a wait for ever).
    """
    multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
    die_with_parent(parent)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(LATER_SECONDS))
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end_at_once)  # type: ignore[attr-defined]


def _end_at_once(error: Exception, batch: object) -> None:
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)
