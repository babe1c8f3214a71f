"""Measures the cost of monitoring: progress notes, the hang watchdog, and ranks.jsonl.

    python benchmarks/watching.py [--nproc 2] [--rounds 9] [--steps 100] [--json FILE]

`ls.train` trains examples/gpt.py's model in new processes of one thread, alternately with all
monitoring, as in every run, and without. No user can switch it off: this script removes it from
lockstep. The first 20 steps of each run do not count. The ratio is the median of the rounds'
ratios. The table also has the cost of one progress note, and the share of a 5 ms step that its
notes take.

Quote numbers only from a machine that did nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import lockstep as ls
from lockstep import house_hooks
from lockstep.logging.phases import Phases

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import gpt

FIRST = 20
CONTEXT = 64


class Clock(ls.Hook):
    def __init__(self) -> None:
        self.times: list[float] = []

    def after_step(self, run: Any) -> None:
        self.times.append(time.perf_counter())


class Entered:
    """Counts the progress notes."""

    def __init__(self) -> None:
        self.count = 0
        enter = Phases.enter

        def counted(phases: Phases, name: str, **given: Any) -> str:
            self.count += 1
            return enter(phases, name, **given)

        Phases.enter = counted  # type: ignore[method-assign]


def train(run_dir: str, steps: int, watched: bool, counts: bool) -> tuple[float, float]:
    """Return seconds per step and progress notes per step. Runs on each rank."""
    torch.set_num_threads(1)
    entered = Entered() if counts else None
    if not watched:
        house_hooks.WatchdogTimeouts.parse = lambda *_: None  # type: ignore[method-assign]
        house_hooks.Stragglers = ls.Hook  # type: ignore[misc, assignment]
        Phases.enter = lambda phases, name, **_: name  # type: ignore[method-assign]
    windows = torch.randint(0, 256, (512, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    clock = Clock()
    ls.train(
        ls.Recipe(
            model=lambda: gpt.GPT(layers=4, width=256, heads=4, context=CONTEXT, dropout=0.0),
            data=torch.utils.data.TensorDataset(windows),
            inputs=lambda batch: batch[0][:, :-1],
            loss=lambda logits, batch: gpt.cross_entropy(logits, batch[0]),
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
            global_batch=8,
            microbatch=4,
            steps=steps,
        ),
        run_dir=run_dir,
        hooks=[clock],
    )
    return (clock.times[-1] - clock.times[FIRST - 1]) / (steps - FIRST), (
        0.0 if entered is None else entered.count / steps
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the figures to this file"
    )
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    load = os.getloadavg()[0]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:

        def run(number: int, watched: bool, counts: bool = False) -> tuple[float, float]:
            place = f"{folder}/{number}-{watched}-{counts}"
            found: tuple[float, float] = ls.spawn(
                train, nproc=options.nproc, args=(place, options.steps, watched, counts)
            )
            return found

        notes = run(-1, True, counts=True)[1]
        for number in range(options.rounds):
            for watched in (True, False) if number % 2 else (False, True):
                seconds[watched].append(run(number, watched)[0])
    ratio = statistics.median(
        on / off for on, off in zip(seconds[True], seconds[False], strict=True)
    )
    phases = Phases()
    note = timeit.timeit(lambda: phases.enter("compute"), number=200_000) / 200_000
    table = Table(
        "", "", title=f"{options.nproc} processes, {options.rounds} rounds, load before {load:.1f}"
    )
    table.add_row("a step with it", f"{statistics.median(seconds[True]) * 1e3:.2f} ms")
    table.add_row("a step without", f"{statistics.median(seconds[False]) * 1e3:.2f} ms")
    table.add_row("ratio", f"{ratio:.4f}")
    table.add_row("a note of a phase", f"{note * 1e6:.2f} µs")
    table.add_row("notes a step", f"{notes:.0f}, {notes * note / 0.005:.2%} of 5 ms")
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    if options.json is not None:
        figures = {
            "with": seconds[True],
            "without": seconds[False],
            "ratio": ratio,
            "note_seconds": note,
            "notes": notes,
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
