"""python tests/zoo/losses.py [--family ddp] [--name no_sampler] [--json FILE]: what else there is,
before the zoo.

Each script and its clean twin runs on 2 processes, and on 1 process with twice the batch size.
Three ways to look:

- processes: the final losses of 2 processes and of 1 are compared. Needs nothing but the script.
- reference: the final losses of the script and of its clean twin are compared. Needs a script known
  to be right.
- failure: the script fails or hangs by itself. (TORCH_DISTRIBUTED_DEBUG=DETAIL, which checks
  collectives, ends DDP on Gloo with a segmentation fault in torch 2.13, whatever the script does.)

Losses are different if they are off by more than 1e-3 of their size.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from render import Specimen, render, specimens
from rich.console import Console
from rich.table import Table

ZOO = Path(__file__).resolve().parent
TOLERANCE, HANG_SECONDS = 1e-3, 60
RECORDER = """
import os, torch
backward = torch.Tensor.backward
def recorded(self, *args, **kwargs):
    open(f"{os.environ['LOSSES']}/{os.getpid()}", "w").write(str(float(self.detach().mean())))
    return backward(self, *args, **kwargs)
torch.Tensor.backward = recorded
"""
BATCH_SIZE = re.compile(
    r'("--(?:batch-size|per-class)".*default=|\bper_device_train_batch_size=)(\d+)'
)
PROCESSES = re.compile(r'("--processes".*default=|\bdevices=)2')


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    loss: float
    """The last loss whose backward was called, as the mean over processes."""
    failed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What each way to look says of one script, and of its clean twin."""

    family: str
    name: str
    processes: bool
    processes_clean: bool
    reference: bool
    failure: bool
    failure_clean: bool
    losses: dict[str, float]


def one_process(text: str) -> str:
    """Return the script for one process, with the batch size of two."""
    return PROCESSES.sub(
        r"\g<1>1", BATCH_SIZE.sub(lambda found: f"{found[1]}{2 * int(found[2])}", text)
    )


def differ(one: float, other: float) -> bool:
    return not (math.isfinite(one) and abs(one - other) <= TOLERANCE * abs(other))


def run(specimen: Specimen, text: str, *, processes: int) -> Run:
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        (Path(folder) / "site").mkdir()
        (Path(folder) / "site" / "sitecustomize.py").write_text(RECORDER, encoding="utf-8")
        (Path(folder) / "losses").mkdir()
        (Path(folder) / "train.py").write_text(text, encoding="utf-8")
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(processes),
        ]
        command = [
            sys.executable,
            *(torchrun if specimen.launch == "torchrun" else []),
            "train.py",
            "--seed",
            "0",
        ]
        added = {
            "PYTHONPATH": f"{folder}/site",
            "LOSSES": f"{folder}/losses",
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | added,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        try:
            errors = process.communicate(timeout=HANG_SECONDS)[1]
            # torch 2.13 now and then aborts at the end of a script
            failed = "Traceback" in errors and "SIGABRT" not in errors
        except subprocess.TimeoutExpired:
            failed = True
            process.terminate()  # torchrun ends its workers
            process.communicate()
        losses = [
            float(path.read_text(encoding="utf-8")) for path in Path(folder, "losses").iterdir()
        ]
    return Run(loss=fmean(losses) if losses else math.nan, failed=failed)


def look(specimen: Specimen) -> Verdict:
    text = specimen.text
    faulty, clean = render(text, faulty=True), render(text, faulty=False)
    on_two, on_one = (
        run(specimen, faulty, processes=2),
        run(specimen, one_process(faulty), processes=1),
    )
    clean_on_two, clean_on_one = (
        run(specimen, clean, processes=2),
        run(specimen, one_process(clean), processes=1),
    )
    return Verdict(
        family=specimen.family,
        name=specimen.name,
        processes=differ(on_two.loss, on_one.loss),
        processes_clean=differ(clean_on_two.loss, clean_on_one.loss),
        reference=differ(on_two.loss, clean_on_two.loss),
        failure=on_two.failed,
        failure_clean=clean_on_two.failed,
        losses={
            "2": on_two.loss,
            "1": on_one.loss,
            "clean 2": clean_on_two.loss,
            "clean 1": clean_on_one.loss,
        },
    )


def show(verdicts: list[Verdict]) -> None:
    table = Table(title=f"{len(verdicts)} scripts with one fault each, and their clean twins")
    for column in (
        "",
        "faults with an alarm",
        "clean twins with an alarm",
        "faults told from their twins",
    ):
        table.add_column(column, justify="left" if not column else "right")
    rows = {
        "final loss, 2 processes and 1": [
            (each.processes, each.processes_clean) for each in verdicts
        ],
        "final loss, script and clean twin": [(each.reference, False) for each in verdicts],
        "failure or hang": [(each.failure, each.failure_clean) for each in verdicts],
    }
    for way, alarms in rows.items():
        table.add_row(
            way,
            *(
                str(sum(each))
                for each in zip(*((a, b, a and not b) for a, b in alarms), strict=True)
            ),
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", action="append", help="default: all")
    parser.add_argument("--name", action="append", help="default: all")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write all results to this file"
    )
    options = parser.parse_args()
    verdicts = []
    for specimen in specimens(ZOO):
        if (options.family and specimen.family not in options.family) or (
            options.name and specimen.name not in options.name
        ):
            continue
        verdicts.append(look(specimen))
        print(f"{specimen.family}/{specimen.name} {verdicts[-1]}", file=sys.stderr)
    if options.json is not None:
        options.json.write_text(
            json.dumps([asdict(each) for each in verdicts], indent=1) + "\n", encoding="utf-8"
        )
    show(verdicts)


if __name__ == "__main__":
    main()
