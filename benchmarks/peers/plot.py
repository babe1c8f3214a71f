"""Draws the ratios that `python benchmarks/peers --json FILE` measured. Several files are drawn
together.

    python benchmarks/peers/plot.py peers.json [FILE ...] peers.svg

There is a panel for each workload and number of processes. Each contender has a line with the
median and the middle half of its ratios of steps/s to the hand-written loop. Filled markers: equal
threads; hollow: its own launcher. The figure is readable on white and on black.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from launchers import BASELINE, CONTENDERS
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

GREY = "#7d8590"
OTHERS = "#4f8fd6"
OURS = "#e0762d"
LAUNCHES = {"equal": (-0.16, "full"), "own": (0.16, "none")}
"""Each launch mode's offset from the contender's line, and how its marker is filled."""


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the figure in the format of `path`'s suffix."""
    compared = [row for row in rows if "steps_per_second" in row and row["ratio"] is not None]
    cases = list(dict.fromkeys(row["case"] for row in compared))
    counts = sorted({row["processes"] for row in compared})
    names = [
        name
        for name in CONTENDERS
        if name != BASELINE and any(row["contender"] == name for row in compared)
    ]
    mpl.rcParams.update(
        {
            "text.color": GREY,
            "axes.labelcolor": GREY,
            "axes.edgecolor": GREY,
            "xtick.color": GREY,
            "ytick.color": GREY,
        }
    )
    size = (1.5 + 2.7 * len(counts), 0.6 + 1.75 * len(cases))
    figure, panels = pyplot.subplots(
        len(cases),
        len(counts),
        figsize=size,
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for case, line in zip(cases, panels, strict=True):
        for count, panel in zip(counts, line, strict=True):
            fill(
                panel,
                [row for row in compared if (row["case"], row["processes"]) == (case, count)],
                names,
            )
            panel.set_title(f"{case}, {count} process{'es' if count > 1 else ''}", fontsize=9)
    figure.supxlabel(
        "steps/s, relative to the careful hand-written loop (filled: equal threads; hollow: own"
        " launcher)",
        fontsize=9,
    )
    figure.savefig(
        path, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None
    )


def fill(panel: Any, rows: list[dict[str, Any]], names: list[str]) -> None:
    panel.axvline(1, color=GREY, linewidth=1)
    for row in rows:
        if row["contender"] == BASELINE:
            continue
        aside, style = LAUNCHES[row["launch"]]
        place, ratio = names.index(row["contender"]) + aside, row["ratio"]
        color = OURS if row["contender"] == "with_lockstep" else OTHERS
        panel.plot([ratio["low"], ratio["high"]], [place, place], color=color, linewidth=1.5)
        panel.plot(ratio["median"], place, marker="o", markersize=5, color=color, fillstyle=style)
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_yticks(range(len(names)), [CONTENDERS[name].label for name in names])
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.tick_params(labelsize=8)
    panel.grid(axis="x", color=GREY, alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    *sources, target = map(Path, sys.argv[1:])
    draw([row for source in sources for row in json.loads(source.read_text())["rows"]], target)


if __name__ == "__main__":
    main()
