"""Measures what `--recovery in-place` costs a run that loses nobody: images in memory, heartbeats,
messages.

    python benchmarks/failure_free.py [--rounds 4] [--turns 10] [--case "shard=2"] [--json FILE]

The training of benchmarks/recovery.py runs twice at the same time, with `--recovery restart` and
`--recovery in-place`. They take turns of 4 s, so that both see the same machine; the processes of
the one whose turn it is not are stopped. The first turns do not count: the spare process starts in
them. A round's ratio is the median over its turns of (seconds of a step in place) / (seconds of a
step with restart). Two runs of the same kind differ by some percent for as long as they live, so
there are several rounds, each with new processes; the error is that of their mean. The memory of
the spare process is its own share (PSS).

Quote numbers only from a machine that did nothing else. Linux only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import psutil
from recovery import CASES, steps_in, workers
from rich.console import Console
from rich.table import Table

WAYS = ("restart", "in-place")
TURN_SECONDS, SETTLE_TURNS = 4.0, 4


class Run:
    """A run that is stopped until its turn comes."""

    def __init__(self, case: str, way: str, folder: Path) -> None:
        script = str(Path(__file__).with_name("recovery.py").resolve())
        line = [
            sys.executable,
            "-m",
            "lockstep",
            "run",
            "--run-dir",
            "run",
            "--nproc",
            str(CASES[case]),
            "--plan",
            case,
        ]
        line += ["--recovery", way, "--max-restarts", "9", script, str(folder)]
        self.folder, self.turns = folder, list[tuple[float, float]]()
        with (folder / "output").open("w") as output:
            self._launcher = subprocess.Popen(
                line, cwd=folder, stdout=output, stderr=output, start_new_session=True
            )
        self._wait_for_steps(CASES[case])
        self._send(signal.SIGSTOP)

    def turn(self) -> None:
        self._send(signal.SIGCONT)
        began = time.time()
        time.sleep(TURN_SECONDS)
        self.turns.append((began, time.time()))
        self._send(signal.SIGSTOP)

    def end(self) -> None:
        for each in self._processes():
            each.kill()
        self._launcher.wait()

    def step_seconds(self) -> list[float]:
        """The mean time of a step in each turn, of the slowest process."""
        notes = [[at for at, _ in steps_in(path)] for path in self.folder.glob("[0-9]*-*")]
        return [
            max(statistics.fmean(b - a for a, b in pairwise(inside(each, turn))) for each in notes)
            for turn in self.turns
        ]

    def spare_bytes(self) -> int:
        trained = workers(self.folder, 0.0)
        return sum(
            each.memory_full_info().pss for each in self._processes()[1:] if each.pid not in trained
        )

    def _processes(self) -> list[psutil.Process]:
        launcher = psutil.Process(self._launcher.pid)
        return [launcher, *launcher.children(recursive=True)]

    def _send(self, number: int) -> None:
        for each in self._processes():
            each.send_signal(number)

    def _wait_for_steps(self, count: int) -> None:
        until = time.monotonic() + 60.0
        while len(workers(self.folder, 0.0)) < count:
            if time.monotonic() > until:
                raise SystemExit(
                    f"the run does not begin:\n{(self.folder / 'output').read_text()[-2000:]}"
                )
            time.sleep(0.05)


def inside(times: list[float], turn: tuple[float, float]) -> list[float]:
    """The times in a turn, without the first: its step has waited for the turn."""
    return [at for at in times if turn[0] < at < turn[1]][1:]


def measure(case: str, turns: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        runs = []
        try:
            for way in WAYS:
                (folder := Path(name) / way).mkdir()
                runs.append(Run(case, way, folder))
            for number in range(turns + SETTLE_TURNS):
                for run in runs if number % 2 else runs[::-1]:
                    run.turn()
            spare = runs[1].spare_bytes()
        finally:
            for run in runs:
                run.end()
        restart, in_place = (run.step_seconds()[SETTLE_TURNS:] for run in runs)
    ratios = [one / other for one, other in zip(in_place, restart, strict=True)]
    steps = {"restart": statistics.median(restart), "in-place": statistics.median(in_place)}
    return {**steps, "ratio": statistics.median(ratios), "spare_bytes": spare}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument(
        "--case", choices=list(CASES), action="append", help="default: replicate=2 and shard=2"
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the figures to this file"
    )
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    table = Table(
        title=(
            f"{options.rounds} rounds of {options.turns} turns of {TURN_SECONDS:.0f} s; load before"
            f" {os.getloadavg()[0]:.1f}"
        )
    )
    for column in (
        "",
        "step, restart",
        "step, in-place",
        "in-place / restart",
        "rounds",
        "spare process",
    ):
        table.add_column(column, no_wrap=True)
    figures = {}
    for case in options.case or ("replicate=2", "shard=2"):
        figures[case] = rounds = [measure(case, options.turns) for _ in range(options.rounds)]
        steps = [f"{statistics.median(each[way] for each in rounds) * 1e3:.1f} ms" for way in WAYS]
        ratios = [each["ratio"] for each in rounds]
        error = statistics.stdev(ratios) / math.sqrt(len(ratios))
        mean, spare = (
            statistics.fmean(ratios),
            statistics.median(each["spare_bytes"] for each in rounds),
        )
        between = f"{min(ratios):.3f}-{max(ratios):.3f}"
        table.add_row(
            case, *steps, f"{mean:.3f} ± {error:.3f}", between, f"{spare / 2**20:.0f} MiB"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    Console(width=None if sys.stdout.isatty() else 110).print(table)


if __name__ == "__main__":
    main()
