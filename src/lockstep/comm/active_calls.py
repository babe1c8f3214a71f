"""Lists the collectives that this process is executing, for hang reports. Reads torch's flight
recorders and shared-memory groups."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lockstep.base.torch_private import accelerator_collectives_json, active_collectives_json
from lockstep.comm.shared_memory import SharedMemoryGroup


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    name: str
    group: str
    """The name of the process group. The group of all processes is "default_pg"."""
    sequence: int
    tensors: str
    on_device: bool = False
    label: str = ""
    """The purpose of the call, such as "gathers block 'a'"."""

    def __str__(self) -> str:
        text = f"{self.name} of {self.tensors}" if self.tensors else self.name
        return f"{text}, which {self.label}" if self.label else text


@contextmanager
def announce(call: CollectiveCall) -> Iterator[None]:
    _announced.append(call)
    try:
        yield
    finally:
        _announced.remove(call)


def active_calls() -> list[CollectiveCall]:
    """Return the collectives that this process is executing, and then the unfinished collectives of
    its device, oldest first. Any thread may call this function."""
    calls = [
        *_announced,
        *(
            CollectiveCall(name, group, number, tensors, label=label)
            for name, group, number, tensors, label in SharedMemoryGroup.active_calls()
        ),
    ]
    if not (dist.is_available() and dist.is_initialized()):
        return calls
    calls += [_call(entry) for entry in _entries(active_collectives_json()) if not entry["retired"]]
    recorded = sorted(
        (
            entry
            for recorder in accelerator_collectives_json()
            for entry in open_entries(_entries(recorder))
        ),
        key=lambda entry: int(entry["time_created_ns"]),
    )
    return calls + [_call(entry, on_device=True) for entry in recorded]


def open_entries(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the unfinished collectives in an accelerator's flight recorder. The collectives of a
    group run in order, so an entry before a finished entry is finished too."""
    latest: dict[Hashable, int] = {}
    for entry in entries:
        if _is_done(entry):
            latest[_lane(entry)] = max(latest.get(_lane(entry), -1), entry["record_id"])
    return [entry for entry in entries if entry["record_id"] > latest.get(_lane(entry), -1)]


def _is_done(entry: Mapping[str, Any]) -> bool:
    return bool(entry["retired"]) or entry["state"] == "completed"


def _lane(entry: Mapping[str, Any]) -> Hashable:
    return (*entry["process_group"], entry["is_p2p"])


def _entries(recorded: bytes) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(recorded).get("entries", [])
    return entries


def _call(entry: Mapping[str, Any], *, on_device: bool = False) -> CollectiveCall:
    sequence = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    sizes = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    tensors = ", ".join(
        f"{_DTYPES.get(dtype, dtype.lower())} {tuple(size)}" for dtype, size in sizes
    )
    name = entry["profiling_name"].rpartition(":")[2]
    return CollectiveCall(name, entry["process_group"][1], int(sequence), tensors, on_device)


_announced: list[CollectiveCall] = []
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Byte": "uint8",
}
