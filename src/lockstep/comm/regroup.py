"""Moves a surviving process from a process group that has lost a member to a new process group, in
three steps: abort the collectives, leave the groups, join the new one.

    with abortable(within_seconds=1.0):       # the main thread
        train()                               # raises CollectivesAborted
    abort_collectives()                       # meanwhile, a thread that hears of the loss
    leave_groups()                            # the main thread again
    store = PrefixStore("generation 2", store)
    world = join_over(store, rank=…, size=…, local_rank=…, local_size=…)

Call `abort_collectives` once for each lost process, and then `leave_groups`: a late abort would end
the next group. Before `leave_groups` the main thread drops everything that refers to the old
groups: the exception (its traceback's frames hold their variables), every `World` and `Mesh`, DDP
and FSDP2 modules, `DTensor`s, pipeline stages. A group that something still refers to keeps
descriptors and threads.

[Note: A lost wake-up] If a connection ends while a message is on its way, a wait in Gloo sometimes
ends only at the group's timeout (torch 2.13 to 2.15). In trials, ranks that waited for a lost rank
always woke; ranks in a tight loop of barriers failed to wake in about one of ten. The caller of
`abort_collectives` therefore sets a time limit, and treats a process that exceeds the limit as
lost.

[Note: Reconfigure] torch 2.15 gives a Gloo group new peers in place (`_reconfigure`).
`_reconfigure` is not used here: making a new group takes as long, and the groups of axes, FSDP2's
meshes and shared memory must be made again in any case. `_reconfigure` also closes connections, so
it would not avoid lost wake-ups. With NCCL a run restarts instead of recovering in place.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from lockstep.base.errors import LaunchError, LockstepError
from lockstep.base.torch_private import (
    PrefixStore,
    Store,
    TCPStore,
    abort_accelerator_groups,
    forget_distributed_operations,
    number_process_groups_from,
    process_group_count,
)
from lockstep.comm import gloo_sockets
from lockstep.comm.devices import TIMEOUT
from lockstep.comm.mesh import forget_meshes
from lockstep.comm.segment import ExchangeError
from lockstep.comm.shared_memory import SharedMemoryGroup
from lockstep.comm.world import World, join, leave, owns_group

# Interval at which an abort is repeated, at first and at most. It is repeated because another
# thread may be making a process group at the time of the abort.
_AGAIN_SECONDS, _MAX_AGAIN_SECONDS = 0.02, 0.5


class CollectivesAborted(LockstepError): ...


class _Abort:
    def __init__(self) -> None:
        self.is_set = threading.Event()
        self._left = threading.Event()
        self._repeating: threading.Thread | None = None

    def begin(self) -> None:
        self.is_set.set()
        _abort_once()
        abort_accelerator_groups()
        self._repeating = threading.Thread(target=self._repeat, name="lockstep-abort", daemon=True)
        self._repeating.start()

    def end(self) -> None:
        self._left.set()
        if self._repeating is not None:
            self._repeating.join()

    def _repeat(self) -> None:
        pause = _AGAIN_SECONDS
        while not self._left.wait(pause):
            _abort_once()
            pause = min(2 * pause, _MAX_AGAIN_SECONDS)


_abort = _Abort()
_lock = threading.Lock()
_store_connection: int | None = None
_names_used = 0


def abort_collectives() -> None:
    """Make every collective of this process raise soon, in shared memory, in Gloo and on an
    accelerator. Any thread may call this function. A wait in shared memory ends within 20 ms. A
    wait in Gloo may in rare cases continue, see [Note: A lost wake-up].

    Not tested on an accelerator. NCCL's abort ends its kernels, so a synchronization of the device
    returns normally, but with wrong numbers. Call `is_aborted` before you use numbers from the
    device. TORCH_NCCL_ASYNC_ERROR_HANDLING=0 keeps NCCL's watchdog from ending the process.
    """
    with _lock:
        if not _abort.is_set.is_set():
            _abort.begin()


def is_aborted(within_seconds: float = 0.0) -> bool:
    """True between `abort_collectives` and `leave_groups`. Waits up to `within_seconds` for
    `abort_collectives`."""
    return _abort.is_set.wait(within_seconds)


class abortable:
    """Replaces the error of an aborted collective by `CollectivesAborted`. A lost peer may cause
    the error before `abort_collectives` is called. An abort up to `within_seconds` after the error
    counts too. The new exception keeps no variables of the body alive."""

    def __init__(self, within_seconds: float = 0.0) -> None:
        self._within_seconds = within_seconds

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> None:
        # the new exception's traceback contains this frame and its variables
        del trace
        if isinstance(error, CollectivesAborted):
            text = str(error)
        elif isinstance(error, (ExchangeError, LaunchError, RuntimeError)) and is_aborted(
            self._within_seconds
        ):
            first_line = str(error).strip().partition("\n")[0]
            text = f"another process was lost: {first_line}"
        else:
            return
        _drop_tracebacks(error)
        raise CollectivesAborted(text) from None


def _drop_tracebacks(error: BaseException | None) -> None:
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def leave_groups(*, collect: bool = True) -> int:
    """Leave all process groups and shared memory, so that `join` can be called again. The main
    thread calls this function, without the other ranks. Returns the number of Gloo groups that
    still have references. With `collect`, also frees groups in reference cycles, which takes about
    0.3 s."""
    global _abort, _names_used, _store_connection
    if dist.is_initialized() and not owns_group():
        raise LaunchError(
            "the script has made the process group itself (init_process_group), and lockstep"
            " cannot replace it; leave init_process_group to lockstep"
        )
    with _lock:  # wait until the abort has finished: the error may come earlier
        _abort.end()
    # a group waits for its pending collectives when it is freed
    while not gloo_sockets.shut_down_gloo_sockets():
        pass
    SharedMemoryGroup.close_all()
    forget_meshes()
    forget_distributed_operations()
    _names_used = max(_names_used, process_group_count())
    leave()
    if collect and gloo_sockets.gloo_threads():
        gc.collect()
    with _lock:
        _abort, _store_connection = _Abort(), None
    return len(gloo_sockets.gloo_threads())


def join_over(
    store: Store,
    *,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    backend: str | None = None,
    timeout: timedelta = TIMEOUT,
    share_devices: bool = False,
) -> World:
    """Join the processes that meet at `store`. `store` is a `PrefixStore` with a new prefix, over a
    `TCPStore` that outlives every process of the group. Every rank must call this function. The
    group's name has a number that no process has used before, because a mesh of an earlier group
    must not find the new group."""
    global _store_connection
    with abortable():
        own, connection = gloo_sockets.with_own_connection(store)
        with _lock:
            _store_connection = connection
        if is_aborted():  # the abort may have come before there was a connection to end
            raise CollectivesAborted("another process was lost before this one could join")
        own.set(f"names/{rank}", str(_names_used))
        own.set_timeout(timeout)
        number_process_groups_from(
            max(map(int, own.multi_get([f"names/{each}" for each in range(size)])))
        )
        return join(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            backend=backend,
            timeout=timeout,
            store=own,
            share_devices=share_devices,
        )


def launcher_store(environ: Mapping[str, str]) -> Store:
    server = TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False)
    return PrefixStore("lockstep/start", server)


def _abort_once() -> None:
    connection = _store_connection
    if connection is not None:
        gloo_sockets.shut_down(connection)
    SharedMemoryGroup.abort_all()
    gloo_sockets.shut_down_gloo_sockets()
