"""The trace of a training step on one rank: its kernels, collectives and memory allocations."""

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
"""Bytes of a cache line. An alignment above this size does not make a kernel faster."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel in a trace."""

    kind: Kind
    """A `memory` kernel takes the time to move its bytes."""
    dtype: str
    flops: int
    bytes: int
    shape: tuple[int, ...] = ()
    """(batch, m, n, k) for matmul, (batch × heads, queries, keys, head dim) for attention, (groups,
    m, n, k) for convolution."""
    phase: Phase = "other"
    name: str = ""
    aligned_bytes: int = ALIGNED
    """Largest power of two, up to 128, that divides the bytes of each row of a matmul."""


@dataclass(frozen=True, slots=True)
class Collective:
    kind: CollectiveKind
    ranks: int
    stride: int
    """Difference between neighbouring ranks of the group."""
    bytes: int
    """Size of the full tensor in all_reduce, all_gather and reduce_scatter. Size of the larger
    tensor of this rank in all_to_all."""
    axis: str = ""
    phase: Phase = "other"


def sent_bytes(collective: Collective) -> int:
    """Return the mean number of bytes that a rank sends in a ring algorithm."""
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
"""Tensors that CPU offload moves to the host."""
DEFAULT_STREAM = 0
DISPATCH, HELD, REDUCED = "dispatch", "held", "reduced"


@dataclass(frozen=True, slots=True)
class Compute:
    operation: Operation
    stream: int = DEFAULT_STREAM


@dataclass(frozen=True, slots=True)
class Communicate:
    """Starts a collective when its stream has reached this item and its group is free."""

    collective: Collective
    number: int
    stream: int
    group: str
    peer: int | None = None
    receives: bool = False


@dataclass(frozen=True, slots=True)
class Await:
    number: int
    stream: int


@dataclass(frozen=True, slots=True)
class RecordEvent:
    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class AwaitEvent:
    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in the program, such as the start of a microbatch or the optimizer's step."""

    name: str


Item = Compute | Communicate | Await | RecordEvent | AwaitEvent | Mark


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """An allocation, or a deallocation if `bytes` is negative."""

    number: int
    bytes: int
    at: int
    """Number of `TracedStep.items` before the allocation."""


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
        """Return the bytes that this rank sends in a step, by collective and mesh axis."""
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
    """Extend the memory of a trace from `traced` to `count` microbatches. Each microbatch holds
    some memory until the last backward."""
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
