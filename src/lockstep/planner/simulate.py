"""Simulates a training step from traces of its ranks: CUDA streams, process groups, and messages
between pipeline stages."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lockstep.planner.trace import (
    Await,
    AwaitEvent,
    Collective,
    Communicate,
    Compute,
    Item,
    Mark,
    Operation,
    RecordEvent,
    TracedStep,
)

PIPELINE = "pipeline"
PADDED = 16
"""torch.compile pads the rows of a matrix to a multiple of this number of bytes."""
COMPUTED = ("matmul", "attention", "convolution", "memory")
ON_DEVICE = (*COMPUTED, "launches", "bubble")


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Time that Python and torch take to queue a kernel or collective on its stream."""

    kernel: float = 0.0
    marks: Mapping[str, float] = field(default_factory=dict)
    collectives: Mapping[str, float] = field(default_factory=dict)
    """Maps each mesh axis to the host time of a collective."""


@dataclass(frozen=True, slots=True)
class Costs:
    operation: Callable[[Operation], float]
    collective: Callable[[Collective], float]
    """Returns the time of a collective, from when all ranks of its group have called it."""
    host: HostCosts = field(default_factory=HostCosts)
    is_synchronous: bool = False
    """True on a CPU, where the host computes each operation itself."""
    processes: int = 1
    load: float = 1.0
    cores: float = math.inf
    """Number of processes that can compute at full speed at the same time."""
    slice_seconds: float = 0.0
    """Time slice of the operating system's scheduler."""

    @property
    def processes_per_core(self) -> float:
        return self.processes * self.load / self.cores

    def lateness(self, seconds: float) -> float:
        """Return the delay of the slowest process if processes share cores. A delayed process waits
        for whole time slices of other processes."""
        if (shared := self.processes_per_core) <= 1:
            return 0.0
        return min(seconds * (math.ceil(shared) / shared - 1), self.slice_seconds / 2)


@dataclass(frozen=True, slots=True)
class StepTime:
    seconds: float
    by_limit: dict[str, float]
    """Time of the slowest rank by its limit, such as `matmul`, `memory`, `launches` or `bubble`.
    Each mesh axis has its exposed communication time."""
    overlapped_seconds: float = 0.0
    marks: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Rank:
    place: int
    items: Sequence[Item]
    shift: int
    """Offset to add to the peer ranks in a trace that was recorded on another pipeline rank."""
    position: int = 0
    host: float = 0.0
    streams: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    groups: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    events: dict[int, tuple[float, str]] = field(default_factory=dict)
    ends: dict[int, tuple[float, str]] = field(default_factory=dict)
    late: dict[int, float] = field(default_factory=dict)
    """Maps the number of a collective to the delay that the host caused."""
    last_axis: dict[int, str] = field(default_factory=lambda: defaultdict(lambda: "communication"))
    messages: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)
    expected: dict[int, tuple[tuple[int, int, int], float]] = field(default_factory=dict)
    """Maps the number of a pending receive to its (sender, receiver, index) and its start time."""
    together: int = 0
    """Number of collectives so far over all pipeline stages."""
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    marks: dict[str, float] = field(default_factory=dict)
    latest: tuple[str, float] = ("launches", 0.0)
    """Kind and duration of the latest kernel or wait on the default stream."""
    communication: float = 0.0
    computed: float = 0.0
    """Compute time of the host since the last collective, on a CPU."""

    @property
    def device_end(self) -> float:
        return max([0.0, *self.streams.values(), *(end for end, _ in self.ends.values())])

    @property
    def end(self) -> float:
        return max(self.host, self.device_end)


class Simulation:
    def __init__(self, ranks: Sequence[_Rank], costs: Costs) -> None:
        self._ranks, self._costs = ranks, costs
        self._sent: dict[tuple[int, int, int], float] = {}
        self._arrived: dict[int, dict[int, float]] = defaultdict(dict)

    def run(self) -> StepTime:
        while any(rank.position < len(rank.items) for rank in self._ranks):
            if not sum(self._advance(rank) for rank in self._ranks):
                raise AssertionError("the ranks of a pipeline wait for each other")
        slowest = max(self._ranks, key=lambda rank: sum(rank.spent.values()) - rank.spent["bubble"])
        seconds = max(rank.end for rank in self._ranks)
        spent = dict(slowest.spent)
        if not self._costs.is_synchronous:
            spent["launches"] = spent.get("launches", 0.0) + max(
                0.0, slowest.host - slowest.device_end
            )
        spent["bubble"] = spent.get("bubble", 0.0) + max(0.0, seconds - sum(spent.values()))
        waited = sum(each for name, each in spent.items() if name not in ON_DEVICE)
        largest_first = sorted(spent.items(), key=lambda part: -part[1])
        by_limit = {name: each for name, each in largest_first if each}
        return StepTime(seconds, by_limit, max(0.0, slowest.communication - waited), slowest.marks)

    def _advance(self, rank: _Rank) -> bool:
        before = rank.position
        while rank.position < len(rank.items) and self._step(rank, rank.items[rank.position]):
            rank.position += 1
        return rank.position > before

    def _step(self, rank: _Rank, item: Item) -> bool:
        """Return False if another rank must be simulated first."""
        match item:
            case Compute(operation, stream):
                self._compute(rank, operation, stream)
            case Communicate():
                return self._communicate(rank, item)
            case Await(number) if number in rank.expected:
                return self._receive(rank, number, item.stream)
            case Await(number, stream) if number in rank.ends:
                self._wait(rank, stream, *rank.ends[number], rank.late.pop(number, 0.0))
            case RecordEvent(event, stream):
                rank.events[event] = max(rank.streams[stream], rank.host), rank.last_axis[stream]
            case AwaitEvent(event, stream) if event in rank.events:
                self._wait(rank, stream, *rank.events[event])
            case Mark(name):
                self._work(rank, self._costs.host.marks.get(name, 0.0))
                rank.marks[name] = rank.streams[0]
        return True

    def _work(self, rank: _Rank, seconds: float, stream: int = 0) -> None:
        """Add host time. Host time also delays kernels on a CPU, because a CPU has no separate
        stream."""
        rank.host += seconds
        if self._costs.is_synchronous:
            rank.streams[stream] += seconds
            rank.computed += seconds
            rank.spent["launches"] += seconds

    def _compute(self, rank: _Rank, operation: Operation, stream: int) -> None:
        rank.host += self._costs.host.kernel
        start, seconds = max(rank.streams[stream], rank.host), self._costs.operation(operation)
        if stream == 0:
            if idle := start - rank.streams[stream]:
                self._count_as_launches(rank, idle)
            rank.spent[operation.kind] += seconds
            rank.latest = operation.kind, seconds
        rank.streams[stream] = start + seconds
        if self._costs.is_synchronous:
            rank.host = rank.streams[stream]
            rank.computed += seconds

    def _count_as_launches(self, rank: _Rank, idle: float) -> None:
        """Count an idle time of the default stream as `launches`, together with the kernel before
        it. A faster device would shorten neither the idle time nor the kernel."""
        kind, seconds = rank.latest
        rank.spent[kind] -= seconds
        rank.spent["launches"] += idle + seconds
        rank.latest = "launches", 0.0

    def _wait(self, rank: _Rank, stream: int, until: float, axis: str, late: float = 0.0) -> None:
        if until > rank.streams[stream]:
            if stream == 0:
                waited = until - rank.streams[stream]
                late = min(late, waited)
                rank.spent["launches"] += late
                rank.spent[axis] += waited - late
                rank.latest = axis, waited - late
            rank.streams[stream] = until
            rank.last_axis[stream] = axis
        if self._costs.is_synchronous:
            rank.host = max(rank.host, rank.streams[stream])

    def _communicate(self, rank: _Rank, item: Communicate) -> bool:
        seconds = self._costs.collective(item.collective)
        axis = item.collective.axis or "communication"
        if item.peer is not None:
            return self._exchange(rank, item, seconds)
        launched = rank.host + self._costs.host.collectives.get(axis, 0.0)
        ready = max(rank.streams[item.stream], launched)
        if len(self._ranks) > 1 and axis == PIPELINE:
            arrived = self._arrived[rank.together]
            arrived[rank.place] = ready
            if len(arrived) < len(self._ranks):
                return False
            ready = max(arrived.values())
            rank.together += 1
        if len(self._ranks) == 1:
            ready += self._costs.lateness(rank.computed)
            rank.computed = 0.0
        rank.host = launched
        start = max(ready, rank.groups[item.group])
        if not self._costs.is_synchronous:
            rank.late[item.number] = max(
                0.0, launched - max(rank.streams[item.stream], rank.groups[item.group])
            )
        rank.groups[item.group] = start + seconds
        rank.communication += seconds
        rank.ends[item.number] = start + seconds, axis
        return True

    def _receive(self, rank: _Rank, number: int, stream: int) -> bool:
        key, asked = rank.expected[number]
        if key not in self._sent:
            return False
        del rank.expected[number]
        rank.ends[number] = max(self._sent[key], asked), "bubble"
        self._wait(rank, stream, *rank.ends[number])
        return True

    def _exchange(self, rank: _Rank, item: Communicate, seconds: float) -> bool:
        assert item.peer is not None, "a message has one"
        peer = item.peer + rank.shift
        self._work(rank, self._costs.host.collectives.get(PIPELINE, 0.0), item.stream)
        ready = max(rank.streams[item.stream], rank.host)
        if item.receives:
            rank.expected[item.number] = (peer, rank.place, rank.received[peer]), ready
            rank.received[peer] += 1
            return True
        self._sent[rank.place, peer, rank.messages[peer]] = ready + seconds
        rank.messages[peer] += 1
        rank.ends[item.number] = ready + seconds, PIPELINE
        return True


def simulate(traces: Sequence[TracedStep], costs: Costs) -> StepTime:
    """Simulate one trace for each pipeline stage. Several stages may have the same trace."""
    first = {id(trace): place for place, trace in reversed(list(enumerate(traces)))}
    ranks = [_Rank(at, trace.items, at - first[id(trace)]) for at, trace in enumerate(traces)]
    per_core = costs.processes_per_core / len(ranks)
    slower = max(1.0, per_core)  # processes of the same pipeline stage share cores
    shared = costs
    if slower > 1:
        marks = {name: seconds * slower for name, seconds in costs.host.marks.items()}
        host = replace(costs.host, marks=marks)
        shared = replace(costs, operation=lambda each: costs.operation(each) * slower, host=host)
    step = Simulation(ranks, shared).run()
    # With too few cores for all pipeline stages, the step takes at least the work of all stages
    # divided by the cores.
    work = sum(rank.spent[name] for rank in ranks for name in (*COMPUTED, "launches"))
    if (least := work / slower * per_core) <= step.seconds:
        return step
    bubble = step.by_limit.get("bubble", 0.0) + least - step.seconds
    return replace(step, seconds=least, by_limit={**step.by_limit, "bubble": bubble})


def fused(trace: TracedStep) -> TracedStep:
    """Fuse kernels like torch.compile: consecutive kernels that only move bytes become one kernel.
    Pad the rows of matrices."""
    items: list[Item] = []
    for item in trace.items:
        last = items[-1] if items else None
        if not isinstance(item, Compute):
            items.append(item)
        elif isinstance(last, Compute) and _fuses(item, last):
            items[-1] = last if last.operation.bytes >= item.operation.bytes else item
        else:
            aligned = max(PADDED, item.operation.aligned_bytes)
            padded = replace(item.operation, aligned_bytes=aligned)
            items.append(replace(item, operation=padded))
    return replace(trace, items=items)


def _fuses(one: Compute, other: Compute) -> bool:
    first, second = one.operation, other.operation
    return (
        first.kind == second.kind == "memory"
        and one.stream == other.stream
        and first.phase == second.phase != "update"
    )


def extended_trace(trace: TracedStep, traced: int, microbatches: int) -> TracedStep:
    """Extend a trace of three microbatches to `microbatches`: repeat its second microbatch."""
    if traced == microbatches:
        return trace
    assert traced == 3, "a shorter step is traced with three microbatches"
    starts = [at for at, item in enumerate(trace.items) if item == Mark("microbatch")]
    numbers = (getattr(item, "number", getattr(item, "event", 0)) for item in trace.items)
    beyond = 1 + max(0, *numbers)
    middle = [
        item
        for second, third in zip(starts[1::3], starts[2::3], strict=True)
        for item in trace.items[second:third]
    ]
    collectives = {item.number for item in middle if isinstance(item, Communicate)}
    events = {item.event for item in middle if isinstance(item, RecordEvent)}

    def renumbered(item: Item, shift: int) -> Item:
        match item:
            case Communicate(number=number) | Await(number=number) if number in collectives:
                return replace(item, number=number + shift)
            case RecordEvent(event=event) | AwaitEvent(event=event) if event in events:
                return replace(item, event=event + shift)
        return item

    items: list[Item] = []
    end = 0
    for second, third in zip(starts[1::3], starts[2::3], strict=True):
        items += trace.items[end:third]
        for copy in range(1, microbatches - 2):
            items += [renumbered(item, copy * beyond) for item in trace.items[second:third]]
        end = third
    return replace(trace, items=[*items, *trace.items[end:]])
