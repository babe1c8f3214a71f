"""Simulates the goodput of long runs that lose processes: `--recovery restart` beside `--recovery
in-place`.

    python benchmarks/goodput.py [--days 54] [--runs 20] [--recovery FILE]
        [--json FILE] [--picture FILE]

Goodput is the time of the steps that count, divided by the time of the run. Losses come at random
(exponential times), at the rate published for the training of Llama 3: 466 in 54 days on 16,384
GPUs, so 1 in 1,900 days for each of them.

Assumptions, none of which is measured at these sizes:

- a step takes 10 s, on any number of processes;
- a checkpoint is begun every 10 minutes, stops the training for 0.3 s, and is complete 60 s later;
- images in memory take 1% of the time, and there is one every 3 steps;
- a loss costs what `benchmarks/recovery.py` measured on one machine (its JSON by --recovery, else
  its medians for 4 processes: `replicate` with restart, `shard` in place), plus, for `restart`, 120
  s for what large runs do at each start and survivors need not do: the device's context, the
  compiler, NCCL, reading the checkpoint. For `in-place` the new process has to do it, and the
  others wait: 60 s;
- after a loss `restart` goes on from the newest complete checkpoint, `in-place` from the newest
  image;
- another loss while a run recovers begins the recovery again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

SIZES = (16, 64, 256, 1024, 4096, 16384)
LOSSES_PER_PROCESS_DAY = 466 / 54 / 16384
DAY_SECONDS = 86400.0
STEP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Recovery:
    """The cost of losses under one way to recover. All times in seconds."""

    seconds: float
    """From a loss until the run goes on."""
    saved_every: float
    """From one state that a run can go on from to the next."""
    complete_after: float
    """From the moment of such a state until it can be used."""
    share: float
    """The part of the time that keeping these states takes."""


RESTART = Recovery(seconds=5.3 + 120.0, saved_every=600.0, complete_after=60.0, share=0.3 / 600.0)
IN_PLACE = Recovery(
    seconds=0.9 + 60.0, saved_every=3 * STEP_SECONDS, complete_after=0.0, share=0.01
)


def goodput(recovery: Recovery, processes: int, days: float, drawn: random.Random) -> float:
    """Simulate one run. Returns the part of its time that went into steps that count."""
    rate = LOSSES_PER_PROCESS_DAY * processes / DAY_SECONDS
    end, now, done, saved = days * DAY_SECONDS, 0.0, 0.0, 0.0
    while now < end:
        until_loss = min(drawn.expovariate(rate), end - now)
        speed = 1.0 - recovery.share
        # States are kept at multiples of `saved_every` of the run's own time since it went on.
        usable = (
            max(0.0, until_loss - recovery.complete_after)
            // recovery.saved_every
            * recovery.saved_every
        )
        done = saved + speed * until_loss
        now += until_loss
        if now >= end:
            break
        saved += speed * usable
        done = saved
        pause = recovery.seconds
        while (again := drawn.expovariate(rate)) < pause:  # another loss meanwhile
            now += again
        now += pause
    return done / max(now, end)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--days", type=float, default=54.0, help="length of a run (default: %(default)s)"
    )
    parser.add_argument(
        "--runs", type=int, default=20, help="simulated for each size (default: %(default)s)"
    )
    parser.add_argument(
        "--recovery", metavar="FILE", type=Path, help="the JSON of benchmarks/recovery.py"
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the figures to this file"
    )
    parser.add_argument(
        "--picture",
        metavar="FILE",
        type=Path,
        help="also draw the curves, such as to goodput.svg (needs matplotlib)",
    )
    options = parser.parse_args()
    ways = {"restart": RESTART, "in-place": IN_PLACE}
    if options.recovery is not None:
        measured = json.loads(options.recovery.read_text(encoding="utf-8"))
        for name, fixed in (("restart", 120.0), ("in-place", 60.0)):
            rows = [
                row["seconds"]
                for case, rows in measured.items()
                if case.startswith("shard") and case.endswith(name)
                for row in rows
            ]
            ways[name] = Recovery(
                seconds=statistics.median(rows) + fixed,
                saved_every=ways[name].saved_every,
                complete_after=ways[name].complete_after,
                share=ways[name].share,
            )
    table = Table(
        title=f"goodput of {options.days:g} days, simulated; the assumptions are in the script"
    )
    for column in ("processes", "losses a day", *ways):
        table.add_column(column, justify="right")
    figures: dict[str, dict[str, float]] = {}
    for size in SIZES:
        drawn = random.Random(size)
        found = {
            name: statistics.mean(
                goodput(way, size, options.days, drawn) for _ in range(options.runs)
            )
            for name, way in ways.items()
        }
        figures[str(size)] = found
        table.add_row(
            f"{size:,}",
            f"{LOSSES_PER_PROCESS_DAY * size:.2f}",
            *(f"{value:.3f}" for value in found.values()),
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if options.picture is not None:
        draw(figures, options.picture)


def draw(figures: dict[str, dict[str, float]], path: Path) -> None:
    """Write the curves in the format of `path`'s suffix; they can be read on white and on black."""
    import matplotlib as mpl
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    grey = "#7d8590"
    mpl.rcParams.update(
        {
            "text.color": grey,
            "axes.labelcolor": grey,
            "axes.edgecolor": grey,
            "xtick.color": grey,
            "ytick.color": grey,
        }
    )
    mpl.rcParams["svg.hashsalt"] = "goodput"
    figure, panel = pyplot.subplots(figsize=(6.4, 3.0), layout="constrained")
    for name, colour in (("restart", "#4f8fd6"), ("in-place", "#e0762d")):
        panel.plot(
            SIZES,
            [figures[str(size)][name] for size in SIZES],
            color=colour,
            marker="o",
            label=f"--recovery {name}",
        )
    panel.set_xscale("log", base=4)
    panel.set_xticks(SIZES, [f"{size:,}" for size in SIZES])
    panel.set_xlabel("processes")
    panel.set_ylabel("goodput")
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panel.legend(frameon=False, labelcolor=grey)
    figure.savefig(
        path, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None
    )


if __name__ == "__main__":
    main()
