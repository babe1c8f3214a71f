"""Reading a trace, as `lockstep.verify.trace` writes it. No torch: comparing traces needs numpy alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7, "complex64": 2.0**-23, "complex128": 2.0**-52}
"""One unit in the last place, relative, of a tensor's type; others count as float32."""

Vector = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Mark:
    """What a trace says of one tensor."""

    sha: str
    norm: float
    count: int
    dtype: str
    projection: Vector

    @classmethod
    def of(cls, row: Mapping[str, Any] | None) -> Mark | None:
        if row is None:
            return None
        projection = np.array([math.nan if value is None else value for value in row["projection"]])
        return cls(row["sha"], math.nan if row["norm"] is None else row["norm"], row["count"], row["dtype"], projection)

    @property
    def eps(self) -> float:
        return EPS.get(self.dtype, EPS["float32"])


Marks = dict[str, Mark | None]
"""Name -> mark. None: there was no such tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """One microbatch as one rank computed it."""

    rank: int
    step: int
    index: int
    samples: tuple[int | str, ...]
    """Indices; of a stream, in words."""
    generator: str | None
    """A digest of the random generators' state before the forward."""
    left: str | None
    """The same after it."""
    gradients: Marks | None
    """This microbatch's own. None: no rank had them whole."""

    @property
    def drew(self) -> bool:
        """Whether the forward drew random numbers."""
        return self.left != self.generator


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step as one rank saw it. Tensors are named by kind: `gradients`, `states`, `parameters`, `buffers`."""

    loss: float
    weight: float | None
    norm: float | None
    """What was clipped by. None: nobody clips."""
    lr: float | None
    gain: float
    """What the sum over the microbatches was multiplied by."""
    tensors: Mapping[str, Marks]


@dataclass(slots=True)
class Rank:
    """What one rank wrote of one pair."""

    initial: Mapping[str, Marks] = field(default_factory=dict)
    """`parameters` and `buffers` before the first step."""
    steps: list[Step] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    """Parameters as their gradients were complete in the first backward."""


@dataclass
class Trace:
    """What one run wrote of one pair. Every number is a function of it alone: comparing traces is pure."""

    folder: Path | None
    plan: str
    world_size: int
    facts: Mapping[str, Any]
    pair: int
    ranks: dict[int, Rank]
    microbatches: list[Microbatch]

    @property
    def first(self) -> Rank:
        """Rank 0, which every trace has."""
        return self.ranks[0]

    @property
    def steps(self) -> int:
        return len(self.first.steps)

    @property
    def backward_order(self) -> list[str]:
        """The parameters from the loss to the input: as noted, and the others behind them in the reverse of their registration."""
        noted = self.first.order
        names = list(self.first.initial.get("parameters", {}))
        return noted + [name for name in reversed(names) if name not in set(noted)]

    def of_step(self, step: int) -> list[Microbatch]:
        """The microbatches of a step, of all ranks, by their index."""
        return sorted((m for m in self.microbatches if m.step == step), key=lambda m: (m.index, m.rank))

    def tensor(self, step: int, kind: str, name: str) -> Vector | None:
        """The tensor itself, flat and in float64, where the trace has it."""
        file = self._files.get((step, kind))
        if file is None or name not in file:
            return None
        with safe_open(file[name], framework="numpy") as opened:
            return np.asarray(opened.get_tensor(name), dtype=np.float64).reshape(-1)

    @cached_property
    def _files(self) -> dict[tuple[int, str], dict[str, Path]]:
        found: dict[tuple[int, str], dict[str, Path]] = {}
        if self.folder is None:
            return found
        for path in sorted(self.folder.glob(f"step-*-{self.pair}-*.safetensors")):
            _, number, kind, _, _ = path.stem.split("-")
            with safe_open(path, framework="numpy") as opened:
                found.setdefault((int(number), kind), {}).update(dict.fromkeys(opened.keys(), path))
        return found


def read(folder: Path) -> list[Trace]:
    """A run's traces, one for each (model, optimizer) pair. Empty where the run never came to a step."""
    rows = [row for path in sorted(folder.glob("rank-*.jsonl")) for row in _rows(path)]
    pairs = sorted({row["pair"] for _, row in rows if row["kind"] == "step"})
    return [_trace(folder, pair, len(pairs), rows) for pair in pairs]


def _trace(folder: Path, pair: int, pairs: int, rows: list[tuple[int, dict[str, Any]]]) -> Trace:
    start = next(row for rank, row in rows if row["kind"] == "start" and rank == 0)
    facts = {"pairs": pairs} | {name: value for _, row in rows if row["kind"] == "facts" for name, value in row["facts"].items()}
    trace = Trace(folder, start["plan"], start["world_size"], facts, pair, {}, [])
    for rank, row in rows:
        if row.get("pair") != pair:
            continue
        if row["kind"] == "microbatch":
            trace.microbatches.append(_microbatch(rank, row))
            continue
        entry = trace.ranks.setdefault(rank, Rank())
        if row["kind"] == "initial":
            entry.initial = {kind: _marks(row[kind]) for kind in ("parameters", "buffers")}
        elif row["kind"] == "step":
            entry.order = entry.order or row.get("order", [])
            entry.steps.append(_step(row))
    if not start["whole"]:
        trace.ranks = {0: _together([trace.ranks[rank] for rank in sorted(trace.ranks)])}
    return trace


def _together(ranks: list[Rank]) -> Rank:
    """One model of which each rank wrote a part; what two of them wrote (tied weights of two stages) is the first one's."""

    def joined(parts: Iterable[Mapping[str, Marks]]) -> dict[str, Marks]:
        found: dict[str, Marks] = {}
        for part in parts:
            for kind, marks in part.items():
                found[kind] = {**marks, **found.get(kind, {})}
        return found

    steps = [
        replace(parts[0], tensors=joined(part.tensors for part in parts)) for parts in zip(*(rank.steps for rank in ranks), strict=False)
    ]
    return Rank(joined(rank.initial for rank in ranks), steps, next((rank.order for rank in ranks if rank.order), []))


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    rank = int(path.stem.partition("-")[2])
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):  # a run that was killed may leave half a line
                yield rank, json.loads(line)


def _marks(rows: Mapping[str, Any]) -> Marks:
    return {name: Mark.of(row) for name, row in rows.items()}


def _microbatch(rank: int, row: Mapping[str, Any]) -> Microbatch:
    return Microbatch(
        rank=rank,
        step=row["step"],
        index=row["index"],
        samples=tuple(row["samples"]),
        generator=row["generator"],
        left=row["left"],
        gradients=_marks(row["gradients"]) if "gradients" in row else None,
    )


def _step(row: Mapping[str, Any]) -> Step:
    return Step(
        loss=math.nan if row["loss"] is None else row["loss"],
        weight=row["weight"],
        norm=row["norm"],
        lr=row["lr"],
        gain=row["gain"],
        tensors={kind: _marks(row[kind]) for kind in ("gradients", "states", "parameters", "buffers")},
    )
