"""Reads traces of torch's profiler, which are the JSON of `export_chrome_trace`. `ts` and `dur` are
microseconds after `baseTimeNanoseconds`. A memory event has an address and a size (negative when
memory is freed), but no cause. A memory note gives the cause: it says which tensor is at an
address. Does not import torch."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from lockstep.base.errors import LaunchError
from lockstep.base.units import size

Span = tuple[float, float]  # (start, stop), seconds
_STEPS = re.compile(r"steps=(\d+):(\d+)")
_EXCHANGES = ("gloo:", "nccl:", "xccl:", "mpi:", "ucc:", "shared:")
_NOT_COMPUTATION = ("c10d::", "_c10d_functional::", "nccl")


def profiled_steps(text: str) -> range:
    """Parse the value of `--profile`. "steps=10:13" means the steps 10, 11 and 12."""
    match = _STEPS.fullmatch(text)
    steps = range(0) if match is None else range(int(match[1]), int(match[2]))
    if not steps:
        raise LaunchError(
            f"--profile {text!r}; it must be the first step and the one after the last:"
            " steps=10:13 are 10, 11 and 12"
        )
    return steps


@dataclass(frozen=True, slots=True)
class TimeParts:
    whole: float
    compute: float  # operators and kernels, whether or not a collective runs at the same time
    exposed: float  # collectives without computation at the same time
    overlapped: float  # collectives at the same time as computation

    @property
    def idle(self) -> float:
        """Time of data loading, of Python code, and of waits for a disk."""
        return self.whole - self.compute - self.exposed


def time_parts(trace: Mapping[str, Any], window: Span, thread: int) -> TimeParts:
    timed = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    kernels = [event for event in timed if event.get("cat") == "kernel"]
    exchanges = [event for event in timed if event["name"].startswith(_EXCHANGES)]
    exchanges += [event for event in kernels if event["name"].startswith("nccl")]
    computed = [
        *_own_spans(_operators_of(timed, thread)),
        *(span(event) for event in kernels if not event["name"].startswith(_NOT_COMPUTATION)),
    ]
    inside = union(map(span, exchanges), window)
    shared = union(
        (span(event) for event in exchanges if event["name"].startswith("shared:")), window
    )
    # operators inside a collective over shared memory count as the collective
    busy = without(union(computed, window), shared)
    exposed = length(without(inside, busy))
    return TimeParts(window[1] - window[0], length(busy), exposed, length(inside) - exposed)


def _operators_of(timed: Iterable[Mapping[str, Any]], thread: int) -> list[Mapping[str, Any]]:
    return [event for event in timed if event.get("cat") == "cpu_op" and event["tid"] == thread]


def _own_spans(operators: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Return the spans of operators, without the operators that they call. An operator of autograd
    counts only if it calls no operators, because it may run hooks that wait for ranks."""
    spans: list[Span] = []
    for event, called in _with_called(operators):
        name = event["name"]
        if not name.startswith(_NOT_COMPUTATION) and (
            not called or ("::" in name and not name.startswith("autograd::"))
        ):
            spans += without([span(event)], called)
    return spans


def _with_called(
    operators: Iterable[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], list[Span]]]:
    open_: list[tuple[Mapping[str, Any], list[Span]]] = []
    for event in sorted(operators, key=lambda event: (float(event["ts"]), -float(event["dur"]))):
        while open_ and span(open_[-1][0])[1] <= span(event)[0]:
            yield open_.pop()
        if open_:
            open_[-1][1].append(span(event))
        open_.append((event, []))
    yield from open_


def span(event: Mapping[str, Any]) -> Span:
    """Return start and stop of an event in seconds of the trace's clock."""
    start = float(event["ts"]) / 1e6
    return start, start + float(event["dur"]) / 1e6


def union(spans: Iterable[Span], window: Span) -> list[Span]:
    """Return the union of spans, cut to the window, as sorted spans that do not touch."""
    found: list[Span] = []
    for start, stop in sorted(
        (max(start, window[0]), min(stop, window[1])) for start, stop in spans
    ):
        if stop <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the spans without the overlap with `others`. Both arguments are results of `union`."""
    remaining: list[Span] = []
    for start, stop in spans:
        for first, last in others:
            if last <= start or first >= stop:
                continue
            if first > start:
                remaining.append((start, first))
            start = max(start, last)
        if start < stop:
            remaining.append((start, stop))
    return remaining


def length(spans: Iterable[Span]) -> float:
    return sum(stop - start for start, stop in spans)


def merged(
    traces: Mapping[int, Mapping[str, Any]], hosts: Sequence[str], ahead_seconds: Sequence[float]
) -> dict[str, Any]:
    """Return one trace on rank 0's clock, with a process for each rank. `ahead_seconds` has the
    difference between each rank's clock and rank 0's clock."""
    base = min(int(trace.get("baseTimeNanoseconds", 0)) for trace in traces.values())
    events: list[dict[str, Any]] = []
    for rank, trace in sorted(traces.items()):
        shift = (int(trace.get("baseTimeNanoseconds", 0)) - base) / 1e3 - ahead_seconds[rank] * 1e6
        process = {"ph": "M", "pid": rank, "tid": 0}
        name = f"rank {rank} on {hosts[rank]}"
        events += [
            {**process, "name": "process_name", "args": {"name": name}},
            {**process, "name": "process_sort_index", "args": {"sort_index": rank}},
        ]
        for event in trace["traceEvents"]:
            if event.get("ph") == "M" and event["name"].startswith("process_"):
                continue
            moved = {**event, "pid": rank}
            if "ts" in event:
                moved["ts"] = float(event["ts"]) + shift
            if "id" in event:  # the id of an arrow between events; it must differ between ranks
                moved["id"] = f"{rank}.{event['id']}"
            events.append(moved)
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        "traceEvents": events,
    }


def heaviest(trace: Mapping[str, Any], thread: int, count: int) -> list[tuple[str, int, float]]:
    """Return (name, number of calls, seconds) of the operators that take the most time. The seconds
    of an operator omit the operators that it calls."""
    calls: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    timed = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in timed if event.get("cat") == "kernel"]
    operators = _with_called(_operators_of(timed, thread))
    for event, called in [*operators, *((kernel, []) for kernel in kernels)]:
        calls[event["name"]] += 1
        seconds[event["name"]] += length([span(event)]) - length(called)
    most = sorted(seconds, key=lambda name: -seconds[name])[:count]
    return [(name, calls[name], seconds[name]) for name in most]


CAUSES = (
    *("parameters", "gradients", "optimizer state", "activations"),
    *("keys and values", "chunked logits", "rest"),
)
MOST_POINTS = 400
LARGEST = 10
MARK = "lockstep::memory "
"""Prefix of a memory note's number in a trace."""
_Row = tuple[float, int, list[int]]
_BACKWARD = "autograd::engine::evaluate_function: "
_OF_PATH = {
    "FSDP::all_gather": "parameters",
    "FSDP::post_backward": "gradients",
    "GatherRows": "keys and values",
    "ChunkedTotal": "chunked logits",
    "ChunkedLosses": "chunked logits",
}
_MAKES_MEMORY = ("aten::empty", "aten::new_empty", "aten::resize_")


@dataclass(frozen=True, slots=True)
class KnownTensor:
    cause: str
    """One of `CAUSES`. Empty if only name, shape and dtype are known."""
    address: int
    size_bytes: int
    name: str
    shape: Sequence[int]
    dtype: str

    @property
    def text(self) -> str:
        return f"{self.name} {'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype}"


@dataclass(frozen=True, slots=True)
class MemoryNote:
    """The tensors whose addresses were known at one moment of a profile."""

    tensors: Sequence[KnownTensor]
    is_complete: bool
    """False if the note has only the outputs of one module."""


@dataclass(slots=True)
class Allocation:
    """A piece of memory from its allocation at `start` until it is freed, in seconds of the trace's
    clock."""

    start: float
    size_bytes: int
    thread: int | None
    """None if the memory was allocated before the start of the trace."""
    stop: float = math.inf
    cause: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    seconds: list[float]
    """Times of the points, since the start of the profiled window."""
    bytes_by_cause: dict[str, list[int]]
    peak_bytes: int
    peak_seconds: float
    peak_phase: str
    """The phase of the training loop at the peak. `compute` is divided into `forward` and
    `backward`."""
    at_peak: dict[str, int]
    largest: list[tuple[int, str, str]]
    """(bytes, cause, name) of the largest allocations at the peak."""


def memory_timeline(
    trace: Mapping[str, Any],
    notes: Sequence[MemoryNote],
    phases: Iterable[tuple[str, float, float]],
    window: Span,
    *,
    thread: int,
    device: int | None,
) -> MemoryTimeline | None:
    """Return None if the trace has no memory events of the device. `device` is the accelerator's
    index. None for the CPU. The events of an accelerator give the total memory, so the cause `rest`
    is the total minus all known causes."""
    events = sorted(
        (event for event in trace["traceEvents"] if _is_of(event, device)),
        key=lambda event: float(event["ts"]),
    )
    if not events:
        return None
    timed = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    allocations = [
        (float(event["ts"]) / 1e6, notes[int(event["name"].removeprefix(MARK))])
        for event in timed
        if event["name"].startswith(MARK) and event.get("cat") != "gpu_user_annotation"
    ]
    found = _allocations(events, allocations)
    phases, backward = sorted(phases, key=lambda phase: phase[1]), _backward_spans(timed)
    _attribute(found, timed, phases, backward, thread)
    totals = [] if device is None else _totals(events)
    return _timeline(found, totals, window, lambda at: _phase_at(at, phases, backward))


def _is_of(event: Mapping[str, Any], device: int | None) -> bool:
    if event.get("name") != "[memory]":
        return False
    kind = event["args"]["Device Type"]
    return bool(kind == 0 if device is None else kind != 0 and event["args"]["Device Id"] == device)


def _allocations(
    events: Sequence[Mapping[str, Any]], noted: Sequence[tuple[float, MemoryNote]]
) -> list[Allocation]:
    """Return the allocations. An allocation from before the trace starts at the first note that has
    its address."""
    moments: list[tuple[float, MemoryNote | Mapping[str, Any]]] = [
        *noted,
        *((float(event["ts"]) / 1e6, event) for event in events),
    ]
    live: dict[int, Allocation] = {}
    allocations: list[Allocation] = []

    seen_at = -math.inf

    def begin(address: int, allocation: Allocation) -> None:
        if address in live:
            live[address].stop = seen_at if live[address].thread is None else allocation.start
        live[address] = allocation
        allocations.append(allocation)

    for at, what in sorted(moments, key=lambda moment: moment[0]):
        if isinstance(what, MemoryNote):
            if what.is_complete:
                known = {tensor.address for tensor in what.tensors}
                # memory allocated before the trace ends at the last note with its address: a CPU's
                # trace has no event for its release
                for address in [each for each in live if each not in known]:
                    if live[address].thread is None:
                        live.pop(address).stop = seen_at
                seen_at = at
            for tensor in what.tensors:
                if tensor.address not in live and tensor.cause:
                    begin(tensor.address, Allocation(at, tensor.size_bytes, None))
                allocation = live.get(tensor.address)
                if allocation is None:
                    continue
                if tensor.cause:
                    allocation.cause, allocation.name = tensor.cause, tensor.text
                elif not allocation.name:
                    allocation.name = tensor.text
            continue
        address, count = what["args"]["Addr"], what["args"]["Bytes"]
        if count > 0:
            begin(address, Allocation(at, count, what["tid"]))
        elif address in live:
            live.pop(address).stop = at
    return allocations


def _totals(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, int]]:
    first = events[0]["args"]
    totals = [(float(event["ts"]) / 1e6, event["args"]["Total Allocated"]) for event in events]
    return [(-math.inf, first["Total Allocated"] - first["Bytes"]), *totals]


def _attribute(
    found: Sequence[Allocation],
    timed: Sequence[Mapping[str, Any]],
    phases: Sequence[tuple[str, float, float]],
    backward: Sequence[Span],
    thread: int,
) -> None:
    """Set the cause of the allocations that no memory note names. The training thread allocates
    activations in a forward, and they are alive at the next backward."""
    starts = [start for start, _ in backward]
    unknown = [each for each in found if each.thread is not None and not (each.cause and each.name)]
    paths = _paths(unknown, timed)
    for allocation in found:
        path = paths.get(id(allocation), [])
        if not allocation.cause:
            following = bisect_right(starts, allocation.start)
            known = (
                cause
                for name in path
                for start, cause in _OF_PATH.items()
                if name.startswith(start)
            )
            if (cause := next(known, None)) is not None:
                allocation.cause = cause
            elif (
                allocation.thread == thread
                and following < len(starts)
                and allocation.stop > starts[following]
                and _phase_at(allocation.start, phases, backward) == "forward"
            ):
                allocation.cause = "activations"
            else:
                allocation.cause = "rest"
        if not allocation.name:
            allocation.name = _operator(path)


def _backward_spans(timed: Iterable[Mapping[str, Any]]) -> list[Span]:
    spans: list[Span] = []
    for start, stop in sorted(
        span(event) for event in timed if event["name"].startswith(_BACKWARD)
    ):
        if not spans or start >= spans[-1][1]:
            spans.append((start, stop))
    return spans


def _phase_at(
    at: float, phases: Sequence[tuple[str, float, float]], backward: Sequence[Span]
) -> str:
    index = bisect_right(phases, at, key=lambda phase: phase[1]) - 1
    name = phases[index][0] if index >= 0 and at < phases[index][2] else "between steps"
    if name != "compute":
        return name
    index = bisect_right(backward, at, key=lambda each: each[0]) - 1
    return "backward" if index >= 0 and at < backward[index][1] else "forward"


def _paths(
    allocations: Sequence[Allocation], timed: Iterable[Mapping[str, Any]]
) -> dict[int, list[str]]:
    paths: dict[int, list[str]] = {}
    kinds = ("cpu_op", "user_annotation")
    events = sorted(
        (event for event in timed if event.get("cat") in kinds),
        key=lambda event: (float(event["ts"]), -float(event["dur"])),
    )
    starts = [float(event["ts"]) / 1e6 for event in events]
    open_: dict[int, list[tuple[str, float]]] = {}
    seen = 0
    for allocation in sorted(allocations, key=lambda each: each.start):
        until = bisect_right(starts, allocation.start)
        for event in events[seen:until]:
            stack = open_.setdefault(event["tid"], [])
            start, stop = span(event)
            while stack and stack[-1][1] <= start:
                stack.pop()
            stack.append((event["name"], stop))
        seen = until
        assert allocation.thread is not None
        paths[id(allocation)] = [
            name for name, stop in open_.get(allocation.thread, []) if stop > allocation.start
        ]
    return paths


def _operator(path: Sequence[str]) -> str:
    inner = next(
        (name for name in reversed(path) if not name.startswith((_BACKWARD, *_MAKES_MEMORY))),
        "".join(path[-1:]),
    )
    outer = next((name for name in path if name.startswith(_BACKWARD)), inner)
    return ", ".join(dict.fromkeys(name.removeprefix(_BACKWARD) for name in (outer, inner)))


def _timeline(
    found: Sequence[Allocation],
    totals: Sequence[tuple[float, int]],
    window: Span,
    phase_at: Callable[[float], str],
) -> MemoryTimeline:
    rows = _rows(found, totals, window)
    at, peak, by_cause = max(rows, key=lambda row: row[1])
    live = [
        (each.size_bytes, each.cause, each.name or "unknown")
        for each in found
        if each.start <= at < each.stop and each.size_bytes
    ]
    seen = sum(count for count, _, _ in live)
    if totals and peak > seen:
        live.append((peak - seen, "rest", "allocated before, or by other threads"))
    kept = _thinned(rows, window)
    return MemoryTimeline(
        seconds=[round(row[0] - window[0], 6) for row in kept],
        bytes_by_cause={cause: [row[2][i] for row in kept] for i, cause in enumerate(CAUSES)},
        peak_bytes=peak,
        peak_seconds=round(at - window[0], 6),
        peak_phase=phase_at(at),
        at_peak=dict(zip(CAUSES, by_cause, strict=True)),
        largest=sorted(live, key=lambda each: -each[0])[:LARGEST],
    )


def _rows(
    found: Sequence[Allocation], totals: Sequence[tuple[float, int]], window: Span
) -> list[_Row]:
    changes = [
        (at, sign * each.size_bytes, each.cause)
        for each in found
        for at, sign in ((each.start, 1), (each.stop, -1))
    ]
    changes += [(at, 0, "rest") for at, _ in totals]
    inside = [
        (min(max(at, window[0]), window[1]), change, cause)
        for at, change, cause in changes
        if at < window[1]
    ]
    bytes_now = dict.fromkeys(CAUSES, 0)
    rows: list[_Row] = []
    for at, several in groupby(sorted(inside), key=lambda change: change[0]):
        for _, change, cause in several:
            bytes_now[cause] += change
        by_cause = dict(bytes_now)
        if totals:
            total = totals[bisect_right(totals, at, key=lambda pair: pair[0]) - 1][1]
            known = sum(bytes_now.values()) - bytes_now["rest"]
            by_cause["rest"] = max(0, total - known)
        rows.append((at, sum(by_cause.values()), list(by_cause.values())))
    return rows


def _thinned(rows: Sequence[_Row], window: Span) -> list[_Row]:
    most: dict[int, _Row] = {}
    start, stop = window
    for row in rows:
        part = min(MOST_POINTS - 1, int(MOST_POINTS * (row[0] - start) / (stop - start)))
        if part not in most or row[1] > most[part][1]:
            most[part] = row
    return [most[part] for part in sorted(most)]


def memory_table(ranks: Sequence[Mapping[str, Any] | None]) -> list[str]:
    known = [(rank, each) for rank, each in enumerate(ranks) if each is not None]
    if not known:
        return ["memory over time: not known, since torch counts no memory of this device"]
    lines = [f"{'memory at its peak':<18}" + "".join(f"{name:>17}" for name in ("in all", *CAUSES))]
    for rank, each in known:
        sizes = (each["peak_bytes"], *(each["at_peak"][cause] for cause in CAUSES))
        columns = "".join(f"{size(count):>17}" for count in sizes)
        lines.append(f"  rank {rank:<11}{columns}  in {each['peak_phase']}")
    rank, highest = max(known, key=lambda pair: pair[1]["peak_bytes"])
    lines.append(f"the largest at the peak of rank {rank}:")
    return lines + [
        f"  {size(count):>12}  {cause:<15}  {name}" for count, cause, name in highest["largest"]
    ]
