"""Finds runs that repeat a recipe with another seed or other data, and averages their metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from lockstep.base.errors import first_few
from lockstep.pages.markup import Column, Html, element, joined, remark, table
from lockstep.pages.scale import format_number
from lockstep.report.history import LARGEST, RunHistory

OTHERWISE = frozenset({"seed", "data", "fold"})
METRICS = 400

_NOT_LEARNED = frozenset(
    {"lr", "gradient_norm", "samples_per_second", "weight_per_second", "mfu", "memory_bytes"}
)
NOTE = (
    "The last value of each run: mean ± sample standard deviation (divided by n − 1). Grouped are"
    " runs that have ended, with other models bit for bit, whose recorded recipe, plan and highest"
    " learning rate are the same; seed, data and fold may differ. Functions are recorded by name."
)


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that repeat the same recipe."""

    runs: list[RunHistory]
    values: dict[str, list[float]]

    @property
    def title(self) -> str:
        return f"{len(self.runs)} runs"

    def statistics(self) -> dict[str, tuple[float, float]]:
        return {name: _statistics(values) for name, values in self.values.items()}


def repeated_runs(runs: Sequence[RunHistory]) -> list[Group]:
    """Return groups of two or more ended runs. Runs with the same final model count once."""
    groups: dict[Any, dict[Any, RunHistory]] = {}
    for run in runs:
        if run.state == "ended" and isinstance(recipe := run.metadata.get("recipe"), Mapping):
            identity = repr((_without(recipe), run.plan, _highest_rate(run)))
            model = (run.result or {}).get("fingerprint") or id(run)
            groups.setdefault(identity, {}).setdefault(model, run)
    return [_group(list(several.values())) for several in groups.values() if len(several) > 1]


def _group(runs: list[RunHistory]) -> Group:
    values = {
        name: [run.curves.series[name].values[-1] for run in runs]
        for name in runs[0].curves.series
        if name not in _NOT_LEARNED
        and not name.startswith("lr/")
        and all(name in run.curves.series for run in runs)
    }
    best = [(run.result or {}).get("best") or {} for run in runs]
    if all(
        isinstance(each.get("value"), float) and each.get("metric") == best[0].get("metric")
        for each in best
    ):
        values[f"best {best[0].get('metric')}"] = [each["value"] for each in best]
    return Group(runs, values)


def _without(recipe: Any) -> Any:
    if not isinstance(recipe, Mapping):
        return recipe
    return {name: _without(value) for name, value in recipe.items() if name not in OTHERWISE}


def _highest_rate(run: RunHistory) -> str:
    series = run.curves.series.get("lr")
    return f"{max(series.finite(), default=0.0):.2g}" if series is not None else ""


def _statistics(values: Sequence[float]) -> tuple[float, float]:
    if not all(math.isfinite(value) and abs(value) <= LARGEST for value in values):
        return math.nan, math.nan
    return mean(values), stdev(values)


def group_table(found: Sequence[Group]) -> Html | None:
    if not found:
        return None
    heads = []
    for each in found:
        few = element("small", _few(each), title=", ".join(run.name for run in each.runs))
        heads.append(Column([f"{each.title} ", few]))
    statistics = [each.statistics() for each in found]
    names = list(dict.fromkeys(name for each in statistics for name in each))
    rows = [
        [name.replace("/", " "), *(_text(each.get(name)) for each in statistics)]
        for name in names[:METRICS]
    ]
    return joined(table(["", *heads], rows, box="wide card means", row_heads=True), remark(NOTE))


def group_json(found: Sequence[Group]) -> list[dict[str, Any]]:
    return [
        {
            "runs": [run.name for run in each.runs],
            "metrics": {
                name: {"mean": middle, "sample_std": deviation}
                for name, (middle, deviation) in each.statistics().items()
            },
        }
        for each in found
    ]


def group_lines(found: Sequence[Group]) -> list[str]:
    lines = []
    for each in found:
        pairs = each.statistics().items()
        texts = [f"{name.replace('/', ' ')} {_text(pair)}" for name, pair in pairs]
        lines.append(f"{each.title} ({_few(each)}), mean ± sample std: {first_few(texts)}")
    return lines


def _few(group: Group) -> str:
    return first_few([run.name for run in group.runs])


def _text(pair: tuple[float, float] | None) -> str:
    if pair is None:
        return "–"
    if math.isnan(pair[0]):
        return "not finite"
    return " ± ".join(map(format_number, pair))
