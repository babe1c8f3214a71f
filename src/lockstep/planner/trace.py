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
"""Largest alignment that is told apart, in bytes: the size of a cache line."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel in a trace."""

    kind: Kind
    """Kind of the kernel. `memory`: its time is the time to move its bytes."""
    dtype: str
    """Dtype of the arithmetic, such as `bfloat16`."""
    flops: int
    """Number of FLOPs: two for each multiplication and addition; 0 for `memory`."""
    bytes: int
    """Number of bytes read and written."""
    shape: tuple[int, ...] = ()
    """Shape. matmul: (batch, m, n, k). attention: (batch × heads, queries, keys, head dim).
    convolution: (groups, m, n, k) of the forward's product. Else empty."""
    phase: Phase = "other"
    name: str = ""
    """Torch's name of the operation, such as `aten.mm`."""
    aligned_bytes: int = ALIGNED
    """For matmul: the largest power of two, up to 128, that divides the bytes of each row."""


@dataclass(frozen=True, slots=True)
class Collective:
    kind: CollectiveKind
    ranks: int
    """Number of ranks in its group."""
    stride: int
    """Difference between the ranks of neighbours in the group."""
    bytes: int
    """Size in bytes. all_reduce, all_gather, reduce_scatter: of the full tensor (the one that is
    summed, that is returned, that is given). all_to_all: the larger of this rank's two tensors.
    broadcast, send: of the message."""
    axis: str = ""
    phase: Phase = "other"


def sent_bytes(collective: Collective) -> int:
    """Return the number of bytes that a rank sends in a collective, on average over the ranks, with
    the ring algorithm; for a message, its size."""
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
    """For a point-to-point message, the rank that it goes to or comes from; None for a
    collective."""
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
    """A point that the program reaches: `microbatch` (start of a microbatch, in each pass over
    them), `held` (start of the backwards if they wait for all forwards), `dispatch` (DTensor's
    dispatch of an operation), `reduced` (DDP's hook for a gradient), `update` (the optimizer's
    step), `end`."""

    name: str


Item = Compute | Communicate | Await | RecordEvent | AwaitEvent | Mark


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """A memory block that is allocated, or freed if `bytes` is negative."""

    number: int
    bytes: int
    at: int
    """Number of `TracedStep.items` that come before it."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    rank: int
    items: Sequence[Item]
    allocations: Sequence[MemoryChange]
    causes: dict[int, Cause]
    """Number of a memory block -> what it is used for."""
    tokens_per_sample: float | None = None
    """Mean of `Recipe.weight` over this rank's samples; None if the recipe has none."""

    def collectives(self) -> list[Collective]:
        """Return the collectives and messages in order. A message is included on its sender
        only."""
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
    """Return the trace without the device memory that CPU offload moves to the host: parameters,
    gradients and optimizer state."""
    return replace(
        trace,
        allocations=[
            each for each in trace.allocations if trace.causes[each.number] not in ON_HOST
        ],
    )


def with_more_microbatches(trace: TracedStep, traced: int, count: int) -> TracedStep:
    """Return the trace with the memory of a step of `count` microbatches, where `traced` were
    traced. Memory grows with the number of microbatches if every microbatch allocates it and holds
    it until the last backward, or until the first backward if backwards wait for all forwards."""
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
    """The point in the step at which memory is largest, as text."""


def memory_peak(trace: TracedStep) -> Peak:
    """Return the largest memory that is allocated at the same time, with its bytes by cause."""
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
    """Return the point in the step after these items, as text, such as "the backward of microbatch
    2"."""
    marks = [item.name for item in items if isinstance(item, Mark)]
    if "update" in marks:
        return "the optimizer's step"
    phases = [item.operation.phase for item in items if isinstance(item, Compute)]
    latest = phases[-1] if phases else ""
    where = {"forward": "the forward", "backward": "the backward", "recompute": "the backward"}
    return f"{where.get(latest, 'the step')} of microbatch {marks.count('microbatch')}"
