"""What published rows leave open and a prediction needs: microbatch and interleaving, as one who
tunes would choose."""

from __future__ import annotations

from dataclasses import replace

from published.machines import device_of
from published.memory import memory_bytes
from published.rows import Row
from published.software import software_of
from published.step import predict


def with_schedule(row: Row) -> Row:
    """Return the row with its own microbatch, or the fastest power of two that fits, with the
    fastest interleaving."""
    if row.microbatch:
        return row
    most = max(1, row.batch // row.data)
    sizes = [1 << power for power in range(most.bit_length()) if most % (1 << power) == 0]
    layers = -(-row.layers // row.pp)
    choices = [
        replace(row, microbatch=size, virtual=chunks)
        for size in sizes
        for chunks in _chunks(row, layers, most // size)
    ]
    fitting = [each for each in choices if _fits(each)] or choices[:1]
    return min(fitting, key=lambda each: predict(each).seconds)


def _chunks(row: Row, layers: int, microbatches: int) -> list[int]:
    """Chunks of layers that a stage may have: interleaving needs whole rounds of microbatches."""
    whole = row.pp > 1 and row.virtual == 1 and microbatches % row.pp == 0
    return [each for each in range(1, layers + 1) if layers % each == 0] if whole else [row.virtual]


def _fits(row: Row) -> bool:
    """With full checkpointing at worst: what a row checkpoints is chosen after its microbatch."""
    software = software_of(row)
    kind = row.checkpointing or software.default_checkpointing or "full"
    return memory_bytes(row, software, kind) <= device_of(row).memory_bytes
