"""Memory over time by cause, from made-up traces."""

from __future__ import annotations

from typing import Any

from lockstep.hooks.profiling.trace import (
    MARK,
    MOST_POINTS,
    KnownTensor,
    MemoryNote,
    MemoryTimeline,
    memory_table,
    memory_timeline,
)
from lockstep.model.chunked_logits import ChunkedLosses, ChunkedTotal
from lockstep.model.context.exchange import GatherRows

TRAINING, OTHER = 1, 2
COMPUTE = [("compute", 0.0, 1.0)]


def memory(
    at: float,
    address: int,
    change: int,
    *,
    thread: int = TRAINING,
    kind: int = 0,
    index: int = -1,
    total: int = 0,
) -> dict[str, Any]:
    args = {
        "Addr": address,
        "Bytes": change,
        "Device Type": kind,
        "Device Id": index,
        "Total Allocated": total,
    }
    return {"ph": "i", "name": "[memory]", "ts": at * 1e6, "tid": thread, "args": args}


def during(
    start: float, stop: float, name: str, *, thread: int = TRAINING, cat: str = "cpu_op"
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": start * 1e6,
        "dur": (stop - start) * 1e6,
        "tid": thread,
    }


def mark(at: float, number: int) -> dict[str, Any]:
    return during(at, at, f"{MARK}{number}", cat="user_annotation")


def backward(
    start: float, stop: float, name: str = "MmBackward0", thread: int = TRAINING
) -> dict[str, Any]:
    return during(start, stop, f"autograd::engine::evaluate_function: {name}", thread=thread)


def timeline(
    events: list[dict[str, Any]], notes: list[MemoryNote] | None = None, **given: Any
) -> MemoryTimeline:
    given = {"phases": COMPUTE, "window": (0.0, 1.0), "thread": TRAINING, "device": None} | given
    found = memory_timeline({"traceEvents": events}, notes or [], **given)
    assert found is not None
    return found


def weight(address: int = 7, size: int = 100) -> KnownTensor:
    return KnownTensor("parameters", address, size, "weight", (25,), "float32")


def at_peak(found: MemoryTimeline) -> dict[str, int]:
    return {cause: size for cause, size in found.at_peak.items() if size}


def test_activations_are_what_the_forward_leaves_for_the_backward() -> None:
    found = timeline([
        memory(0.1, 10, 8), memory(0.2, 11, 4), memory(0.25, 11, -4),  # one is kept, one is not
        memory(0.26, 12, 2, thread=OTHER),  # of a thread that loads data
        during(0.09, 0.12, "aten::linear"), during(0.095, 0.11, "aten::empty"),
        backward(0.3, 0.4, thread=OTHER), during(0.32, 0.38, "aten::mm", thread=OTHER),
        memory(0.35, 13, 16, thread=OTHER),
        memory(0.45, 10, -8), memory(0.5, 13, -16),
    ])  # fmt: skip
    assert at_peak(found) == {"activations": 8, "rest": 18}
    assert (found.peak_seconds, found.peak_phase) == (0.35, "backward")
    assert found.largest == [
        (16, "rest", "MmBackward0, aten::mm"),
        (8, "activations", "aten::linear"),
        (2, "rest", "unknown"),
    ]
    assert max(found.bytes_by_cause["activations"]) == 8


def test_a_note_says_what_an_address_is_at_its_moment_alone() -> None:
    gradient = KnownTensor("gradients", 10, 8, "gradient of weight", (2,), "float32")
    notes = [
        MemoryNote([weight()], is_complete=True),
        MemoryNote([weight(), gradient], is_complete=True),
    ]
    events = [
        mark(0.05, 0),
        memory(0.1, 10, 8),
        memory(0.2, 10, -8),
        memory(0.3, 10, 8),
        mark(0.4, 1),
        memory(0.5, 10, -8),
    ]
    sizes = timeline(events, notes).bytes_by_cause
    assert sizes["parameters"] == [100] * 5
    assert sizes["rest"] == [0, 8, 0, 0, 0]
    assert sizes["gradients"] == [0, 0, 0, 8, 0]


def test_the_name_of_a_modules_output_does_not_decide_its_cause() -> None:
    output = KnownTensor("", 10, 8, "output of layer", (1, 2), "float32")
    events = [memory(0.1, 10, 8), mark(0.15, 0), backward(0.3, 0.4)]
    assert timeline(events, [MemoryNote([output], is_complete=False)]).largest == [
        (8, "activations", "output of layer 1x2 float32")
    ]


def test_what_fsdp_gathers_is_parameters_and_what_it_reduces_gradients() -> None:
    gathered = [
        during(0.1, 0.2, "FSDP::all_gather (0)", cat="user_annotation"),
        memory(0.15, 10, 8),
    ]
    reduced = [
        during(0.4, 0.5, "FSDP::post_backward_reduce (0)", cat="user_annotation"),
        memory(0.45, 11, 4),
    ]
    assert at_peak(timeline([*gathered, backward(0.3, 0.35), *reduced])) == {
        "parameters": 8,
        "gradients": 4,
    }


def test_functions_of_autograd_show_keys_and_values_and_chunked_logits() -> None:
    names = GatherRows.__name__, ChunkedTotal.__name__, f"{ChunkedLosses.__name__}Backward"
    events = [
        event
        for place, name in enumerate(names)
        for event in (
            during(0.1 * place, 0.1 * place + 0.05, name),
            memory(0.1 * place + 0.02, 10 + place, 2**place),
        )
    ]
    assert at_peak(timeline([*events, backward(0.5, 0.6)])) == {
        "keys and values": 1,
        "chunked logits": 2 + 4,
    }


def test_on_a_cpu_what_was_there_before_and_is_not_noted_again_ended_when_it_was_last_seen() -> (
    None
):
    gradient = KnownTensor("gradients", 8, 50, "gradient of weight", (2,), "float32")
    notes = [
        MemoryNote([weight(), gradient], is_complete=True),
        MemoryNote([weight()], is_complete=True),
    ]
    # elsewhere, and in its place
    for events in ([memory(0.3, 20, 60), mark(0.4, 1)], [memory(0.3, 8, 60), mark(0.4, 1)]):
        found = timeline([mark(0.05, 0), *events], notes)
        assert at_peak(found) == {"parameters": 100, "rest": 60}
        assert set(found.bytes_by_cause["gradients"]) == {0}


def test_on_an_accelerator_the_rest_is_what_remains_of_all_that_is_allocated() -> None:
    events = [
        mark(0.05, 0), memory(0.1, 20, 8, kind=1, index=0, total=158),
        memory(0.2, 99, -30, kind=1, index=0, total=128),  # from before the trace
        # another thread has freed 4, which the trace lacks
        memory(0.3, 21, 8, kind=1, index=0, total=132),
        # of other devices
        memory(0.1, 20, 5000), memory(0.1, 20, 5000, kind=1, index=1, total=9000),
    ]  # fmt: skip
    found = timeline(events, [MemoryNote([weight()], is_complete=True)], device=0)
    assert found.seconds == [0.0, 0.05, 0.1, 0.2, 0.3]
    assert found.bytes_by_cause["parameters"] == [0, 100, 100, 100, 100]
    assert found.bytes_by_cause["rest"] == [150, 50, 58, 28, 32]
    assert at_peak(found) == {"parameters": 100, "rest": 58}
    assert found.largest[1:] == [
        (50, "rest", "allocated before, or by other threads"),
        (8, "rest", "unknown"),
    ]


def test_a_trace_without_memory_events_of_the_device_has_no_timeline() -> None:
    events = [memory(0.1, 10, 8)]
    assert (
        memory_timeline({"traceEvents": events}, [], COMPUTE, (0.0, 1.0), thread=TRAINING, device=0)
        is None
    )
    assert memory_table([None]) == [
        "memory over time: not known, since torch counts no memory of this device"
    ]


def test_a_long_timeline_is_thinned_and_keeps_its_peak() -> None:
    events = [memory(0.5 + place / 1e5, place, 1) for place in range(1000)] + [
        memory(0.511, 1, -1),
        memory(0.3, 5000, 3),
    ]
    found = timeline(events)
    assert len(found.seconds) <= MOST_POINTS
    assert found.seconds == sorted(found.seconds)
    assert max(found.bytes_by_cause["rest"]) == found.peak_bytes == 1003
