"""Traces of torch's profiler: parts of each rank's time, all ranks on one clock. Needs no torch.

A trace is the JSON of `export_chrome_trace`: `ts` and `dur` in microseconds after
`baseTimeNanoseconds`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.base.errors import LaunchError

Span = tuple[float, float]  # (start, stop), seconds
_STEPS = re.compile(r"steps=(\d+):(\d+)")
_EXCHANGES = ("gloo:", "nccl:", "xccl:", "mpi:", "ucc:", "shared:")
_NOT_COMPUTATION = ("c10d::", "_c10d_functional::", "nccl")


def steps_of(text: str) -> range:
    """Parse `--profile`: "steps=10:13" are steps 10, 11 and 12. Raises `LaunchError`."""
    found = _STEPS.fullmatch(text)
    steps = range(0) if found is None else range(int(found[1]), int(found[2]))
    if not steps:
        raise LaunchError(
            f"--profile {text!r}; it is the first step and the one after the last: steps=10:13 are"
            " 10, 11 and 12"
        )
    return steps


@dataclass(frozen=True, slots=True)
class TimeParts:
    """Seconds of one rank."""

    whole: float
    compute: float  # operators and kernels, alone or beside an exchange
    exposed: float  # exchanges without a computation beside them
    overlapped: float  # exchanges beside a computation

    @property
    def idle(self) -> float:
        """Neither computation nor exchange: data, Python, waits for a disk."""
        return self.whole - self.compute - self.exposed


def time_parts(trace: Mapping[str, Any], window: Span, thread: int) -> TimeParts:
    """Return the parts of `window`. `thread`: of training."""
    timed = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    operators = [
        event for event in timed if event.get("cat") == "cpu_op" and event["tid"] == thread
    ]
    kernels = [event for event in timed if event.get("cat") == "kernel"]
    exchanges = [event for event in timed if event["name"].startswith(_EXCHANGES)]
    exchanges += [event for event in kernels if event["name"].startswith("nccl")]
    computed = [
        *_own_spans(operators),
        *(span(event) for event in kernels if not event["name"].startswith(_NOT_COMPUTATION)),
    ]
    inside = union(map(span, exchanges), window)
    shared = union(
        (span(event) for event in exchanges if event["name"].startswith("shared:")), window
    )
    # operators inside a shared-memory collective are exchange
    busy = without(union(computed, window), shared)
    exposed = length(without(inside, busy))
    return TimeParts(window[1] - window[0], length(busy), exposed, length(inside) - exposed)


def _own_spans(operators: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Return when operators computed, without what they call. Autograd's count only if they call
    none: they run hooks, which may wait for ranks."""
    found: list[Span] = []
    for event, called in _with_called(operators):
        name = event["name"]
        if not name.startswith(_NOT_COMPUTATION) and (
            not called or ("::" in name and not name.startswith("autograd::"))
        ):
            found += without([span(event)], called)
    return found


def _with_called(
    operators: Iterable[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], list[Span]]]:
    """Yield each operator with the spans of its own calls."""
    open_: list[tuple[Mapping[str, Any], list[Span]]] = []
    for event in sorted(operators, key=lambda event: (float(event["ts"]), -float(event["dur"]))):
        while open_ and span(open_[-1][0])[1] <= span(event)[0]:
            yield open_.pop()
        if open_:
            open_[-1][1].append(span(event))
        open_.append((event, []))
    yield from open_


def span(event: Mapping[str, Any]) -> Span:
    """Return an event's time in the trace's seconds."""
    start = float(event["ts"]) / 1e6
    return start, start + float(event["dur"]) / 1e6


def union(spans: Iterable[Span], window: Span) -> list[Span]:
    """Unite the spans in the window: sorted, not touching."""
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
    """Return the time of `spans` outside of `others`, both results of `union`."""
    found: list[Span] = []
    for start, stop in spans:
        for first, last in others:
            if last <= start or first >= stop:
                continue
            if first > start:
                found.append((start, first))
            start = max(start, last)
        if start < stop:
            found.append((start, stop))
    return found


def length(spans: Iterable[Span]) -> float:
    return sum(stop - start for start, stop in spans)


def merged(
    traces: Mapping[int, Mapping[str, Any]], hosts: Sequence[str], ahead_seconds: Sequence[float]
) -> dict[str, Any]:
    """Return one trace on rank 0's clock, a process for each rank. `ahead_seconds`: by how much
    each clock is ahead."""
    base = min(int(trace.get("baseTimeNanoseconds", 0)) for trace in traces.values())
    events: list[dict[str, Any]] = []
    for rank, trace in sorted(traces.items()):
        shift = (int(trace.get("baseTimeNanoseconds", 0)) - base) / 1e3 - ahead_seconds[rank] * 1e6
        events += [
            {
                "ph": "M",
                "name": "process_name",
                "pid": rank,
                "tid": 0,
                "args": {"name": f"rank {rank} on {hosts[rank]}"},
            },
            {
                "ph": "M",
                "name": "process_sort_index",
                "pid": rank,
                "tid": 0,
                "args": {"sort_index": rank},
            },
        ]
        for event in trace["traceEvents"]:
            if event.get("ph") == "M" and event["name"].startswith("process_"):
                continue
            moved = {**event, "pid": rank}
            if "ts" in event:
                moved["ts"] = float(event["ts"]) + shift
            if "id" in event:  # of an arrow between events; it must differ between ranks
                moved["id"] = f"{rank}.{event['id']}"
            events.append(moved)
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        "traceEvents": events,
    }


def heaviest(trace: Mapping[str, Any], thread: int, count: int) -> list[tuple[str, int, float]]:
    """Return the operators with the most time of their own: name, calls, seconds."""
    calls: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    open_: list[tuple[str, float]] = []
    timed = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    events = [
        each
        for each in timed
        if each.get("cat") == "kernel" or (each.get("cat") == "cpu_op" and each["tid"] == thread)
    ]
    for event in sorted(events, key=lambda event: (float(event["ts"]), -float(event["dur"]))):
        start, stop = span(event)
        while open_ and open_[-1][1] <= start:
            open_.pop()
        if open_ and event["cat"] != "kernel":
            seconds[open_[-1][0]] -= stop - start
        calls[event["name"]] += 1
        seconds[event["name"]] += stop - start
        if event["cat"] != "kernel":
            open_.append((event["name"], stop))
    return [
        (name, calls[name], seconds[name])
        for name in sorted(seconds, key=lambda name: -seconds[name])[:count]
    ]
