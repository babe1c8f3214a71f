"""Loader processes: the same microbatches as in the training process, made ahead of time."""

from __future__ import annotations

import pickle
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, Dataset

from lockstep.data.fetch import Fetcher, Request
from lockstep.errors import WorkerError


class Workers:
    """`count` processes that make microbatches, started by the first `fetch` and kept until `close`."""

    def __init__(self, fetcher: Fetcher, count: int, *, pinned: bool) -> None:
        """`pinned`: the batches come in pinned memory."""
        self._current = _Current()
        self._loader = DataLoader(
            _Task(fetcher),
            batch_size=None,
            sampler=self._current,
            num_workers=count,
            collate_fn=_as_it_is,
            pin_memory=pinned,
            worker_init_fn=_end_with_parent,
            persistent_workers=True,
            generator=torch.Generator(),
            # A dataset or a collate may be a lambda or live in a notebook: only a fork takes it along.
            multiprocessing_context="fork" if sys.platform == "linux" else None,
        )
        self._batches: Any = None

    def fetch(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Batches in the order of `requests`, of which two a worker are taken ahead. One call at a time: another ends it.

        Raises what a worker raised, with its traceback as the cause.
        """
        self._current.requests = requests
        self._batches = iter(self._loader)
        for batch in self._batches:
            if isinstance(batch, Failure):
                batch.reraise()
            yield batch

    def close(self) -> None:
        """End the processes. One that is busy may finish its microbatch; after 5 seconds it is terminated."""
        if self._batches is not None:
            self._batches._shutdown_workers()
            self._batches = self._loader._iterator = None


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
    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def __getitem__(self, request: Request) -> Any:
        try:
            return self._fetcher[request]
        except Exception as error:
            return Failure.of(error)


class _Current:
    """The sampler of a loader that lasts: each iteration takes the requests of the moment."""

    def __init__(self) -> None:
        self.requests: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


def _as_it_is(batch: Any) -> Any:
    return batch


def _end_with_parent(worker: int) -> None:
    """Have the system end this process when the training process is killed: it holds copies of the sockets that peers wait on."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
