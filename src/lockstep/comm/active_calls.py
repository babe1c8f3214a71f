"""The collectives that this process is in now: torch's flight recorder and shared-memory groups report theirs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lockstep.base.torch_private import active_collectives_json
from lockstep.comm.shared_memory import SharedMemoryGroup


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    name: str
    group: str
    """The process group's name in torch. "default_pg" is all processes."""
    sequence: int
    tensors: str
    """The type and shape of what this process gave: float32 (4,)."""

    def __str__(self) -> str:
        return f"{self.name} of {self.tensors}" if self.tensors else self.name


@contextmanager
def announce(call: CollectiveCall) -> Iterator[None]:
    """List `call` among the active calls while the body runs. For a call that this process is about to make."""
    _announced.append(call)
    try:
        yield
    finally:
        _announced.remove(call)


def active_calls() -> list[CollectiveCall]:
    """Return the collectives that this process is in, the oldest first. Any thread may call it."""
    calls = [*_announced, *(CollectiveCall(*call) for call in SharedMemoryGroup.active_calls())]
    return calls + (_in_torch() if dist.is_available() and dist.is_initialized() else [])


def _in_torch() -> list[CollectiveCall]:
    entries = json.loads(active_collectives_json()).get("entries", [])
    return [_call(entry) for entry in entries if not entry["retired"]]


def _call(entry: dict[str, Any]) -> CollectiveCall:
    sequence = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    sizes = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    tensors = ", ".join(f"{_DTYPES.get(dtype, dtype.lower())} {tuple(size)}" for dtype, size in sizes)
    return CollectiveCall(entry["profiling_name"].rpartition(":")[2], entry["process_group"][1], int(sequence), tensors)


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
"""The flight recorder's name of a dtype -> torch's."""
