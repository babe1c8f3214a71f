"""Errors of the cost model on published rows: by source with a fit that did not see it, sweeps,
memory, collectives."""

from __future__ import annotations

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.planner.machines.costs import Fitted, collective_seconds
from lockstep.planner.machines.hardware import parse_target
from lockstep.planner.trace import Collective
from published import transformer
from published.machines import device_of
from published.memory import memory_bytes
from published.rows import DATA, Row
from published.software import software_of
from published.step import predict

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Pair:
    """What was predicted of a row and what was measured."""

    row: Row
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def times(rows: Sequence[Row], fitted: Callable[[str], Fitted]) -> list[Pair]:
    """Return the step times of the rows, each with the numbers that `fitted` has for its source."""
    return [
        Pair(row, predict(row, fitted(row.repository)).seconds, row.seconds)
        for row in rows
        if row.seconds
    ]


def memories(rows: Sequence[Row]) -> list[Pair]:
    """Return the peak memory of the rows that say it and how they checkpoint, in GiB."""
    return [
        Pair(row, predicted_memory(row) / GIB, row.memory_gib)
        for row in rows
        if row.memory_gib
        and (row.checkpointing or software_of(row).default_checkpointing)
        and not row.checkpointing.startswith("auto")
    ]


def predicted_memory(row: Row) -> float:
    """Return a row's peak memory, with the checkpointing it states or its framework's default."""
    software = software_of(row)
    return memory_bytes(row, software, row.checkpointing or software.default_checkpointing)


def out_of_memory(rows: Sequence[Row]) -> list[tuple[Row, float, bool]]:
    """Return the rows that ran out of memory, their predicted GiB, and whether that is more than
    the device has."""
    found = [(row, predicted_memory(row)) for row in rows if row.out_of_memory]
    return [(row, size / GIB, size > device_of(row).memory_bytes) for row, size in found]


def constant_efficiency(
    rows: Sequence[Row], pairs: Sequence[Pair], held_out: bool = True
) -> list[Pair]:
    """Return step times by one constant MFU for each device: the median over the rows, or the other
    sources' rows."""
    rates = [
        (row, _model_flops(row) / row.seconds / row.world / _peak(row))
        for row in rows
        if row.seconds
    ]
    found = []
    for pair in pairs:
        others = [
            (row, rate)
            for row, rate in rates
            if not held_out or row.repository != pair.row.repository
        ]
        same = [rate for row, rate in others if device_of(row) == device_of(pair.row)]
        rate = statistics.median(same or [rate for _, rate in others])
        found.append(
            Pair(
                pair.row,
                _model_flops(pair.row) / rate / pair.row.world / _peak(pair.row),
                pair.measured,
            )
        )
    return found


def by_source(pairs: Iterable[Pair]) -> dict[str, list[Pair]]:
    """Return the pairs by their row's repository."""
    found = defaultdict(list)
    for pair in pairs:
        found[pair.row.repository].append(pair)
    return dict(found)


def mean_error(pairs: Sequence[Pair]) -> float:
    """Return the mean absolute error, as a fraction of the measured."""
    return statistics.fmean(abs(pair.error) for pair in pairs)


def bias(pairs: Sequence[Pair]) -> float:
    """Return the mean error, as a fraction of the measured."""
    return statistics.fmean(pair.error for pair in pairs)


COVERED = 0.8
"""Part of the rows of a source that an interval must hold which has not seen it."""


def interval(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Return the interval of measured over predicted: its quantiles, so far apart that quantiles of
    the other sources hold 80% of a source's rows, both over all rows and as the mean of the
    sources."""
    return quantiles(
        pairs,
        next(
            each
            for each in (1 + step / 100 for step in range(10_000))
            if min(coverage(pairs, each)) >= COVERED
        ),
    )


def coverage(pairs: Sequence[Pair], widening: float) -> tuple[float, float]:
    """Return the part of all rows, and the mean over sources of the part of theirs, that the
    quantiles of the other sources hold, if they are so many times as far apart."""
    held: dict[str, list[bool]] = {}
    for source, own in by_source(pairs).items():
        low, high = quantiles([pair for pair in pairs if pair.row.repository != source], widening)
        held[source] = [low <= pair.measured / pair.predicted <= high for pair in own]
    every = [each for several in held.values() for each in several]
    return statistics.fmean(every), statistics.fmean(
        statistics.fmean(several) for several in held.values()
    )


def quantiles(pairs: Sequence[Pair], widening: float = 1.0) -> tuple[float, float]:
    """Return the 10% and 90% quantiles of measured over predicted, so many times as far apart, in
    their logarithm; a source of n rows counts as sqrt(n)."""
    counts = {source: len(each) for source, each in by_source(pairs).items()}
    ratios = sorted(
        (pair.measured / pair.predicted, 1 / math.sqrt(counts[pair.row.repository]))
        for pair in pairs
    )
    whole, passed, low, high = sum(weight for _, weight in ratios), 0.0, ratios[0][0], ratios[-1][0]
    for ratio, weight in ratios:
        low = ratio if passed <= 0.1 * whole else low
        high = ratio if passed <= 0.9 * whole else high
        passed += weight
    middle, reach = math.sqrt(low * high), math.sqrt(high / low) ** widening
    return middle / reach, middle * reach


@dataclass(frozen=True, slots=True)
class Sweep:
    """One model and batch on one number of devices, in several layouts."""

    name: str
    layouts: int
    loss: float
    """How much slower the layout predicted to be the best really is than the best one."""
    order: float
    """Part of the pairs of layouts that are in the right order."""


def sweeps(pairs: Sequence[Pair]) -> list[Sweep]:
    """Return the published sweeps: the same source, devices, model and batch, in at least three
    layouts."""
    groups: dict[tuple[object, ...], dict[tuple[object, ...], list[Pair]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for pair in pairs:
        row = pair.row
        model = (
            row.source,
            row.gpu,
            row.world,
            row.layers,
            row.hidden,
            row.heads,
            row.vocab,
            row.seq,
            row.batch,
            row.dtype,
        )
        layout = (
            row.tp,
            row.pp,
            row.cp,
            row.replicas,
            row.shards,
            row.microbatch,
            row.virtual,
            row.checkpointing,
            row.compiled,
        )
        groups[model][layout].append(pair)
    return [
        _sweep(model, list(layouts.values()))
        for model, layouts in groups.items()
        if len(layouts) >= 3
    ]


def _sweep(model: tuple[object, ...], layouts: list[list[Pair]]) -> Sweep:
    points = [
        (each[0].predicted, statistics.median(pair.measured for pair in each)) for each in layouts
    ]
    best, chosen = min(measured for _, measured in points), min(points)[1]
    both = [(a, b) for i, a in enumerate(points) for b in points[:i] if a[1] != b[1]]
    right = statistics.fmean((a[0] < b[0]) == (a[1] < b[1]) for a, b in both)
    name = (
        f"{str(model[0]).split(':')[0]}: {model[2]} devices, {model[3]} layers of {model[4]},"
        f" {model[5]} heads, batch {model[8]}"
    )
    return Sweep(name, len(points), chosen / best - 1, right)


@dataclass(frozen=True, slots=True)
class Reduced:
    """One published all-reduce inside or across nodes."""

    source: str
    gpu: str
    nodes: int
    ranks: int
    size: int
    """Bytes. 1 GiB where the source has a mean over sizes."""
    seconds: float

    @property
    def error(self) -> float:
        cluster = parse_target(f"{self.ranks} x {self.gpu}")
        return (
            collective_seconds(Collective("all_reduce", self.ranks, 1, self.size), cluster)
            / self.seconds
            - 1
        )


def all_reduces() -> list[Reduced]:
    """Return the published all-reduces whose devices are stated."""
    found = []
    with (DATA / "all_reduce.csv").open(encoding="utf-8", newline="") as file:
        for cells in csv.DictReader(file):
            size, ranks = int(cells["bytes"] or GIB), int(cells["gpus"])
            rate = 2 * size * (ranks - 1) / ranks / 1e9
            seconds = (
                float(cells["time_us"]) * 1e-6
                if cells["time_us"]
                else rate / float(cells["busbw_GBps"])
            )
            if cells["gpu"] != "see source":
                source = cells["source"].split("@")[0] + (
                    "" if cells["bytes"] else " (size not stated)"
                )
                found.append(
                    Reduced(source, cells["gpu"], int(cells["nodes"]), ranks, size, seconds)
                )
    return found


def collectives() -> dict[str, tuple[int, float]]:
    """Return the number and the mean absolute error of the published all-reduces, by source and
    devices."""
    errors = defaultdict(list)
    for each in all_reduces():
        devices = (
            f"2 to 8 {each.gpu}"
            if each.source.startswith("VIA")
            else f"{each.nodes} x {each.ranks // each.nodes} {each.gpu}"
        )
        errors[f"{devices}: {each.source}"].append(each.error)
    return {where: (len(each), statistics.fmean(map(abs, each))) for where, each in errors.items()}


def summary(pairs: Sequence[Pair]) -> Mapping[str, float]:
    """Return the errors over all rows, and over the sources."""
    sources = [mean_error(each) for each in by_source(pairs).values()]
    return {
        "rows": len(pairs),
        "mean": mean_error(pairs),
        "median_source": statistics.median(sources),
        "bias": bias(pairs),
    }


def _model_flops(row: Row) -> float:
    parameters = transformer.layer_parameters(row) * row.layers + row.vocab * row.hidden
    return row.batch * row.seq * (6 * parameters + 6 * row.layers * row.hidden * row.seq)


def _peak(row: Row) -> float:
    return device_of(row).peak_flops[row.dtype]
