"""python tests/zoo/run.py [--family ddp] [--name no_sampler] [--seeds 3] [--jobs 1] [--json FILE]:
audits the zoo.

Each script and its clean twin is audited once a seed. Prints, by family: how many faults were
found, how many with the right cause, how many with the right line too, and how many clean twins had
a finding. (losses.py says how many a comparison of final losses catches.) Exit status 1 if fewer
than 95% were found, or fewer than 90% with cause and line, or any twin had a finding.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from render import Specimen, places, render, specimens
from rich.console import Console
from rich.table import Table

ZOO = Path(__file__).resolve().parent
STEPS, HANG_SECONDS = 200, 40
LEAST_FOUND, LEAST_EXPLAINED = 0.95, 0.90


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One audit of a script."""

    family: str
    name: str
    faulty: bool
    seed: int
    cause: str
    """The cause that is to be found."""
    found: list[tuple[str, str]]
    """Cause and line of each finding."""
    is_found: bool
    has_cause: bool
    has_line: bool
    status: int
    error: str
    notes: list[str]
    seconds: float


def audit(specimen: Specimen, *, faulty: bool, seed: int) -> Result:
    text = specimen.text
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        script = Path(folder) / f"{specimen.name}.py"
        script.write_text(render(text, faulty=faulty), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "lockstep",
            "audit",
            "--json",
            "--steps",
            str(STEPS),
            "--hang-after",
            str(HANG_SECONDS),
        ]
        began = time.monotonic()
        ended = subprocess.run(
            [*command, script.name, "--seed", str(seed)],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
        )
    try:
        report = json.loads(ended.stdout)
    except ValueError:
        report = {"findings": [], "notes": [], "error": ended.stderr[-2000:]}
    found = [(each["cause"], each["line"]) for each in report["findings"]]
    right = {
        (cause, int(line.rpartition(":")[2] or 0))
        for cause, line in found
        if cause == specimen.cause
    }
    return Result(
        family=specimen.family,
        name=specimen.name,
        faulty=faulty,
        seed=seed,
        cause=specimen.cause,
        found=found,
        is_found=bool(found),
        has_cause=bool(right),
        has_line=any(line in places(text) for _, line in right),
        status=ended.returncode,
        error=report["error"],
        notes=report["notes"],
        seconds=time.monotonic() - began,
    )


def show(results: Sequence[Result]) -> bool:
    """Print the table. True if all limits hold."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    table = Table(title="lockstep audit on the zoo")
    for column in (
        "",
        "faults",
        "found",
        "right cause",
        "and line",
        "clean twins",
        "with a finding",
    ):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    families = list(dict.fromkeys(each.family for each in results))
    for family in [*families, "all"]:
        rows = [each for each in results if family in (each.family, "all")]
        faulty, clean = (
            [each for each in rows if each.faulty],
            [each for each in rows if not each.faulty],
        )
        explained = sum(each.has_cause and each.has_line for each in faulty)
        counts = (
            len(faulty),
            sum(each.is_found for each in faulty),
            sum(each.has_cause for each in faulty),
            explained,
        )
        table.add_row(
            family,
            *map(str, counts),
            str(len(clean)),
            str(sum(each.is_found or each.status != 0 for each in clean)),
        )
    for each in results:
        if each.faulty and not (each.has_cause and each.has_line):
            print(
                f"{each.family}/{each.name} (seed {each.seed}): {each.cause} expected, found:"
                f" {each.found or 'nothing'} {each.error[-300:]}"
            )
        if not each.faulty and (each.found or each.status != 0):
            print(
                f"{each.family}/{each.name} (seed {each.seed}), clean twin:"
                f" {each.found or each.error[-300:]}"
            )
    console.print(table)
    faulty, clean = (
        [each for each in results if each.faulty],
        [each for each in results if not each.faulty],
    )
    explained = sum(each.has_cause and each.has_line for each in faulty)
    enough = sum(each.is_found for each in faulty) >= LEAST_FOUND * len(
        faulty
    ) and explained >= LEAST_EXPLAINED * len(faulty)
    return enough and not any(each.found or each.status for each in clean)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", action="append", help="default: all")
    parser.add_argument("--name", action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="audits at once, of two processes each (default: %(default)s)",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write all results to this file"
    )
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = [
        each
        for each in specimens(ZOO)
        if (not options.family or each.family in options.family)
        and (not options.name or each.name in options.name)
    ]
    jobs = [
        (each, faulty, seed)
        for each in chosen
        for seed in range(options.seeds)
        for faulty in (True, False)
    ]

    def one(job: tuple[Specimen, bool, int]) -> Result:
        specimen, faulty, seed = job
        result = audit(specimen, faulty=faulty, seed=seed)
        mark = (
            "."
            if (
                result.has_cause and result.has_line
                if faulty
                else not result.found and not result.status
            )
            else "!"
        )
        print(
            f"{mark} {specimen.family}/{specimen.name} {'faulty' if faulty else 'clean'} {seed}"
            f" {result.seconds:.1f} s",
            file=sys.stderr,
        )
        return result

    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(one, jobs))
    if options.json is not None:
        options.json.write_text(
            json.dumps([asdict(each) for each in results], indent=1) + "\n", encoding="utf-8"
        )
    sys.exit(0 if show(results) else 1)


if __name__ == "__main__":
    main()
