"""Reads the traces of runs, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from lockstep.evidence.rows import read_row_file
from lockstep.evidence.tensors import Summaries, TensorSummary, Vector, added, distance


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchTrace:
    rank: int
    step: int
    index: int
    samples: tuple[int | str, ...]
    batch: Mapping[str, str]
    """Digests of the parts of the batch, by path such as `[0]`. Empty if a rank computed only some
    of the samples."""
    rng_before: str | None
    rng_after: str | None
    gradients: Summaries | None
    """Gradients of the microbatch, or of this rank's tokens of the microbatch. None if no rank has
    full gradients."""
    together: tuple[int, ...] = ()
    """Ranks that each computed some of the microbatch's tokens. Empty if this rank computed all
    tokens."""
    loads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Number of tokens of each expert in the balance loss, for each layer of experts."""

    @property
    def drew_random_numbers(self) -> bool:
        return self.rng_after != self.rng_before


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTrace:
    """Sketches of the tokens that one rank computed in a microbatch of the first step."""

    rank: int
    places: np.ndarray[Any, np.dtype[np.int64]]
    sketches: Mapping[str, Vector]
    """Sketches of each token's `output` and of its `gradient`, of shape (samples, tokens,
    projections)."""
    documents: np.ndarray[Any, np.dtype[np.int64]] | None
    """The document of each token, of shape (samples, tokens of the whole sequence). None if each
    sample is one document."""


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """The input, the routing and the output of a layer of experts, for the tokens of one rank in a
    microbatch."""

    choices: np.ndarray[Any, np.dtype[np.int64]]
    """Indices of the experts that each token chose, of shape (tokens, k)."""
    tokens: Vector
    """Sketches of the layer's input, of shape (tokens, projections)."""
    output: Vector


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTrace:
    loss: float
    weight: float | None
    norm: float | None
    lr: float | None
    gain: float
    tensors: Mapping[str, Summaries]
    """Summaries of the tensors in the step, by kind (`gradients`, `states`, `parameters`,
    `buffers`)."""
    terms: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class RankTrace:
    """The trace that one rank wrote of one model."""

    initial: Mapping[str, Summaries] = field(default_factory=dict)
    steps: list[StepTrace] = field(default_factory=list)
    gradient_order: list[str] = field(default_factory=list)
    """Parameters in the order in which the first backward computed their gradients."""


@dataclass
class Trace:
    """The trace of one model in one run."""

    folder: Path | None
    plan: str
    world_size: int
    metadata: Mapping[str, Any]
    module_index: int
    ranks: dict[int, RankTrace]
    microbatches: list[MicrobatchTrace]
    logged: dict[int, dict[str, float]] = field(default_factory=dict)
    """Numbers that the script has logged, by step. Only the trace of the first model has logged
    numbers."""

    @property
    def rank_0(self) -> RankTrace:
        return self.ranks[0]

    @property
    def steps(self) -> int:
        return len(self.rank_0.steps)

    @property
    def backward_order(self) -> list[str]:
        reached = self.rank_0.gradient_order
        names = list(self.rank_0.initial.get("parameters", {}))
        return reached + [name for name in reversed(names) if name not in set(reached)]

    def microbatches_of(self, step: int) -> list[MicrobatchTrace]:
        return sorted(
            (m for m in self.microbatches if m.step == step), key=lambda m: (m.index, m.rank)
        )

    def whole_microbatches_of(self, step: int) -> list[MicrobatchTrace]:
        """Return the step's microbatches. The gradients of ranks that shared a microbatch are
        added."""
        by_index: dict[tuple[int, tuple[int, ...]], list[MicrobatchTrace]] = {}
        for m in self.microbatches_of(step):
            by_index.setdefault((m.index, m.together or (m.rank,)), []).append(m)
        return [_sum_of_parts(parts) for parts in by_index.values()]

    def tokens_of(self, index: int) -> list[TokenTrace]:
        if self.folder is None:
            return []
        paths = self.folder.glob(f"tokens-{self.module_index}-{index}-*.safetensors")
        return [_tokens(path) for path in sorted(paths)]

    def experts_of(self, index: int) -> dict[int, dict[str, LayerTrace]]:
        if self.folder is None:
            return {}
        paths = self.folder.glob(f"experts-{self.module_index}-{index}-*.safetensors")
        return {int(path.stem.rpartition("-")[2]): _layers(path) for path in sorted(paths)}

    def tensor(self, step: int, kind: str, name: str) -> Vector | None:
        file = self._files.get((step, kind))
        if file is None or name not in file:
            return None
        with safe_open(file[name], framework="numpy") as opened:
            return np.asarray(opened.get_tensor(name), dtype=np.float64).reshape(-1)

    @cached_property
    def _files(self) -> dict[tuple[int, str], dict[str, Path]]:
        files: dict[tuple[int, str], dict[str, Path]] = {}
        if self.folder is None:
            return files
        for path in sorted(self.folder.glob(f"step-*-{self.module_index}-*.safetensors")):
            _, step, kind, _, _ = path.stem.split("-")
            with safe_open(path, framework="numpy") as opened:
                files.setdefault((int(step), kind), {}).update(dict.fromkeys(opened.keys(), path))
        return files


def read_traces(folder: Path) -> list[Trace]:
    """Return one trace for each model. Empty if the run did not finish a step."""
    rows = [
        (int(path.stem.partition("-")[2]), row)
        for path in sorted(folder.glob("rank-*.jsonl"))
        for row in read_row_file(path)
    ]
    modules = sorted({row["module"] for _, row in rows if row["kind"] == "step"})
    return [_trace(folder, module, len(modules), rows) for module in modules]


def _trace(
    folder: Path, module_index: int, modules: int, rows: list[tuple[int, dict[str, Any]]]
) -> Trace:
    start = next(row for rank, row in rows if row["kind"] == "start" and rank == 0)
    metadata: dict[str, Any] = {"modules": modules}
    for _, row in rows:
        metadata |= row.get("metadata", {})
    trace = Trace(folder, start["plan"], start["world_size"], metadata, module_index, {}, [])
    for rank, row in rows:
        if row.get("module") != module_index:
            continue
        if row["kind"] == "microbatch":
            trace.microbatches.append(_microbatch(rank, row))
            continue
        if row["kind"] == "logged":
            trace.logged[row["step"]] = {name: _or_nan(x) for name, x in row["values"].items()}
            continue
        entry = trace.ranks.setdefault(rank, RankTrace())
        if row["kind"] == "initial":
            entry.initial = {kind: _summaries(row[kind]) for kind in ("parameters", "buffers")}
        elif row["kind"] == "step":
            entry.gradient_order = entry.gradient_order or row["gradient_order"]
            kinds = ("gradients", "states", "parameters", "buffers")
            tensors = {kind: _summaries(row[kind]) for kind in kinds}
            entry.steps.append(_step(row, tensors))
    if not start["replicated"]:
        trace.ranks = {0: _merged([trace.ranks[rank] for rank in sorted(trace.ranks)])}
    return trace


def _microbatch(rank: int, row: Mapping[str, Any]) -> MicrobatchTrace:
    names = ("step", "index", "batch", "rng_before", "rng_after")
    return MicrobatchTrace(
        rank=rank,
        together=tuple(row.get("together", ())),
        loads={name: tuple(counts) for name, counts in row.get("loads", {}).items()},
        samples=tuple(row["samples"]),
        gradients=_summaries(row["gradients"]) if "gradients" in row else None,
        **{name: row[name] for name in names},
    )


def _step(row: Mapping[str, Any], tensors: Mapping[str, Summaries]) -> StepTrace:
    return StepTrace(
        loss=_or_nan(row["loss"]),
        tensors=tensors,
        terms=row.get("terms", {}),
        **{name: row[name] for name in ("weight", "norm", "lr", "gain")},
    )


def _sum_of_parts(parts: list[MicrobatchTrace]) -> MicrobatchTrace:
    gradients = [part.gradients for part in parts if part.gradients is not None]
    if len(parts) == 1 or len(gradients) < len(parts):
        return parts[0]
    return replace(parts[0], gradients=added(gradients))


def _tokens(path: Path) -> TokenTrace:
    with safe_open(path, framework="numpy") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return TokenTrace(
        rank=int(path.stem.rpartition("-")[2]),
        places=tensors.pop("places"),
        documents=tensors.pop("documents", None),
        sketches={name: np.asarray(each, dtype=np.float64) for name, each in tensors.items()},
    )


def _layers(path: Path) -> dict[str, LayerTrace]:
    with safe_open(path, framework="numpy") as opened:
        names = [key.removesuffix("/choices") for key in opened.keys() if "/choices" in key]  # noqa: SIM118
        return {
            name: LayerTrace(
                opened.get_tensor(f"{name}/choices"),
                *(
                    opened.get_tensor(f"{name}/{what}").astype(float)
                    for what in ("tokens", "output")
                ),
            )
            for name in names
        }


def _merged(ranks: list[RankTrace]) -> RankTrace:
    """Merge the traces of ranks that wrote different parts of a model. If two ranks wrote the same
    tensor, use the lower rank's."""

    def merged(parts: Iterable[Mapping[str, Summaries]]) -> dict[str, Summaries]:
        summaries_of: dict[str, Summaries] = {}
        for part in parts:
            for kind, summaries in part.items():
                summaries_of[kind] = {**summaries, **summaries_of.get(kind, {})}
        return summaries_of

    steps = [
        replace(parts[0], tensors=merged(part.tensors for part in parts))
        for parts in zip(*(rank.steps for rank in ranks), strict=False)
    ]
    order = next((rank.gradient_order for rank in ranks if rank.gradient_order), [])
    return RankTrace(merged(rank.initial for rank in ranks), steps, order)


def _or_nan(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _summaries(rows: Mapping[str, Any]) -> Summaries:
    return {name: TensorSummary.from_json(row) for name, row in rows.items()}


def tensor_distance(one: Trace, other: Trace, step: int, kind: str, name: str) -> float:
    """Return the exact distance if both traces have the values, else an estimate from the
    summaries."""
    summaries = (each.rank_0.steps[step].tensors[kind].get(name) for each in (one, other))
    estimate = distance(*summaries)
    if estimate == 0.0 or math.isinf(estimate):
        return estimate
    x, y = one.tensor(step, kind, name), other.tensor(step, kind, name)
    if x is None or y is None or x.shape != y.shape:
        return estimate
    return float(np.linalg.norm(x - y))
