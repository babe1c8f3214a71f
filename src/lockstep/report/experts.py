"""Makes heat maps of the experts' loads in each layer over the training steps."""

from __future__ import annotations

from lockstep.pages.chart import RenderedFigure
from lockstep.pages.heatmap import render_heatmap
from lockstep.pages.scale import format_number
from lockstep.report.history import LoadHistory
from lockstep.report.ranks import Axes, extremes, mean_of, rounded

CELLS = 60_000
LEAST_CELLS = 1_000


def expert_heatmaps(
    loads: LoadHistory, *, index: int, last_step: int, title: str
) -> list[RenderedFigure]:
    most = max(LEAST_CELLS, CELLS // max(1, len(loads.layers)))
    return [
        _heatmap(loads, name, index + place, last_step, title, most)
        for place, name in enumerate(loads.layers)
    ]


def _heatmap(
    loads: LoadHistory, layer: str, index: int, last_step: int, title: str, most_cells: int
) -> RenderedFigure:
    values = loads.layers[layer]
    axes = Axes.of(loads.steps, [values], last_step, most_cells=most_cells)
    rows = axes.cells(values, mean_of)
    names = [str(first) if first == last else f"{first}–{last}" for first, last in axes.rows]
    data = {
        "last": last_step,
        "columns": len(axes.columns),
        "ranks": [
            f"expert {name}" if first == last else f"experts {name}, the largest load"
            for (first, last), name in zip(axes.rows, names, strict=True)
        ],
        "mean": {"load": list(map(rounded, rows))},
        "unit": "",
    }
    picture = render_heatmap(
        f"load by expert: {layer}",
        rows,
        names,
        index=index,
        last_step=last_step,
        spoken=f"{title}: load of the experts of {layer} by step. {_extremes(rows, names)}",
        unit="",
    )
    return RenderedFigure(picture, data)


def _extremes(rows: list[list[float]], names: list[str]) -> str:
    found = extremes(rows, names)
    if found is None:
        return "Nothing was measured."
    (high, most), (low, least) = found
    return (
        f"Highest is expert {most}, mean {format_number(high)}; lowest is expert {least}, mean"
        f" {format_number(low)}."
    )
