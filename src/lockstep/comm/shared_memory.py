"""Collectives on CPU tensors through memory that the processes of one host share. A collective
takes 0.02 to 0.2 ms, and 1 to 2 ms with Gloo."""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Concatenate, ParamSpec, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.closing import Closing
from lockstep.base.torch_private import profiler_enabled
from lockstep.comm.segment import (
    LINE_BYTES,
    ExchangeError,
    PeerStopped,
    Segment,
    Unavailable,
    open_segment,
)
from lockstep.comm.shared_rounds import (
    BufferViews,
    Rounds,
    add,
    called,
    flat,
    head,
    refuse_overlap,
    round_up,
    size_text,
    split,
)

P = ParamSpec("P")

# The size of each of a rank's two buffers. An all-reduce of 16 MiB took a tenth longer with half
# the size, which needs more rounds, and with four times the size, where pieces leave the
# processor's cache (1 MiB) between write and read.
BUFFER_BYTES = 1 << 20
_MIN_CELL_BYTES = 4096
# Up to this many ranks, or for tensors up to this size, every rank adds all elements in an
# all-reduce. Compared with one slice per rank, this takes more additions, but one wait instead of
# two, and one copy less.
_DIRECT_RANKS = 4
_DIRECT_BYTES = 256 << 10


def _collective(
    method: Callable[Concatenate["SharedMemoryGroup", P], None],
) -> Callable[Concatenate["SharedMemoryGroup", P], None]:
    """Decorate a collective. If the collective raises on this rank, the collectives of all ranks
    raise, and the group is unusable."""

    @functools.wraps(method)
    def wrapped(self: "SharedMemoryGroup", *args: P.args, **kwargs: P.kwargs) -> None:
        self._call(method.__name__, method, self, *args, **kwargs)

    return cast(Callable[Concatenate["SharedMemoryGroup", P], None], wrapped)


class PendingAllGather(dist.Work):
    def __init__(self, group: "SharedMemoryGroup", rest: Iterator[None]) -> None:
        super().__init__()
        self.rest = rest
        self._group = group

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Ignores `timeout`, because the group has a timeout."""
        if self._group.pending is self:
            self._group.finish()
        return True


class SharedMemoryGroup(Closing):
    """The collectives of a process group's ranks on one host, for contiguous CPU tensors. Only one
    thread may use a group at a time. Sums are added in rank order, so they have the same bits on
    every rank in every run. After an exception in a collective the group is unusable, and every
    rank raises an `ExchangeError`."""

    def __init__(self, segment: Segment, buffer_bytes: int, name: str) -> None:
        self.rank = segment.rank
        self.size = segment.size
        self.name = name
        self.pending: PendingAllGather | None = None
        """A started all-gather, which the next collective of the group completes."""
        self.is_closed = False
        self._segment = segment
        self._rounds = Rounds(segment, buffer_bytes)
        self._others = segment.peers
        self._failure: Callable[[], ExchangeError] | None = None
        self._calls_made = 0
        self._is_called = False
        _groups.add(self)

    @classmethod
    def active_calls(cls) -> "list[tuple[str, str, int, str, str]]":
        """Return the calls in progress as (collective, name of the group, number of the call in the
        group, dtype and size, label). Any thread may call this method."""
        calls = []
        for group in _groups_now():
            if group._is_called:
                signature = group._rounds.signature
                collective, what = called(signature)
                label = group._rounds.label_in(signature)
                calls.append((collective, group.name, group._calls_made, what, label))
        return calls

    @classmethod
    def create(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: timedelta = timedelta(minutes=10),
        buffer_bytes: int = BUFFER_BYTES,
        among: Sequence[int] | None = None,
    ) -> "SharedMemoryGroup | Unavailable":
        """Make a shared-memory group. Every rank of `group` must call this method, and all ranks
        get a group or the same `Unavailable`. `among` has the ranks of `group` that share memory
        with this rank. Tensors larger than a buffer are sent in pieces."""
        group = dist.group.WORLD if group is None else group
        if group is None:
            return Unavailable("there is no process group")
        size = dist.get_world_size(group) if among is None else len(among)
        buffer_bytes = round_up(max(buffer_bytes, 2 * size * _MIN_CELL_BYTES), LINE_BYTES)
        segment = open_segment(group, 2 * size * buffer_bytes, timeout, among)
        if isinstance(segment, Unavailable):
            return segment
        of = "" if group is dist.group.WORLD else f" of {group.group_desc}"
        return cls(segment, buffer_bytes, f"shared memory{of}")

    def label(self, text: str) -> int:
        """Return a number for the label of a call, such as "gathers block 'a'". Calls with
        different labels raise `CallsDiffer`. Every rank calls this method with the same texts in
        the same order."""
        labels = self._rounds.labels
        if text not in labels:
            labels.append(text)
        return labels.index(text)

    @_collective
    def all_reduce(self, tensor: Tensor) -> None:
        numbers = flat(tensor)
        views = self._rounds.start("all_reduce", numbers)
        if self.size <= _DIRECT_RANKS or numbers.nbytes <= _DIRECT_BYTES:
            self._reduce_directly(numbers, views)
        else:
            self._reduce_by_slices(numbers, views)

    @_collective
    def reduce_scatter(self, output: Tensor, tensor: Tensor, label: int = 0) -> None:
        """`output` and `tensor` must not overlap."""
        into, numbers = flat(output), flat(tensor)
        if len(into) * self.size != len(numbers) or tensor.dtype is not output.dtype:
            raise ValueError(
                f"reduce_scatter of {size_text(tensor)} into {size_text(output)}; the output is"
                f" 1/{self.size} of the input"
            )
        refuse_overlap(output, tensor)
        chunks = numbers.view(self.size, len(into))
        views = self._rounds.start("reduce_scatter", into, label)
        cell = views.sent[0][self._others[0]].numel()
        pieces = [split(chunk, cell) for chunk in chunks.unbind()]
        for index, total in enumerate(split(into, cell)):
            buffer = self._rounds.buffer
            length = total.numel()
            for peer in self._others:
                head(views.sent[buffer][peer], length).copy_(pieces[peer][index])
            self._rounds.meet(first=index == 0)
            parts = [head(part, length) for part in views.received[buffer]]
            parts[self.rank] = pieces[self.rank][index]
            add(parts, total)

    @_collective
    def all_gather(self, output: Tensor, tensor: Tensor, label: int = 0) -> None:
        """`tensor` may be this rank's part of `output`."""
        for _ in self._gathering(output, tensor, label):
            pass

    def start_all_gather(self, output: Tensor, tensor: Tensor, label: int = 0) -> PendingAllGather:
        """Start an all-gather. `wait` on the result, or the group's next collective, completes the
        all-gather. Do not change `tensor` before the all-gather has completed."""
        rest = self._gathering(output, tensor, label)
        self._call("all_gather", next, rest)
        self.pending = PendingAllGather(self, rest)
        return self.pending

    def finish(self) -> None:
        if self._failure is not None:
            raise self._failure()
        if self.pending is not None:
            rest, self.pending = self.pending.rest, None
            self._run("all_gather", next, rest, None)

    def _call(
        self, name: str, call: Callable[P, object], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        self.finish()
        self._calls_made += 1
        self._run(name, call, *args, **kwargs)

    def _run(self, name: str, call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        self._is_called = True
        try:
            if profiler_enabled():
                with torch.profiler.record_function(f"shared:{name}"):
                    call(*args, **kwargs)
            else:
                call(*args, **kwargs)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._is_called = False

    def _gathering(self, output: Tensor, tensor: Tensor, label: int) -> Iterator[None]:
        into, mine = flat(output), flat(tensor)
        if len(into) != len(mine) * self.size or tensor.dtype is not output.dtype:
            raise ValueError(
                f"all_gather of {size_text(tensor)} into {size_text(output)}; the output is"
                f" {self.size} times the input"
            )
        chunks = into.view(self.size, len(mine))
        views = self._rounds.start("all_gather", mine, label)
        capacity = views.whole[0][0].numel()
        if chunks[self.rank].data_ptr() != mine.data_ptr():
            chunks[self.rank].copy_(mine)
        gathered = [split(chunk, capacity) for chunk in chunks.unbind()]
        for index, piece in enumerate(split(mine, capacity)):
            buffer = self._rounds.buffer
            length = piece.numel()
            head(views.whole[buffer][self.rank], length).copy_(piece)
            self._rounds.announce()
            if index == 0:
                yield
            self._rounds.wait(first=index == 0)
            for peer in self._others:
                gathered[peer][index].copy_(head(views.whole[buffer][peer], length))

    @_collective
    def broadcast(self, tensor: Tensor, source: int) -> None:
        numbers = flat(tensor)
        if not 0 <= source < self.size:
            raise ValueError(f"source={source}; the ranks of this group are 0 to {self.size - 1}")
        views = self._rounds.start("broadcast", numbers, source)
        for index, piece in enumerate(split(numbers, views.whole[0][0].numel())):
            shown = head(views.whole[self._rounds.buffer][source], piece.numel())
            if source == self.rank:
                shown.copy_(piece)
            self._rounds.meet(first=index == 0)
            if source != self.rank:
                piece.copy_(shown)

    @_collective
    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int],
        sizes: Sequence[int],
        label: int = 0,
    ) -> None:
        """`output_sizes` has the number of elements from each rank, and `sizes` the number of
        elements to each rank. The tensors must not overlap."""
        into, numbers = flat(output), flat(tensor)
        fits = sum(output_sizes) == into.numel() and sum(sizes) == numbers.numel()
        if not fits or tensor.dtype is not output.dtype:
            raise ValueError(
                f"all_to_all of {size_text(tensor)} in chunks of {list(sizes)} into"
                f" {size_text(output)} in chunks of {list(output_sizes)}; sizes must add up to the"
                " tensors' sizes, and both tensors must have one dtype"
            )
        refuse_overlap(output, tensor)
        views = self._rounds.start("all_to_all", numbers, label, sizes)
        outgoing = numbers.split_with_sizes(list(sizes))
        incoming = into.split_with_sizes(list(output_sizes))
        incoming[self.rank].copy_(outgoing[self.rank])
        cell = views.sent[0][self._others[0]].numel()
        start, most = 0, 1
        while start < most:
            buffer = self._rounds.buffer
            stop = start + cell
            for peer in self._others:
                part = outgoing[peer][start:stop]
                head(views.sent[buffer][peer], part.numel()).copy_(part)
            self._rounds.meet(first=start == 0)
            if start == 0:
                most = self._rounds.most_sent(buffer, output_sizes)
            for peer in self._others:
                part = incoming[peer][start:stop]
                part.copy_(head(views.received[buffer][peer], part.numel()))
            start = stop

    def abort(self) -> None:
        """Make the group's collectives raise `PeerStopped` on every rank, including this one. Any
        thread may call this method."""
        self._segment.stop()
        if self._failure is None:
            self._failure = functools.partial(
                PeerStopped, (self.rank,), f"rank {self.rank} aborted this group's exchanges"
            )

    def close(self) -> None:
        """Release the memory, without waiting for the other ranks. May be called several times."""
        self.is_closed = True
        self._segment.close()
        self._rounds.forget_views()
        self.pending = None
        self._failure = functools.partial(
            PeerStopped, (self.rank,), f"rank {self.rank} has closed this group; make another"
        )

    @staticmethod
    def abort_all() -> None:
        """Abort all groups of this process. Any thread may call this method."""
        for group in _groups_now():
            group.abort()

    @staticmethod
    def close_all() -> None:
        for group in _groups_now():
            group.close()

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None:
            return
        self._segment.stop(error)
        if isinstance(error, ExchangeError):
            self._failure = error.copy
        else:
            text = (
                f"an earlier exchange of rank {self.rank} raised {type(error).__name__}:"
                f" {error}; this group cannot be used any more"
            )
            self._failure = functools.partial(PeerStopped, (self.rank,), text)

    def _reduce_directly(self, numbers: Tensor, views: BufferViews) -> None:
        whole = views.whole
        for index, piece in enumerate(split(numbers, whole[0][0].numel())):
            parts = [head(part, len(piece)) for part in whole[self._rounds.buffer]]
            parts[self.rank].copy_(piece)
            self._rounds.meet(first=index == 0)
            if self.rank < 2:
                parts[self.rank] = piece  # this rank's own piece is still in the processor's cache
            add(parts, piece)

    def _reduce_by_slices(self, numbers: Tensor, views: BufferViews) -> None:
        room = views.results[0][0].numel()
        pieces = split(numbers, room * self.size)
        earlier: tuple[Tensor, ...] = ()
        for index, piece in enumerate((*pieces, None)):
            buffer = self._rounds.buffer
            slices: tuple[Tensor, ...] = ()
            width = 0
            if piece is not None:
                width = round_up(-(-len(piece) // self.size), views.elements_per_line)
                slices = split(piece, width)
                for rank, part in enumerate(slices):
                    if rank != self.rank:
                        views.whole[buffer][self.rank][rank * width :][: len(part)].copy_(part)
            self._rounds.meet(first=index == 0)
            if self.rank < len(slices):
                own = slices[self.rank]
                parts = [whole[self.rank * width :][: len(own)] for whole in views.whole[buffer]]
                parts[self.rank] = own
                add(parts, head(views.results[1 - buffer][self.rank], len(own)))
            for rank, part in enumerate(earlier):
                part.copy_(head(views.results[buffer][rank], len(part)))
            earlier = slices


_groups: "weakref.WeakSet[SharedMemoryGroup]" = weakref.WeakSet()


def _groups_now() -> "list[SharedMemoryGroup]":
    while True:
        try:
            return list(_groups)
        except RuntimeError:  # another thread has added a group meanwhile
            continue
