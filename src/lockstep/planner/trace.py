"""The trace of a training step on one rank: the kernels and collectives queued on streams, in
order, and the memory allocated and freed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["matmul", "convolution", "attention", "memory"]
Phase = Literal["forward", "backward", "recompute", "update", "other"]
CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"
]

ALIGNED = 128
"""Alignments above the bytes of a cache line are not told apart."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel in a trace."""

    kind: Kind
    """The time of a `memory` kernel is the time to move its bytes."""
    dtype: str
    flops: int
    bytes: int
    shape: tuple[int, ...] = ()
    """matmul: (batch, m, n, k). attention: (batch × heads, queries, keys, head dim). convolution:
    (groups, m, n, k) of the forward's product. Else empty."""
    phase: Phase = "other"
    name: str = ""
    aligned_bytes: int = ALIGNED
    """For matmul: the largest power of two, up to 128, that divides the bytes of each row."""


@dataclass(frozen=True, slots=True)
class Collective:
    kind: CollectiveKind
    ranks: int
    stride: int
    """Difference between neighbouring ranks of the group."""
    bytes: int
    """all_reduce, all_gather, reduce_scatter: the full tensor. all_to_all: the larger of this
    rank's two tensors. broadcast, send: the message."""
    axis: str = ""
    phase: Phase = "other"


def sent_bytes(collective: Collective) -> int:
    """Bytes that a rank sends with the ring algorithm, on average over the ranks; for a message,
    its size."""
    n, total = collective.ranks, collective.bytes
    match collective.kind:
        case "all_reduce":
            return 2 * total * (n - 1) // n
        case "all_gather" | "reduce_scatter" | "all_to_all" | "broadcast":
            return total * (n - 1) // n
        case _:
            return total


Cause = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "chunked logits",
    "gathered",
    "keys and values",
    "communication",
    "temporary",
    "data",
]
ON_HOST: tuple[Cause, ...] = ("parameters", "gradients", "optimizer")
"""Causes of memory that CPU offload moves to the host."""
DEFAULT_STREAM = 0
DISPATCH, HELD, REDUCED = "dispatch", "held", "reduced"


@dataclass(frozen=True, slots=True)
class Compute:
    operation: Operation
    stream: int = DEFAULT_STREAM


@dataclass(frozen=True, slots=True)
class Communicate:
    """The start of a collective, once its stream has reached this point and its group is free."""

    collective: Collective
    number: int
    stream: int
    group: str
    peer: int | None = None
    receives: bool = False


@dataclass(frozen=True, slots=True)
class Await:
    """A wait of a stream for the collective with this number."""

    number: int
    stream: int


@dataclass(frozen=True, slots=True)
class RecordEvent:
    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class AwaitEvent:
    """A wait of a stream for an event of another stream."""

    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A point that the program reaches: `microbatch` (the start of one, in each pass), `held`
    (start of the backwards if they wait for all forwards), `dispatch` (DTensor dispatches an
    operation), `reduced` (DDP's hook for a gradient), `update` (the optimizer's step), `end`."""

    name: str


Item = Compute | Communicate | Await | RecordEvent | AwaitEvent | Mark


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """An allocated memory block; a freed one if `bytes` is negative."""

    number: int
    bytes: int
    at: int
    """Number of `TracedStep.items` before it."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    rank: int
    items: Sequence[Item]
    allocations: Sequence[MemoryChange]
    causes: dict[int, Cause]
    tokens_per_sample: float | None = None

    def collectives(self) -> list[Collective]:
        return [
            item.collective
            for item in self.items
            if isinstance(item, Communicate) and not item.receives
        ]

    def sent_bytes(self) -> dict[str, int]:
        """Bytes that this rank sends in a step, by collective and mesh axis."""
        sent: Counter[str] = Counter()
        for each in self.collectives():
            sent[f"{each.kind} on {each.axis}"] += sent_bytes(each)
        return dict(sent)


def offloaded(trace: TracedStep) -> TracedStep:
    return replace(
        trace,
        allocations=[
            each for each in trace.allocations if trace.causes[each.number] not in ON_HOST
        ],
    )


def with_more_microbatches(trace: TracedStep, traced: int, count: int) -> TracedStep:
    """Extend the memory of a trace from `traced` to `count` microbatches: each holds some until the
    last backward (or the first, if backwards wait for all forwards)."""
    backward = [
        place
        for place, item in enumerate(trace.items)
        if isinstance(item, Compute) and item.operation.phase == "backward"
    ]
    if count == traced or not backward:
        return trace
    held = [place for place, item in enumerate(trace.items) if item == Mark(HELD)]
    until = held[0] if held else backward[-1]
    born, died, sizes = dict[int, int](), dict[int, int](), dict[int, int]()
    for each in trace.allocations:
        if each.bytes > 0 and each.number not in born:
            born[each.number], sizes[each.number] = each.at, each.bytes
        elif each.bytes < 0:
            died[each.number] = each.at
    start = next(
        place
        for place, item in enumerate(trace.items)
        if isinstance(item, Mark) and item.name == "microbatch"
    )
    alike: dict[tuple[Cause, int], list[int]] = defaultdict(list)
    for number, place in born.items():
        if (
            start < place <= until < died.get(number, len(trace.items))
            and trace.causes[number] not in ON_HOST
        ):
            alike[trace.causes[number], sizes[number]].append(number)
    kept = {number for several in alike.values() if len(several) >= traced for number in several}
    grown = [
        replace(each, bytes=each.bytes * count // traced) if each.number in kept else each
        for each in trace.allocations
    ]
    return replace(trace, allocations=grown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    rank: int
    bytes: int
    by_cause: Mapping[str, int]
    moment: str


def memory_peak(trace: TracedStep) -> Peak:
    total = most = items_before = changes_before = 0
    for index, each in enumerate(trace.allocations):
        total += each.bytes
        if total > most:
            most, changes_before, items_before = total, index + 1, each.at
    by_cause: Counter[str] = Counter()
    for each in trace.allocations[:changes_before]:
        by_cause[trace.causes[each.number]] += each.bytes
    sizes = {cause: size for cause, size in by_cause.most_common() if size}
    return Peak(
        rank=trace.rank, bytes=most, by_cause=sizes, moment=_moment(trace.items[:items_before])
    )


def _moment(items: Sequence[Item]) -> str:
    marks = [item.name for item in items if isinstance(item, Mark)]
    if "update" in marks:
        return "the optimizer's step"
    phases = [item.operation.phase for item in items if isinstance(item, Compute)]
    latest = phases[-1] if phases else ""
    where = {"forward": "the forward", "backward": "the backward", "recompute": "the backward"}
    return f"{where.get(latest, 'the step')} of microbatch {marks.count('microbatch')}"
