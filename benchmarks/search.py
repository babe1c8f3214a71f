"""Measures `lockstep search` on the digits classifier of examples/search.py: what it finds in how
much time.

    python benchmarks/search.py [--seeds 3] [--trials 40] [--searches grid,tpe]
        [--parts found,start] [--json FILE]

- found: a full grid (`lockstep sweep`: 5 learning rates, 5 widths, 4 rates of dropout: 100 trials
  of 600 steps) beside searches of the same space with 40 trials, two trials of one process at a
  time, each with its own seed: TPE, TPE with ASHA, TPE with the median pruner, and random search. A
  trial is evaluated every 20 steps, on 360 digits that it was not trained on; its value is the
  accuracy after its last step. `steps` are the optimizer steps of all trials.
- start: `lockstep search --trials 1` beside `lockstep run`, alternately; and the time from the end
  of one trial (`on_end`) to the first step of the next, beside that from the start of `lockstep
  run` to its first step. Once with examples/search.py, whose trials import scikit-learn, and once
  with a linear model that imports torch alone.

Quote numbers only from a machine that did nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPT = str(EXAMPLES / "search.py")
LOCKSTEP = str(Path(sys.executable).parent / "lockstep")
GRID = ("lr=1e-5,1e-4,1e-3,1e-2,1e-1", "width=16,32,64,128,256", "dropout=0.0,0.2,0.4,0.6")
SEARCHES = {
    "tpe": ("--sampler", "tpe", "--pruner", "none"),
    "tpe+asha": ("--sampler", "tpe", "--pruner", "asha"),
    "tpe+median": ("--sampler", "tpe", "--pruner", "median"),
    "random": ("--sampler", "random", "--pruner", "none"),
}
ROUNDS = 5
GAPS = 8
CLOCK = """
import functools, json, time
import lockstep as ls

class Clock(ls.Hook):
    first = None

    def before_step(self, run):
        self.first = self.first or time.time()

    def on_end(self, run):
        (run.dir / "clock.json").write_text(json.dumps([self.first, time.time()]))

ls.train = functools.partial(ls.train, hooks=[Clock()])
"""
DIGITS = f"""
import sys
import clock
sys.path.insert(0, {str(EXAMPLES)!r})
import search
search.main(["--steps", "20"])
"""
LINEAR = """
import clock
import torch
from torch import nn
from torch.utils.data import TensorDataset
import lockstep as ls

lr = ls.param("lr", 1e-2, low=1e-4, high=1.0, log=True)
x = torch.randn(256, 20)
ls.train(ls.Recipe(
    model=lambda: nn.Linear(20, 1),
    data=TensorDataset(x, x.sum(dim=1, keepdim=True)),
    inputs=lambda batch: batch[0],
    loss=lambda output, batch: nn.functional.mse_loss(output, batch[1]),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
    global_batch=64,
    microbatch=16,
    steps=20,
))
"""


def lockstep(*arguments: str) -> tuple[float, str]:
    """Return the seconds that a command took, and what it printed."""
    began = time.perf_counter()
    ended = subprocess.run([LOCKSTEP, *arguments], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise SystemExit(
            f"lockstep {' '.join(arguments)}: exit status {ended.returncode}\n{ended.stderr}"
        )
    return time.perf_counter() - began, ended.stdout


def search(folder: Path, *arguments: str) -> dict[str, Any]:
    """Return the figures of a search, or a sweep."""
    command, *options = arguments
    metric = (
        "--metric",
        "accuracy",
        "--mode",
        "max",
        "--parallel",
        "2",
        "--json",
        "--run-dir",
        str(folder),
    )
    seconds, printed = lockstep(command, *metric, *options, SCRIPT)
    results = json.loads(printed)
    states = [trial["state"] for trial in results["trials"]]
    return {
        "seconds": seconds,
        "accuracy": results["best"]["value"],
        "parameters": results["best"]["parameters"],
        "steps": sum(trial["steps"] for trial in results["trials"]),
        "trials": {state: states.count(state) for state in sorted(set(states))},
    }


def found(folder: Path, names: list[str], seeds: int, trials: int) -> dict[str, Any]:
    """Return the figures of the grid, and of each kind of search by seed."""
    settings = [word for values in GRID for word in ("--set", values)]
    figures: dict[str, Any] = (
        {"grid": [search(folder / "grid", "sweep", *settings)]} if "grid" in names else {}
    )
    for seed in range(seeds):
        for name in [each for each in SEARCHES if each in names]:
            made = search(
                folder / f"{name}-{seed}",
                "search",
                "--trials",
                str(trials),
                "--seed",
                str(seed),
                *SEARCHES[name],
            )
            figures.setdefault(name, []).append(made)
    return figures


def show_found(figures: dict[str, Any]) -> Table:
    table = Table(
        "",
        "accuracy",
        "seconds",
        "of the grid's",
        "steps a trial",
        "trials",
        title="best accuracy on 360 held-out digits",
    )
    grid = figures["grid"][0]["seconds"] if "grid" in figures else None
    for name, rows in figures.items():
        for number, row in enumerate(rows):
            ended = ", ".join(f"{count} {state}" for state, count in row["trials"].items())
            took = (f"{row['seconds']:.1f}", "" if grid is None else f"{row['seconds'] / grid:.2f}")
            title = name if name == "grid" else f"{name}, seed {number}"
            table.add_row(
                title,
                f"{row['accuracy']:.4f}",
                *took,
                f"{row['steps'] / sum(row['trials'].values()):.0f}",
                ended,
            )
    return table


def clocks(folder: Path) -> list[tuple[float, float]]:
    """Return the times of the first step and of the end of each trial."""
    return [
        tuple(json.loads(path.read_text())) for path in sorted(folder.glob("trial-*/clock.json"))
    ]


def start(folder: Path) -> dict[str, Any]:
    """Return the seconds of a search of one trial beside a run, and of what is between two
    trials."""
    (folder / "clock.py").write_text(CLOCK)
    figures: dict[str, Any] = {}
    for name, text in {"digits": DIGITS, "linear": LINEAR}.items():
        script = folder / f"{name}.py"
        script.write_text(text)
        run, one, first = [], [], []
        for number in range(ROUNDS):
            place = folder / f"{name}-run-{number}"
            began = time.time()
            run.append(lockstep("run", "--run-dir", str(place), str(script))[0])
            first.append(json.loads((place / "clock.json").read_text())[0] - began)
            one.append(
                lockstep(
                    "search",
                    "--trials",
                    "1",
                    "--run-dir",
                    str(folder / f"{name}-one-{number}"),
                    str(script),
                )[0]
            )
        lockstep(
            "search",
            "--trials",
            str(GAPS + 1),
            "--parallel",
            "1",
            "--run-dir",
            str(folder / f"{name}-gaps"),
            str(script),
        )
        times = clocks(folder / f"{name}-gaps")
        gaps = [after[0] - before[1] for before, after in itertools.pairwise(times)]
        figures[name] = {
            "run": run,
            "search of one trial": one,
            "run, first step": first,
            "between trials": gaps,
        }
    return figures


def spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def show_start(figures: dict[str, Any]) -> Table:
    table = Table("seconds, median", *figures, title="the start of a trial")
    for row in next(iter(figures.values())):
        table.add_row(row, *(spread(each[row]) for each in figures.values()))
    pairs = [
        zip(each["run"], each["search of one trial"], strict=True) for each in figures.values()
    ]
    table.add_row(
        "a search of one trial takes longer by",
        *(spread([one - run for run, one in each]) for each in pairs),
    )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument(
        "--searches",
        default=",".join(["grid", *SEARCHES]),
        help="which are made (default: %(default)s)",
    )
    parser.add_argument(
        "--parts", default="found,start", help="what is measured (default: %(default)s)"
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the figures to this file"
    )
    options = parser.parse_args()
    load, figures = os.getloadavg()[0], {}
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(f"{len(os.sched_getaffinity(0))} CPUs, load before {load:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        for part in options.parts.split(","):
            place = Path(folder, part)
            place.mkdir()
            names = options.searches.split(",")
            figures[part] = (
                found(place, names, options.seeds, options.trials)
                if part == "found"
                else start(place)
            )
            console.print(
                show_found(figures[part]) if part == "found" else show_start(figures[part])
            )
            if options.json is not None:
                options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
