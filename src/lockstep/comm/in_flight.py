"""The collectives that this process is in, whoever called them: torch's flight recorder and shared groups tell of theirs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lockstep.base.torch_private import active_collectives_json
from lockstep.comm.shared_memory import SharedGroup


@dataclass(frozen=True, slots=True)
class Call:
    """A collective."""

    name: str
    """all_reduce"""
    group: str
    """What torch calls the process group. "default_pg" is all processes."""
    sequence: int
    """The how-many-th call in that group, from 1."""
    tensors: str
    """What this process gave: float32 (4,)."""

    def __str__(self) -> str:
        return f"{self.name} of {self.tensors}" if self.tensors else self.name


@contextmanager
def announced(call: Call) -> Iterator[None]:
    """Within it, this process is about to make that call."""
    _announced.append(call)
    try:
        yield
    finally:
        _announced.remove(call)


def under_way() -> list[Call]:
    """What this process has called and is not done, the oldest first. Any thread may ask."""
    shared = list(_announced)
    shared += [Call(*call) for call in SharedGroup.under_way()]
    return shared + (_of_torch() if dist.is_available() and dist.is_initialized() else [])


def _of_torch() -> list[Call]:
    entries = json.loads(active_collectives_json()).get("entries", [])
    return [_call(entry) for entry in entries if not entry["retired"]]


def _call(entry: dict[str, Any]) -> Call:
    sequence = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    sizes = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    tensors = ", ".join(f"{_DTYPES.get(dtype, dtype.lower())} {tuple(size)}" for dtype, size in sizes)
    return Call(entry["profiling_name"].rpartition(":")[2], entry["process_group"][1], int(sequence), tensors)


_announced: list[Call] = []
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Byte": "uint8",
}
"""What the flight recorder calls some types."""
