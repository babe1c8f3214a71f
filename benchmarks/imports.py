"""Measures how long importing lockstep takes beside importing torch, and how soon the command line
answers.

    .venv/bin/python benchmarks/imports.py [--rounds N] [--json FILE]

Each row is the wall time of a new interpreter in seconds: the median of N rounds, with one of each
in every round.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

COMMAND = shutil.which("lockstep", path=str(Path(sys.executable).parent)) or "lockstep"
SUBJECTS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import lockstep": [sys.executable, "-c", "import lockstep"],
    "import torch": [sys.executable, "-c", "import torch"],
    "import torch, lockstep": [sys.executable, "-c", "import torch, lockstep"],
    "import lockstep; lockstep.train": [sys.executable, "-c", "import lockstep; lockstep.train"],
    "lockstep --help": [COMMAND, "--help"],
}


def measure(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure how long importing lockstep takes beside importing torch."
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=7,
        help="rounds with one measurement of every row (default: 7)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    for command in SUBJECTS.values():
        measure(command)  # fills the disk cache and writes bytecode
    times: dict[str, list[float]] = {name: [] for name in SUBJECTS}
    for _ in range(options.rounds):
        for name, command in SUBJECTS.items():
            times[name].append(measure(command))
    medians = {name: statistics.median(values) for name, values in times.items()}
    report = {
        "benchmark": "imports",
        "python": platform.python_version(),
        "rounds": options.rounds,
        "median_seconds": medians,
        "seconds": times,
        "torch_and_lockstep_over_torch": (
            medians["import torch, lockstep"] / medians["import torch"]
        ),
    }
    print(f"{'':32} {'median s':>9} {'min s':>9} {'max s':>9}")
    for name, values in times.items():
        print(f"{name:32} {medians[name]:9.3f} {min(values):9.3f} {max(values):9.3f}")
    print(f"import torch, lockstep / import torch = {report['torch_and_lockstep_over_torch']:.3f}")
    print(json.dumps(report))
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
