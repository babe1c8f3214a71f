"""Collectives on CPU tensors through memory that the processes of one host share: what Gloo does in 1-2 ms, in 0.02-0.2.

[Note: Rounds] Every collective is a number of rounds, the same on every rank. In round n a rank writes into its own buffer n % 2, sets its
counter to n, waits until all counters have reached n, and reads from the others' buffers n % 2. A rank that has reached n has finished
reading in round n - 1; so once all have, the buffers of n - 1 are free for n + 1. There is nothing to reset, and one wait a round.

In the first round of a call each rank also writes down what it calls, and all compare: a mismatch is an error, not a wrong sum.
"""

import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Concatenate, ParamSpec, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.torch_private import profiler_enabled
from lockstep.comm.segment import LINE_BYTES, CallsDiffer, ExchangeError, PeerStopped, Segment, Unavailable, open_segment
from lockstep.comm.wait_times import waits

P = ParamSpec("P")

# Of each rank's two buffers. With half of it 16 MiB took a tenth longer, in more rounds; with four times as much too: larger pieces fall
# out of the processor's own cache (1 MiB) between being written and read.
BUFFER_BYTES = 1 << 20
_LEAST_CELL_BYTES = 4096
# Up to so many ranks, and for tensors up to so large, every rank adds everything itself: more additions than where each adds a slice,
# but one wait instead of two, and one copy less.
_DIRECT_RANKS = 4
_DIRECT_BYTES = 256 << 10

_ALL_REDUCE, _REDUCE_SCATTER, _ALL_GATHER, _ALL_TO_ALL, _BROADCAST = range(5)
_NAMES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.complex64, torch.complex128, torch.bool),
)


@dataclass(frozen=True, slots=True)
class _Views:
    """The buffers as tensors of one dtype; [buffer][rank] of each."""

    code: int
    lane: int
    """Elements in a cache line: where one rank's slice ends and another's begins."""
    whole: list[list[Tensor]]
    """What a rank shows to all."""
    results: list[list[Tensor]]
    """A rank's slice of a sum."""
    sent: list[list[Tensor]]
    """This rank's cell for each rank; empty for itself."""
    received: list[list[Tensor]]
    """Each rank's cell for this one."""


def _collective(method: Callable[Concatenate["SharedGroup", P], None]) -> Callable[Concatenate["SharedGroup", P], None]:
    """What every collective does on an error: the other ranks are told, and this rank can call no other."""

    @functools.wraps(method)
    def wrapped(self: "SharedGroup", *args: P.args, **kwargs: P.kwargs) -> None:
        self._call(method.__name__, method, self, *args, **kwargs)

    return cast(Callable[Concatenate["SharedGroup", P], None], wrapped)


class Gathering(dist.Work):
    """An all-gather that has begun: this rank's part is shown to the others."""

    def __init__(self, group: "SharedGroup", rest: Iterator[None]) -> None:
        super().__init__()
        self.rest = rest
        self._group = group

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once the output is complete. Raises an `ExchangeError`; the group's own timeout counts."""
        del timeout
        if self._group.pending is self:
            self._group.finish()
        return True


class SharedGroup:
    """The ranks of a process group that are on one host, and their collectives. Made by `create`; used by one thread at a time.

    Every rank calls the same collectives in the same order. Tensors are on the CPU and contiguous; a call returns when this rank's part is
    complete, or once it is waited for. Sums are added in the order of the ranks: the same bits on every rank and in every run.

    Raises an `ExchangeError` (`PeerDied`, `PeersLate`, `PeerStopped`, `CallsDiffer`) on every rank where a rank fails; after that, and
    after any other exception in a collective, the group is of no more use.
    """

    def __init__(self, segment: Segment, buffer_bytes: int, name: str) -> None:
        self.rank = segment.rank
        self.size = segment.size
        self.name = name
        """What it is called where calls are told of."""
        self.pending: Gathering | None = None
        """The all-gather that has begun. The next call, whatever it is, completes it first."""
        self._segment = segment
        self._buffer_bytes = buffer_bytes
        self._words = segment.words
        self._others = segment.peers
        self._other_counters = [segment.counters[peer] for peer in segment.peers]
        self._calls = [[segment.calls(buffer, rank) for rank in range(self.size)] for buffer in range(2)]
        self._views: dict[torch.dtype, _Views] = {}
        self._round = 0
        self._failure: Callable[[], ExchangeError] | None = None
        self._signature = 0
        self._made = 0
        self._is_called = False
        _groups.add(self)

    @classmethod
    def under_way(cls) -> "list[tuple[str, str, int, str]]":
        """Of each collective that this process is in: its name, its group's, the how-many-th of it, and of what. Any thread may ask."""
        calls = [(group.name, _called(group._signature), group._made) for group in list(_groups) if group._is_called]
        return [(name, group, number, what) for group, (name, what), number in calls]

    @classmethod
    def create(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: timedelta = timedelta(minutes=10),
        buffer_bytes: int = BUFFER_BYTES,
        among: Sequence[int] | None = None,
    ) -> "SharedGroup | Unavailable":
        """Share memory between the ranks of `group` (by default all). Every rank calls it; all get a group, or the same `Unavailable`.

        `timeout`: how long a collective waits for another rank. `buffer_bytes`: each rank has two buffers of that size (more, where there
        are very many ranks); larger tensors go through in pieces. `among`: of the ranks of `group`, by their numbers in it, those that
        share with this one; each rank gives its own.
        """
        group = dist.group.WORLD if group is None else group
        if group is None:
            return Unavailable("there is no process group")
        size = dist.get_world_size(group) if among is None else len(among)
        buffer_bytes = _up(max(buffer_bytes, 2 * size * _LEAST_CELL_BYTES), LINE_BYTES)
        segment = open_segment(group, 2 * size * buffer_bytes, timeout, among)
        name = "shared memory" if group is dist.group.WORLD else f"shared memory of {group.group_desc}"
        return segment if isinstance(segment, Unavailable) else cls(segment, buffer_bytes, name)

    @_collective
    def all_reduce(self, tensor: Tensor) -> None:
        """Replace `tensor`, of one size on all ranks, by the sum over ranks."""
        flat = _flat(tensor)
        views = self._start(_ALL_REDUCE, flat)
        if self.size <= _DIRECT_RANKS or flat.nbytes <= _DIRECT_BYTES:
            self._reduce_directly(flat, views)
        else:
            self._reduce_by_slices(flat, views)

    @_collective
    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> None:
        """`tensor` is one chunk a rank, in rank order; `output` becomes the sum over ranks of this rank's chunk. They do not overlap."""
        into, flat = _flat(output), _flat(tensor)
        if len(into) * self.size != len(flat) or tensor.dtype is not output.dtype:
            raise ValueError(f"reduce_scatter of {_said(tensor)} into {_said(output)}; the output is 1/{self.size} of the input")
        _refuse_overlap(output, tensor)
        chunks = flat.view(self.size, len(into))
        views = self._start(_REDUCE_SCATTER, into)
        cell = views.sent[0][self._others[0]].numel()
        pieces = [_split(chunk, cell) for chunk in chunks.unbind()]
        for place, total in enumerate(_split(into, cell)):
            buffer = self._round & 1
            length = total.numel()
            for peer in self._others:
                _head(views.sent[buffer][peer], length).copy_(pieces[peer][place])
            self._meet(first=place == 0)
            parts = [_head(part, length) for part in views.received[buffer]]
            parts[self.rank] = pieces[self.rank][place]
            _add(parts, total)

    @_collective
    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """`output` becomes the tensors of all ranks, of one size, in rank order. `tensor` may be this rank's part of `output`."""
        for _ in self._gathering(output, tensor):
            pass

    def start_all_gather(self, output: Tensor, tensor: Tensor) -> Gathering:
        """As `all_gather`, but `output` is complete, and `tensor` free, once the returned `wait` or the group's next call has come back.

        So this rank computes meanwhile, and waits for no rank that comes to it in that time. What is larger than a buffer is exchanged in
        the `wait`, but for its first piece.
        """
        rest = self._gathering(output, tensor)
        self._call("all_gather", next, rest)
        self.pending = Gathering(self, rest)
        return self.pending

    def finish(self) -> None:
        """Complete the all-gather that has begun, if one has. Raises where the group is of no more use."""
        if self._failure is not None:
            raise self._failure()
        if self.pending is not None:
            rest, self.pending = self.pending.rest, None
            self._do("all_gather", next, rest, None)

    def _call(self, name: str, call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        self.finish()
        self._made += 1
        self._do(name, call, *args, **kwargs)

    def _do(self, name: str, call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
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

    def _gathering(self, output: Tensor, tensor: Tensor) -> Iterator[None]:
        """An all-gather; it stops once, before the first wait."""
        into, mine = _flat(output), _flat(tensor)
        if len(into) != len(mine) * self.size or tensor.dtype is not output.dtype:
            raise ValueError(f"all_gather of {_said(tensor)} into {_said(output)}; the output is {self.size} times the input")
        chunks = into.view(self.size, len(mine))
        views = self._start(_ALL_GATHER, mine)
        capacity = views.whole[0][0].numel()
        if chunks[self.rank].data_ptr() != mine.data_ptr():
            chunks[self.rank].copy_(mine)
        gathered = [_split(chunk, capacity) for chunk in chunks.unbind()]
        for place, piece in enumerate(_split(mine, capacity)):
            buffer = self._round & 1
            length = piece.numel()
            _head(views.whole[buffer][self.rank], length).copy_(piece)
            self._announce()
            if place == 0:
                yield
            self._await(first=place == 0)
            for peer in self._others:
                gathered[peer][place].copy_(_head(views.whole[buffer][peer], length))

    @_collective
    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace `tensor`, of one size on all ranks, by that of rank `source`."""
        flat = _flat(tensor)
        if not 0 <= source < self.size:
            raise ValueError(f"source={source}; the ranks of this group are 0 to {self.size - 1}")
        views = self._start(_BROADCAST, flat, source)
        for place, piece in enumerate(_split(flat, views.whole[0][0].numel())):
            shown = _head(views.whole[self._round & 1][source], piece.numel())
            if source == self.rank:
                shown.copy_(piece)
            self._meet(first=place == 0)
            if source != self.rank:
                piece.copy_(shown)

    @_collective
    def all_to_all(self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]) -> None:
        """`tensor` is one chunk a rank, of `sizes` elements; `output` becomes the chunks that all ranks have for this one, in rank order.

        They do not overlap. `output_sizes`: how much each rank sends to this one.
        """
        into, flat = _flat(output), _flat(tensor)
        if (sum(output_sizes), sum(sizes)) != (into.numel(), flat.numel()) or tensor.dtype is not output.dtype:
            given = f"{_said(tensor)} in chunks of {list(sizes)} into {_said(output)} in chunks of {list(output_sizes)}"
            raise ValueError(f"all_to_all of {given}; sizes add up to the tensors', which have one dtype")
        _refuse_overlap(output, tensor)
        views = self._start(_ALL_TO_ALL, flat, sizes=sizes)
        outgoing, incoming = flat.split_with_sizes(list(sizes)), into.split_with_sizes(list(output_sizes))
        incoming[self.rank].copy_(outgoing[self.rank])
        cell = views.sent[0][self._others[0]].numel()
        place, most = 0, 1
        while place < most:
            buffer = self._round & 1
            stop = place + cell
            for peer in self._others:
                part = outgoing[peer][place:stop]
                _head(views.sent[buffer][peer], part.numel()).copy_(part)
            self._meet(first=place == 0)
            if place == 0:
                most = self._most_sent(buffer, output_sizes)
            for peer in self._others:
                part = incoming[peer][place:stop]
                part.copy_(_head(views.received[buffer][peer], part.numel()))
            place = stop

    def abort(self) -> None:
        """Have every rank's collectives, this one's too, raise `PeerStopped` soon. For a rank that cannot go on; any thread may call it."""
        self._segment.stop()
        if self._failure is None:
            self._failure = functools.partial(PeerStopped, (self.rank,), f"rank {self.rank} aborted this group's exchanges")

    def close(self) -> None:
        """Give the memory back. Each rank calls it after its last collective, without waiting for the others. May be called again."""
        self._segment.close()
        self._views.clear()
        self.pending = None
        self._failure = functools.partial(PeerStopped, (self.rank,), f"rank {self.rank} has closed this group; make another")

    def __enter__(self) -> "SharedGroup":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._segment.stop(error)
            if isinstance(error, ExchangeError):
                self._failure = functools.partial(type(error), error.ranks, str(error))
            else:
                text = f"an earlier exchange of rank {self.rank} raised {type(error).__name__}: {error}; this group is of no more use"
                self._failure = functools.partial(PeerStopped, (self.rank,), text)

    def _start(self, operation: int, tensor: Tensor, detail: int = 0, sizes: Sequence[int] | None = None) -> _Views:
        """Write down what this rank calls, for the others to compare in the first round."""
        views = self._views.get(tensor.dtype) or self._make_views(tensor.dtype)
        length = tensor.numel() if sizes is None else 0
        self._signature = _signature_of(operation, views.code, length, detail)
        place = self._calls[self._round & 1][self.rank]
        self._words[place] = self._signature
        if sizes is not None:
            for peer, size in enumerate(sizes, place + 1):
                self._words[peer] = size
        return views

    def _meet(self, *, first: bool = False) -> None:
        """[Note: Rounds] Announce what this rank has written, and wait until all have written theirs."""
        self._announce()
        self._await(first=first)

    def _announce(self) -> None:
        self._round += 1
        self._segment.announce(self._round)

    def _await(self, *, first: bool) -> None:
        target, words = self._round, self._words
        for place in self._other_counters:
            if words[place] < target:
                began = time.perf_counter()
                self._segment.wait(target)
                waits.seconds += time.perf_counter() - began
                break
        if first:
            calls = self._calls[(target - 1) & 1]
            for peer in self._others:
                if words[calls[peer]] != self._signature:
                    raise self._difference(peer, words[calls[peer]])

    def _difference(self, peer: int, signature: int) -> CallsDiffer:
        called = [(self._segment.names[rank], *_called(each)) for rank, each in ((self.rank, self._signature), (peer, signature))]
        mine, theirs = (f"rank {rank} called {name} of {what}" for rank, name, what in called)
        return CallsDiffer((peer,), f"{mine} and {theirs}; all ranks of a group call the same, in the same order")

    def _most_sent(self, buffer: int, output_sizes: Sequence[int]) -> int:
        """The longest chunk that any rank sends to another in this call. Raises where a rank sends other than it is expected to."""
        most = 0
        for rank, place in enumerate(self._calls[buffer]):
            sizes = self._words[place + 1 : place + 1 + self.size].tolist()
            if sizes[self.rank] != output_sizes[rank]:
                source, target = self._segment.names[rank], self._segment.names[self.rank]
                text = f"all_to_all: rank {source} sends {sizes[self.rank]} elements to rank {target}, which expects {output_sizes[rank]}"
                raise CallsDiffer((rank,), text)
            sizes[rank] = 0
            most = max(most, *sizes)
        return most

    def _reduce_directly(self, flat: Tensor, views: _Views) -> None:
        """Every rank adds everything."""
        whole = views.whole
        for place, piece in enumerate(_split(flat, whole[0][0].numel())):
            parts = [_head(part, len(piece)) for part in whole[self._round & 1]]
            parts[self.rank].copy_(piece)
            self._meet(first=place == 0)
            if self.rank < 2:
                parts[self.rank] = piece  # the same values, in this processor's cache
            _add(parts, piece)

    def _reduce_by_slices(self, flat: Tensor, views: _Views) -> None:
        """Every rank adds its slice of a piece, and shows the sum in the next round, beside the next piece."""
        lane, room = views.lane, views.results[0][0].numel()
        pieces = _split(flat, room * self.size)
        earlier: tuple[Tensor, ...] = ()
        for place in range(len(pieces) + 1):
            buffer = self._round & 1
            slices: tuple[Tensor, ...] = ()
            width = 0
            if place < len(pieces):
                piece = pieces[place]
                width = _up(-(-len(piece) // self.size), lane)
                slices = _split(piece, width)
                for rank, part in enumerate(slices):
                    if rank != self.rank:
                        views.whole[buffer][self.rank][rank * width :][: len(part)].copy_(part)
            self._meet(first=place == 0)
            if self.rank < len(slices):
                own = slices[self.rank]
                parts = [whole[self.rank * width :][: len(own)] for whole in views.whole[buffer]]
                parts[self.rank] = own
                _add(parts, _head(views.results[1 - buffer][self.rank], len(own)))
            for rank, part in enumerate(earlier):
                part.copy_(_head(views.results[buffer][rank], len(part)))
            earlier = slices

    def _make_views(self, dtype: torch.dtype) -> _Views:
        if dtype not in _DTYPES:
            raise ValueError(f"{dtype} cannot be exchanged through shared memory; known are {', '.join(map(str, _DTYPES))}")
        item = dtype.itemsize
        # Of each buffer of n elements, for n ranks: n slices of r elements, and r more for a sum; or n - 1 cells.
        room = self._buffer_bytes // (self.size + 1) // LINE_BYTES * LINE_BYTES // item
        cell = self._buffer_bytes // (self.size - 1) // LINE_BYTES * LINE_BYTES // item
        buffers = torch.frombuffer(self._segment.memory, dtype=dtype, offset=self._segment.data_bytes).view(2, self.size, -1)

        def cell_of(buffer: int, source: int, target: int) -> Tensor:
            start = (target - source - 1) % self.size * cell
            return buffers[buffer, source, start : start + cell]

        both, ranks = range(2), range(self.size)
        self._views[dtype] = _Views(
            code=_DTYPES.index(dtype),
            lane=LINE_BYTES // item,
            whole=[list(buffers[buffer].unbind()) for buffer in both],
            results=[[buffers[buffer, rank, room * self.size :][:room] for rank in ranks] for buffer in both],
            sent=[[cell_of(buffer, self.rank, peer) for peer in ranks] for buffer in both],
            received=[[cell_of(buffer, peer, self.rank) for peer in ranks] for buffer in both],
        )
        return self._views[dtype]


def _add(parts: Sequence[Tensor], out: Tensor) -> None:
    """The sum of two or more parts, in their order. `out` may be none of them but the first two."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)


def _split(tensor: Tensor, length: int) -> tuple[Tensor, ...]:
    """Pieces of `length` elements, the last with what is left; one empty piece of an empty tensor."""
    pieces: tuple[Tensor, ...] = tensor.split(length)  # type: ignore[no-untyped-call]
    return pieces


def _head(tensor: Tensor, length: int) -> Tensor:
    return tensor if len(tensor) == length else tensor[:length]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _flat(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        given = f"a {'contiguous' if tensor.is_contiguous() else 'non-contiguous'} tensor on {tensor.device}"
        raise ValueError(f"{given}; shared memory exchanges contiguous tensors on the CPU; use tensor.contiguous()")
    return tensor.detach().view(-1)


def _refuse_overlap(output: Tensor, tensor: Tensor) -> None:
    starts, ends = [t.data_ptr() for t in (output, tensor)], [t.data_ptr() + t.nbytes for t in (output, tensor)]
    if max(starts) < min(ends):
        raise ValueError("the output overlaps the input, which is still read while it is written; give other memory")


def _said(tensor: Tensor) -> str:
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"


def _signature_of(operation: int, code: int, length: int, detail: int) -> int:
    """One word, for lengths below 2**39."""
    return ((length << 16 | detail) << 4 | code) << 4 | operation


def _called(signature: int) -> tuple[str, str]:
    """The collective's name, and of what it is."""
    operation, code, detail, length = signature & 15, signature >> 4 & 15, signature >> 8 & 65535, signature >> 24
    text = str(_DTYPES[code]).removeprefix("torch.")
    if operation != _ALL_TO_ALL:
        text += f", {length} elements"
    return _NAMES[operation], text + (f", from rank {detail}" if operation == _BROADCAST else "")


_groups: "weakref.WeakSet[SharedGroup]" = weakref.WeakSet()
"""Those of this process."""
