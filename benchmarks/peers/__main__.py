"""Trains the same workloads with a hand-written loop, a tutorial's loop, other frameworks and
lockstep, and compares speed.

    make peers                       # everything, in a virtual environment: two hours on 2 cores
    python benchmarks/peers [--only mlp wide gpt accumulate images start import] [--processes 1 2 4]
                            [--launch equal own] [--contenders with_fabric ...]
                            [--casts 3] [--rounds 5] [--steps N] [--json FILE]

All contenders of a row are alive at once, each in its own processes. They take turns in an order
that is shuffled every round; all others are stopped meanwhile (see conductor.py). A turn ends when
the last process has finished its last step. The first step and the first turn do not count. A ratio
is the median over rounds of a contender's steps/s over those of the careful hand-written loop in
the same round; beside it is the interquartile range of these ratios. `cpu` is the same ratio by
processor time of the training processes, which does not count waiting. After some rounds all
processes end and a new cast starts, because a process can be fast or slow for its whole life: its
allocator may, for example, return a step's memory to the system and fault it in again.

All train the same model from the same initial values on the same samples in each step, with AdamW
and clipping. Each uses what its documentation recommends for speed; the first line of its file in
contenders/ says what. lockstep is `ls.train` with its defaults. The mean loss over all processes in
each of the first 100 steps must be the hand-written loop's within a relative 1e-5. A contender with
other losses has no ratio, and the benchmark ends with status 1. Accelerate and the Trainer of
Hugging Face distribute batches of one order themselves, and Ignite its samples. So a process may
have other samples of a step than in the hand-written loop, while the whole step is the same.

launch=equal: all start with `torchrun` (python for 1 process) and cores ÷ processes threads; it is
an error if a contender computes with another number. launch=own: each starts with its own launcher
and the threads that this gives. `start`: seconds from the launcher's start until every process has
finished a step of `mlp`, in new processes each round. `import`: seconds of a new interpreter that
only imports. The ratios of these two are ratios of seconds.

Quote numbers only from a machine that did nothing else.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conductor import Contender, ContenderError, Turn, started
from figures import Ratio, furthest
from launchers import BASELINE, CONTENDERS, equal_threads
from rich.console import Console
from rich.table import Table
from workloads import SEED, SIZES, Task, prepare

CHECKED = 100
"""Steps whose losses are compared. Later losses differ by rounding alone: by 1e-3 after 1000 steps
of `mlp`."""
TOLERANCE = 1e-5
LAUNCHES = ("equal", "own")
NEEDED = ("accelerate", "lightning", "transformers", "ignite", "lockstep", "PIL")


def speeds(
    workload: str, processes: int, launch: str, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Return a row for each contender with its steps/s."""
    turn = options.steps or SIZES[workload].turn
    turns: dict[str, list[Turn]] = {name: [] for name in options.contenders}
    distances = dict.fromkeys(options.contenders, 0.0)
    threads = {}
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        task = prepared(workload, processes, launch, folder, steps=1 + (1 + options.rounds) * turn)
        for cast in range(options.casts):
            with started(options.contenders, task) as found:
                contenders = {name: contender for name, (contender, _) in found.items()}
                check_threads(contenders, task)
                for name, own in take_turns(
                    contenders, options.rounds, turn, random.Random(cast)
                ).items():
                    turns[name] += own
                curves = {
                    name: contender.finish()[:CHECKED] for name, contender in contenders.items()
                }
            for name, contender in contenders.items():
                threads[name] = contender.threads[0]
                distances[name] = max(distances[name], furthest(curves[name], curves[BASELINE]))
    for name, own in turns.items():
        same = distances[name] <= TOLERANCE
        by_wall, by_processor = (
            Ratio.of(
                [1 / getattr(each, by) for each in own],
                [1 / getattr(each, by) for each in turns[BASELINE]],
            )
            for by in Turn._fields
        )
        yield {
            "case": workload,
            "processes": processes,
            "launch": launch,
            "contender": name,
            "threads": threads[name],
            "steps_per_second": turn / statistics.median(each.wall for each in own),
            "ratio": by_wall._asdict() if same else None,
            "processor_ratio": by_processor._asdict() if same else None,
            "loss_distance": distances[name],
            "turns": own,
        }


def prepared(workload: str, processes: int, launch: str, folder: str, *, steps: int) -> Task:
    task = Task(workload, processes, steps, folder, scratch="", own_launcher=launch == "own")
    prepare(task)
    return task


def check_threads(contenders: dict[str, Contender], task: Task) -> None:
    """Raise `ContenderError` if a contender computes with another number of threads than it
    should."""
    meant = equal_threads(task.processes)
    for name, contender in contenders.items():
        if not task.own_launcher and set(contender.threads) != {meant}:
            raise ContenderError(
                f"{name}: its processes compute with {contender.threads} threads, not with {meant};"
                " nothing to compare"
            )


def take_turns(
    contenders: dict[str, Contender], rounds: int, steps: int, chance: random.Random
) -> dict[str, list[Turn]]:
    """Return the measured rounds. Round 0 does not count."""
    names = list(contenders)
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for number in range(1 + rounds):
        for name in chance.sample(names, len(names)):
            turn = contenders[name].turn(steps)
            if number:
                turns[name].append(turn)
    return turns


def starts(processes: int, launch: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Return a row for each contender with the seconds to its first step."""
    names, chance = options.contenders, random.Random(SEED)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    compile_lockstep()
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        task = prepared("mlp", processes, launch, folder, steps=1)
        for _ in range(options.rounds):
            for name in chance.sample(names, len(names)):
                with started([name], task) as found:
                    contender, took = found[name]
                    contender.finish()
                seconds[name].append(took)
    yield from timed_rows("start", processes, launch, seconds)


def imports(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Return a row for each contender with the seconds of an interpreter that imports what it
    needs."""
    names, chance = options.contenders, random.Random(SEED)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    compile_lockstep()
    for _ in range(options.rounds):
        for name in chance.sample(names, len(names)):
            began = time.perf_counter()
            subprocess.run(
                [sys.executable, "-c", CONTENDERS[name].imports],
                check=True,
                stderr=subprocess.DEVNULL,
            )
            seconds[name].append(time.perf_counter() - began)
    yield from timed_rows("import", 1, "equal", seconds)


def compile_lockstep() -> None:
    """Compile lockstep to bytecode, as pip does on installation.

    An editable installation is compiled at its first import.
    """
    (folder,) = importlib.util.find_spec("lockstep").submodule_search_locations
    compileall.compile_dir(folder, quiet=1)


def timed_rows(
    case: str, processes: int, launch: str, seconds: dict[str, list[float]]
) -> Iterator[dict[str, Any]]:
    for name, own in seconds.items():
        ratio = Ratio.of(own, seconds[BASELINE])._asdict()
        row = {"case": case, "processes": processes, "launch": launch, "contender": name}
        yield {**row, "seconds": statistics.median(own), "ratio": ratio, "times": own}


def show(rows: list[dict[str, Any]], rounds: int) -> None:
    first = rows[0]
    of = f"{first['case']}, {first['processes']} process(es), launch={first['launch']}"
    table = Table(title=f"{of}; {os.cpu_count()} cores, median of {rounds} rounds")
    timed = "seconds" in first
    for column in ("contender", "seconds", "ratio", "quartiles") if timed else SPEED_COLUMNS:
        table.add_column(column, justify="left" if column == "contender" else "right", no_wrap=True)
    for row in rows:
        ratio, cells = row["ratio"], [CONTENDERS[row["contender"]].label]
        cells += (
            [f"{row['seconds']:.3f}"]
            if timed
            else [str(row["threads"]), f"{row['steps_per_second']:.2f}"]
        )
        cells += (
            [f"{ratio['median']:.3f}", f"{ratio['low']:.3f}-{ratio['high']:.3f}"]
            if ratio
            else ["-", "other losses"]
        )
        if not timed:
            cells += [
                f"{row['processor_ratio']['median']:.3f}" if ratio else "-",
                f"{row['loss_distance']:.1e}",
            ]
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 110).print(table)


SPEED_COLUMNS = ("contender", "threads", "steps/s", "ratio", "quartiles", "cpu", "loss off by")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cases = (*SIZES, "start", "import")
    parser.add_argument("--only", nargs="+", choices=cases, default=cases)
    parser.add_argument("--processes", nargs="+", type=int, choices=(1, 2, 4), default=(1, 2, 4))
    parser.add_argument("--launch", nargs="+", choices=LAUNCHES, default=LAUNCHES)
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=tuple(CONTENDERS),
        default=tuple(CONTENDERS),
        help="contenders beside the hand-written loop",
    )
    parser.add_argument(
        "--casts",
        type=int,
        default=3,
        help="how often all contenders start again in new processes (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="rounds of each cast, and of start and import (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, help="steps of a turn (default: each workload's own)")
    parser.add_argument(
        "--json", metavar="FILE", help="also write the rows, with every turn, to this file"
    )
    options = parser.parse_args()
    options.contenders = list(dict.fromkeys((BASELINE, *options.contenders)))
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        parser.error(
            f"not installed here: {', '.join(missing)}; `make peers` makes an environment with all"
            " of them, and starts this in it"
        )
    return options


def main() -> None:
    options = parse()
    # Stopped contenders would stay for ever: a signal that ends this process ends them first.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    rows: list[dict[str, Any]] = []
    for case in options.only:
        for processes in options.processes if case != "import" else options.processes[:1]:
            for launch in options.launch if case != "import" else options.launch[:1]:
                if case == "import":
                    found = list(imports(options))
                elif case == "start":
                    found = list(starts(processes, launch, options))
                else:
                    found = list(speeds(case, processes, launch, options))
                show(found, len(found[0].get("turns") or found[0]["times"]))
                rows += found
                if options.json:
                    Path(options.json).write_text(
                        json.dumps(
                            {
                                "casts": options.casts,
                                "rounds": options.rounds,
                                "cores": os.cpu_count(),
                                "rows": rows,
                            },
                            indent=2,
                        )
                    )
    if strayed := [f"{row['contender']} on {row['case']}" for row in rows if row["ratio"] is None]:
        raise SystemExit(
            f"other losses than the hand-written loop's: {', '.join(strayed)}: nothing to compare"
        )


if __name__ == "__main__":
    main()
