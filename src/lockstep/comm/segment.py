"""A shared memory segment for the processes of one host. The memory is a memfd of rank 0, which the
other ranks open through /proc. The kernel frees the memory with the last process that maps it, even
if processes are killed. The limit of /dev/shm (64 MB in a container) does not apply. All pages are
allocated at the start, so a later write cannot fail.

The segment starts with 64-bit words. Each word is written by only one rank. On x86-64 stores become
visible in order, so a counter that is stored after its data needs no barrier. Processors that
reorder stores are refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import platform
import secrets
import select
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.container import ONE_CONTAINER, process_id_space
from lockstep.base.errors import LockstepError

# each rank's words have their own cache line, so that a rank's stores do not slow down other ranks'
# loads
LINE_BYTES = 64
_LINE = LINE_BYTES // 8
_COUNTER, _STATE, _CULPRIT = range(3)
_LIVE, _LEFT, _DIED, _LATE, _DIFFER, _STOPPED = range(6)
_PAGE_BYTES = 4096
# A wait spins for this long, about the time of a sleep and its wake-up. It yields in each
# iteration, because the other rank may need this processor. A longer spin would be slower: on a
# busy machine a yielding process waits for other processes' time slices, but a sleeping one runs as
# soon as it is woken.
_SPIN_SECONDS = 3e-5
# A sleep ends when the counter changes, or after this time, to check that the other ranks are
# alive.
_LOOK_SECONDS = 0.02
_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE, _ALL = 202, 0, 1, 2**31 - 1  # of x86-64
_EXCHANGE_BYTES = 4096


class ExchangeError(LockstepError):
    """A collective through shared memory failed. The shared-memory group is unusable."""

    def __init__(self, ranks: Sequence[int], text: str) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)
        """The ranks at fault, numbered in the shared-memory group."""

    def copy(self) -> ExchangeError:
        """Return an equal error without a traceback."""
        return type(self)(self.ranks, str(self))


class PeerDied(ExchangeError): ...


class PeersLate(ExchangeError):
    """Some ranks did not reach a collective within the timeout, although their processes exist."""


class CallsDiffer(ExchangeError):
    """Ranks called different collectives, or the same collective with different sizes, dtypes or
    labels."""

    def __init__(
        self, ranks: Sequence[int], text: str, calls: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(ranks, text)
        self.calls = calls
        """The labels of two calls that differ, by global rank. None if the calls have no labels, or
        if another rank has found the difference."""

    def copy(self) -> CallsDiffer:
        return CallsDiffer(self.ranks, str(self), self.calls)


class PeerStopped(ExchangeError):
    """A rank raised an exception in a collective, aborted the shared-memory group, or closed it."""


_ERRORS: dict[int, tuple[type[ExchangeError], str]] = {
    _DIED: (PeerDied, "its process ended"),
    _LATE: (PeersLate, "it did not come within"),
    _DIFFER: (CallsDiffer, "it called another collective"),
    _STOPPED: (PeerStopped, "it stopped exchanging: it raised, or called abort"),
    _LEFT: (PeerStopped, "it closed the group"),
}


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The reason why the processes of a group cannot share memory. Every rank has the same
    reason."""

    reason: str
    hosts: tuple[int, ...] = ()
    """The host number of each rank, if the ranks are on several hosts."""


class Segment:
    """One rank's view of the shared memory. Only one thread may use a segment at a time, except for
    `stop`."""

    def __init__(
        self,
        memory: mmap.mmap,
        rank: int,
        ends: Sequence[int],
        timeout: timedelta,
        *,
        names: Sequence[int],
    ) -> None:
        """`ends` has a file descriptor for each rank, which becomes readable when the rank's
        process ends (-1 for this rank)."""
        self.rank = rank
        self.names = names
        """The global rank of each rank of the segment."""
        self.size = len(ends)
        self.memory = memory
        self.words = memoryview(memory)[: _words_bytes(self.size)].cast("q")
        self.data_bytes = _words_bytes(self.size)
        self.peers = [peer for peer in range(self.size) if peer != rank]
        self.counters = [_line(peer) + _COUNTER for peer in range(self.size)]
        # nobody may call `close` before the segment is freed
        self._close_ends = weakref.finalize(self, _close, ends)
        self._poll = select.poll()
        self._ranks = {end: peer for peer, end in enumerate(ends) if end >= 0}
        for end in self._ranks:
            self._poll.register(end, select.POLLIN)
        self._timeout = timeout
        self._closed = False
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._futex = ctypes.CDLL(None).syscall
        self._futex.argtypes = [
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_uint32,
            ctypes.c_void_p,
        ]
        self._pause = (ctypes.c_long * 2)(0, int(_LOOK_SECONDS * 1e9))

    def announce(self, count: int) -> None:
        place = self.counters[self.rank]
        self.words[place] = count
        self._futex(_FUTEX, self._address + 8 * place, _FUTEX_WAKE, _ALL, None)

    def calls(self, buffer: int, rank: int) -> int:
        return _line(self.size) + (buffer * self.size + rank) * _call_words(self.size)

    def wait(self, target: int) -> None:
        words = self.words
        places = [self.counters[peer] for peer in self.peers]
        start = time.monotonic()
        while True:
            while (count := words[places[-1]]) >= target:
                places.pop()
                if not places:
                    return
            waited = time.monotonic() - start
            if waited < _SPIN_SECONDS:
                os.sched_yield()
            else:
                # Returns at once if the counter has changed since it was read.
                self._futex(
                    _FUTEX,
                    self._address + 8 * places[-1],
                    _FUTEX_WAIT,
                    count & 0xFFFFFFFF,
                    self._pause,
                )
                if words[places[-1]] < target:
                    self._look(target, waited)

    def _look(self, target: int, waited: float) -> None:
        words = self.words
        dead = [self._ranks[end] for end, _ in self._poll.poll(0)]
        closed = [peer for peer in self.peers if words[_line(peer) + _STATE] == _LEFT]
        stopped = [peer for peer in range(self.size) if words[_line(peer) + _STATE] > _LEFT]
        # Read after the states, to see what a rank did before it ended.
        missing = [peer for peer in self.peers if words[self.counters[peer]] < target]
        for kind, ranks in ((_DIED, dead), (_LEFT, closed)):
            if gone := [peer for peer in ranks if peer in missing]:
                raise self._error(kind, gone)
        if stopped and missing:
            first = min(stopped, key=lambda peer: words[_line(peer) + _STATE])
            line = _line(first)
            raise self._error(words[line + _STATE], [words[line + _CULPRIT]], seen_by=first)
        if missing and waited > self._timeout.total_seconds():
            raise self._error(_LATE, missing)

    def _error(self, kind: int, ranks: Sequence[int], seen_by: int | None = None) -> ExchangeError:
        named = ", ".join(str(self.names[rank]) for rank in ranks)
        mine, size = self.names[self.rank], dist.get_world_size()
        text = (
            f"an exchange through shared memory failed on rank {mine} of {size}, for rank {named}:"
            f" {_ERRORS[kind][1]}"
        )
        if kind == _LATE:
            text += (
                f" {self._timeout.total_seconds():g} s; see what it does, or give a longer timeout"
            )
        if seen_by is not None and seen_by not in ranks:
            text += f" (rank {self.names[seen_by]} saw it first)"
        return _ERRORS[kind][0](ranks, text)

    def stop(self, cause: BaseException | None = None) -> None:
        """Make the other ranks' collectives raise an error of the class of `cause`, or
        `PeerStopped`. Any thread may call this method."""
        kind = next(
            (kind for kind, (error, _) in _ERRORS.items() if type(cause) is error), _STOPPED
        )
        culprit = cause.ranks[0] if isinstance(cause, ExchangeError) else self.rank
        with contextlib.suppress(ValueError):  # the words are released: the segment is closed
            if self.words[_line(self.rank) + _STATE] == _LIVE:
                self.words[_line(self.rank) + _CULPRIT] = culprit
                self.words[_line(self.rank) + _STATE] = kind

    def close(self) -> None:
        """Release the memory. The other ranks can still read the data of this rank. May be called
        several times."""
        if self._closed:
            return
        if self.words[_line(self.rank) + _STATE] == _LIVE:
            self.words[_line(self.rank) + _STATE] = _LEFT
        self._closed = True
        self.words.release()
        self._close_ends()
        del self.memory  # the last tensor that views it unmaps it


def _line(rank: int) -> int:
    return _LINE * (1 + rank)


def _call_words(size: int) -> int:
    return -(-(size + 1) // _LINE) * _LINE


def _words_bytes(size: int) -> int:
    words = _line(size) + 2 * size * _call_words(size)
    return -(-8 * words // _PAGE_BYTES) * _PAGE_BYTES


def open_segment(
    group: dist.ProcessGroup,
    data_bytes: int,
    timeout: timedelta,
    among: Sequence[int] | None = None,
) -> Segment | Unavailable:
    """Make a shared memory segment. Every rank of `group` must call this function, and all ranks
    get a segment or the same `Unavailable`. `among` has the ranks of `group` that share a segment
    with this rank."""
    here, everyone_size = dist.get_rank(group), dist.get_world_size(group)
    if everyone_size == 1:
        return Unavailable("there is one process, which has nobody to share memory with")
    among = range(everyone_size) if among is None else among
    rank, size = among.index(here), len(among)
    with contextlib.ExitStack() as opened:
        offer, reason = _attempt(lambda: _offer(rank, _words_bytes(size) + data_bytes, opened))
        everyone = _exchange(group, {"offer": offer, "reason": reason})
        if (unavailable := _unavailable(everyone)) is not None:
            return unavailable
        hosts = [each["offer"]["host"] for each in everyone]
        if size == everyone_size and (
            other := next((peer for peer, host in enumerate(hosts) if host != hosts[0]), 0)
        ):
            return Unavailable(
                _why_not_shared(other, hosts), tuple(hosts.index(host) for host in hosts)
            )
        segment, reason = _attempt(lambda: _open([everyone[each]["offer"] for each in among], rank))
        everyone = _exchange(group, {"reason": reason})
    if (unavailable := _unavailable(everyone)) is not None:
        if segment is not None:
            _close(segment[1])
        return unavailable
    assert segment is not None
    names = dist.get_process_group_ranks(group)
    return Segment(segment[0], rank, segment[1], timeout, names=[names[each] for each in among])


def _why_not_shared(rank: int, hosts: Sequence[Sequence[str | int]]) -> str:
    other_container = next(
        (each for each, host in enumerate(hosts) if host[0] == hosts[0][0] and host != hosts[0]),
        None,
    )
    if other_container is None:
        return f"rank {rank} runs on another host than rank 0"
    return (
        f"rank {other_container} runs in another container than rank 0, on the same host, and they"
        f" do not see each other's processes; {ONE_CONTAINER}"
    )


def _attempt(call: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return call(), ""
    # AttributeError if this is not Linux, or an old version
    except (OSError, AttributeError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"


def _unavailable(everyone: Sequence[dict[str, Any]]) -> Unavailable | None:
    return next(
        (
            Unavailable(f"rank {rank}: {each['reason']}")
            for rank, each in enumerate(everyone)
            if each["reason"]
        ),
        None,
    )


def _offer(rank: int, size_bytes: int, opened: contextlib.ExitStack) -> dict[str, Any]:
    if sys.platform != "linux":
        raise ValueError(
            f"the system is {sys.platform}; memory without a name, which this needs, is Linux's"
        )
    import fcntl

    if platform.machine() != "x86_64":
        raise ValueError(
            f"the processor is {platform.machine()}; only x86_64 keeps the order of stores, on"
            " which this relies"
        )
    offer: dict[str, Any] = {"host": process_id_space(), "process": os.getpid()}
    if rank == 0:
        descriptor = os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        opened.callback(os.close, descriptor)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            raise ValueError(
                f"{size_bytes} bytes of shared memory cannot be had: {error}"
            ) from error
        fcntl.fcntl(
            descriptor,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
        )
        token = secrets.token_hex(8)
        os.pwrite(descriptor, bytes.fromhex(token), 0)
        offer |= {"descriptor": descriptor, "token": token, "bytes": size_bytes}
    return offer


def _open(everyone: Sequence[dict[str, Any]], rank: int) -> tuple[mmap.mmap, list[int]]:
    first = everyone[0]
    descriptor = os.open(
        f"/proc/{first['process']}/fd/{first['descriptor']}", os.O_RDWR | os.O_CLOEXEC
    )
    try:
        memory = mmap.mmap(descriptor, first["bytes"])
    finally:
        os.close(descriptor)
    if memory[:8].hex() != first["token"]:
        raise ValueError(
            "the memory that it opened is not rank 0's; the processes see different /proc"
        )
    ends: list[int] = []
    try:
        for peer, offer in enumerate(everyone):
            ends.append(-1 if peer == rank else os.pidfd_open(offer["process"]))
    except BaseException:
        _close(ends)
        raise
    return memory, ends


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def _exchange(group: dist.ProcessGroup, value: dict[str, Any]) -> list[dict[str, Any]]:
    text = json.dumps(value)
    if len(text) > _EXCHANGE_BYTES:
        text = json.dumps({"reason": value["reason"][: _EXCHANGE_BYTES // 8]})
    row = torch.frombuffer(bytearray(text.ljust(_EXCHANGE_BYTES).encode()), dtype=torch.uint8)
    rows: list[Tensor] = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    return [json.loads(bytes(row.numpy())) for row in rows]
