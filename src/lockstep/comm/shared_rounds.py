"""The rounds of a collective through shared memory.

[Note: Rounds] In round n a rank writes into its buffer n % 2, sets its counter to n, waits until
all counters have reached n, and reads the other ranks' buffers n % 2. A rank whose counter is n has
finished reading round n - 1. After all counters have reached n, the buffers of round n - 1 are free
for round n + 1. Counters are never reset, and a round has one wait. In the first round of a call,
all ranks compare their collectives. A mismatch is an error, not a wrong sum.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.base.dtypes import dtype_name
from lockstep.comm.segment import LINE_BYTES, CallsDiffer, Segment
from lockstep.comm.torch_collectives import waits

NAMES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.complex64, torch.complex128, torch.bool),
)


@dataclass(frozen=True, slots=True)
class BufferViews:
    """The shared buffers (two of each rank) as tensors of one dtype. Each list is indexed by
    [buffer][rank]."""

    dtype_code: int
    elements_per_line: int
    """Number of elements in a cache line. The slices of two ranks are in different cache lines."""
    whole: list[list[Tensor]]
    results: list[list[Tensor]]
    sent: list[list[Tensor]]
    received: list[list[Tensor]]


class Rounds:
    """The rounds of a shared-memory group on one rank. Only one thread may use this object at a
    time."""

    def __init__(self, segment: Segment, buffer_bytes: int) -> None:
        self.others = segment.peers
        self.number = 0
        """The number of the last round whose data this rank has written."""
        self.signature = 0
        self._rank = segment.rank
        self._size = segment.size
        self._segment = segment
        self._buffer_bytes = buffer_bytes
        self._words = segment.words
        self._other_counters = [segment.counters[peer] for peer in segment.peers]
        self._calls = [
            [segment.calls(buffer, rank) for rank in range(segment.size)] for buffer in range(2)
        ]
        self._views: dict[torch.dtype, BufferViews] = {}
        self.labels: list[str] = [""]

    @property
    def buffer(self) -> int:
        """The index (0 or 1) of the buffer into which this rank writes in the next round. No rank
        reads this buffer before `announce`."""
        return self.number & 1

    def start(
        self, collective: str, tensor: Tensor, detail: int = 0, sizes: Sequence[int] | None = None
    ) -> BufferViews:
        """Write a description of this rank's call, which all ranks compare. For a broadcast,
        `detail` is the source rank. For all collectives except broadcast, `detail` is the number of
        the label. Only all_to_all uses `sizes`."""
        views = self._views.get(tensor.dtype) or self._make_views(tensor.dtype)
        length = tensor.numel() if sizes is None else 0
        self.signature = signature_of(collective, views.dtype_code, length, detail)
        place = self._calls[self.buffer][self._rank]
        self._words[place] = self.signature
        if sizes is not None:
            for word, size in enumerate(sizes, place + 1):
                self._words[word] = size
        return views

    def meet(self, *, first: bool = False) -> None:
        self.announce()
        self.wait(first=first)

    def announce(self) -> None:
        self.number += 1
        self._segment.announce(self.number)

    def wait(self, *, first: bool) -> None:
        target, words = self.number, self._words
        for place in self._other_counters:
            if words[place] < target:
                began = time.perf_counter()
                self._segment.wait(target)
                waits.seconds += time.perf_counter() - began
                break
        if first:
            calls = self._calls[(target - 1) & 1]
            for peer in self.others:
                if words[calls[peer]] != self.signature:
                    raise self._difference(peer, [words[place] for place in calls])

    def most_sent(self, buffer: int, output_sizes: Sequence[int]) -> int:
        """Return the length of the longest chunk that any rank sends to another rank in an
        all_to_all. Raises `CallsDiffer` unless the ranks send this rank `output_sizes` elements."""
        most = 0
        for rank, place in enumerate(self._calls[buffer]):
            sizes = self._words[place + 1 : place + 1 + self._size].tolist()
            if sizes[self._rank] != output_sizes[rank]:
                source, target = self._segment.names[rank], self._segment.names[self._rank]
                text = (
                    f"all_to_all: rank {source} sends {sizes[self._rank]} elements to rank"
                    f" {target}, which expects {output_sizes[rank]}"
                )
                raise CallsDiffer((rank,), text)
            sizes[rank] = 0
            most = max(most, *sizes)
        return most

    def forget_views(self) -> None:
        self._views.clear()

    def _difference(self, peer: int, signatures: Sequence[int]) -> CallsDiffer:
        other = next(rank for rank, each in enumerate(signatures) if each != signatures[0])
        pair = [(self._segment.names[rank], signatures[rank]) for rank in (0, other)]
        texts = [f"rank {name} called {{}} of {{}}".format(*called(each)) for name, each in pair]
        text = f"{' and '.join(texts)}; all ranks of a group make the same calls in the same order"
        done = {name: self._purpose(each) for name, each in pair}
        has_labels = any(label_of(each) for _, each in pair) and len(set(done.values())) > 1
        return CallsDiffer((peer,), text, done if has_labels else None)

    def label_in(self, signature: int) -> str:
        number = label_of(signature)
        return self.labels[number] if number < len(self.labels) else ""

    def _purpose(self, signature: int) -> str:
        return self.label_in(signature) or f"calls {called(signature)[0]}"

    def _make_views(self, dtype: torch.dtype) -> BufferViews:
        if dtype not in DTYPES:
            raise ValueError(
                f"{dtype} cannot be exchanged through shared memory; the known dtypes are"
                f" {', '.join(map(str, DTYPES))}"
            )
        item, size = dtype.itemsize, self._size
        # A buffer holds one slice per rank and one more for a sum (`room` elements each); or one
        # cell per other rank.
        room = self._buffer_bytes // (size + 1) // LINE_BYTES * LINE_BYTES // item
        cell = self._buffer_bytes // (size - 1) // LINE_BYTES * LINE_BYTES // item
        buffers = torch.frombuffer(
            self._segment.memory, dtype=dtype, offset=self._segment.data_bytes
        ).view(2, size, -1)

        def cell_of(buffer: int, source: int, target: int) -> Tensor:
            start = (target - source - 1) % size * cell
            return buffers[buffer, source, start : start + cell]

        both, ranks = range(2), range(size)
        self._views[dtype] = BufferViews(
            dtype_code=DTYPES.index(dtype),
            elements_per_line=LINE_BYTES // item,
            whole=[list(buffers[buffer].unbind()) for buffer in both],
            results=[
                [buffers[buffer, rank, room * size :][:room] for rank in ranks] for buffer in both
            ],
            sent=[[cell_of(buffer, self._rank, peer) for peer in ranks] for buffer in both],
            received=[[cell_of(buffer, peer, self._rank) for peer in ranks] for buffer in both],
        )
        return self._views[dtype]


def add(parts: Sequence[Tensor], out: Tensor) -> None:
    """Add tensors. `out` may be one of the first two parts."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)


def split(tensor: Tensor, length: int) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = tensor.split(length)  # type: ignore[no-untyped-call]
    return pieces


def head(tensor: Tensor, length: int) -> Tensor:
    return tensor if len(tensor) == length else tensor[:length]


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def flat(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        kind = "contiguous" if tensor.is_contiguous() else "non-contiguous"
        raise ValueError(
            f"a {kind} tensor on {tensor.device}; shared memory exchanges contiguous tensors on the"
            " CPU; use tensor.contiguous()"
        )
    return tensor.detach().view(-1)


def refuse_overlap(output: Tensor, tensor: Tensor) -> None:
    first, second = sorted((output, tensor), key=Tensor.data_ptr)
    if second.data_ptr() < min(t.data_ptr() + t.nbytes for t in (first, second)):
        raise ValueError(
            "the output overlaps the input, which is still read while the output is written; give "
            "a separate tensor"
        )


def size_text(tensor: Tensor) -> str:
    return f"{tensor.numel()} {dtype_name(tensor.dtype)}"


def signature_of(collective: str, dtype_code: int, length: int, detail: int) -> int:
    """Return a collective call as one 64-bit word, which ranks can compare. `length` must be below
    2**39."""
    return ((length << 16 | detail) << 4 | dtype_code) << 4 | NAMES.index(collective)


def label_of(signature: int) -> int:
    return 0 if NAMES[signature & 15] == "broadcast" else signature >> 8 & 65535


def called(signature: int) -> tuple[str, str]:
    name, text = NAMES[signature & 15], dtype_name(DTYPES[signature >> 4 & 15])
    if name != "all_to_all":
        text += f", {signature >> 24} elements"
    return name, text + (f", from rank {signature >> 8 & 65535}" if name == "broadcast" else "")
