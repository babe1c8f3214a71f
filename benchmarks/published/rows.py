"""The published rows as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "planner_data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published configuration."""

    source: str
    model: str
    notes: str
    gpu: str
    world: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool
    tied: bool
    """The output layer is the embedding."""
    seq: int
    replicas: int
    """Ranks that hold the same shard: data parallelism outside of FSDP."""
    shards: int
    """Size of FSDP's group."""
    tp: int
    pp: int
    cp: int
    virtual: int
    """Chunks of layers that a pipeline's stage has."""
    microbatch: int
    """Sequences. 0 where it is not stated."""
    batch: int
    """Sequences of the whole step."""
    checkpointing: str
    compiled: str
    dtype: str
    updates: bool
    """The step has an optimizer's update."""
    seconds: float | None
    memory_gib: float | None
    out_of_memory: bool
    node_bytes_per_second: float | None
    """Bandwidth of a node's network, where it is stated."""

    @property
    def repository(self) -> str:
        """The source as the fits are split: its repository, or paper."""
        return self.source.split(":")[0].split(" arXiv")[0]

    @property
    def data(self) -> int:
        """Ranks that get microbatches of their own."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def microbatches(self) -> int:
        return max(1, round(self.batch / (self.data * self.microbatch)))

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one rank."""
        return self.microbatch * self.seq // self.cp

    @property
    def head(self) -> int:
        return self.hidden // self.heads
