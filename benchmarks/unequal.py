"""Measures `assignment=measured` beside `assignment=equal` where one of two processes has half a core.

    python benchmarks/unequal.py [--rounds 3] [--steps 100] [--settle 30] [--json FILE]

`ls.train` trains examples/gpt.py's model in bitwise numerics, in new processes of one thread, in turn with either
setting. Each process is pinned to a core of its own. Beside the second one, a loop that does nothing else is pinned to
the same core, so that the scheduler gives each of them half of it. The first steps, in which speeds are measured, do
not count (`--settle`). Steps per second are medians over the rounds, the ratio is the median of the rounds' ratios.

Quote numbers only from a machine that did nothing else: other work takes from both cores, and a process with less than
half of one gains more. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import lockstep as ls

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import gpt

CONTEXT = 64
GLOBAL_BATCH, MICROBATCH = 32, 2
SETTINGS = ("equal", "measured")


class Clock(ls.Hook):
    def __init__(self) -> None:
        self.times: list[float] = []

    def after_step(self, run: Any) -> None:
        self.times.append(time.perf_counter())


def train(run_dir: str, assignment: str, steps: int, settle: int, cores: tuple[int, int]) -> dict[str, Any]:
    """Train on one rank; the second one has half of its core. Returns steps per second, and what the model became."""
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    windows = torch.randint(0, 256, (4096, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    clock = Clock()
    beside = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if rank == 1 else None  # on the same core
    try:
        result = ls.train(
            ls.Recipe(
                model=lambda: gpt.GPT(layers=4, width=128, heads=2, context=CONTEXT, dropout=0.1),
                data=torch.utils.data.TensorDataset(windows),
                inputs=lambda batch: batch[0][:, :-1],
                loss=lambda logits, batch: gpt.cross_entropy(logits, batch[0]),
                optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
                global_batch=GLOBAL_BATCH,
                microbatch=MICROBATCH,
                steps=steps,
            ),
            run_dir=run_dir,
            plan=f"replicate=2,numerics=bitwise,assignment={assignment}",
            hooks=[clock],
            log_every=5,
        )
    finally:
        if beside is not None:
            beside.kill()
            beside.wait()
    events = [json.loads(line) for line in Path(run_dir, "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "steps_per_second": (steps - settle) / (clock.times[-1] - clock.times[settle - 1]),
        "fingerprint": result.fingerprint,
        "changes": [event["microbatches"] for event in events if event["event"] == "assignment-changed"],
    }


def show(rounds: list[dict[str, dict[str, Any]]], ratios: list[float], load: float) -> None:
    table = Table(title=f"2 processes, the second with half a core; {len(rounds)} rounds, load before {load:.1f}")
    for column in ("assignment", "steps/s", "microbatches at the end", "fingerprint"):
        table.add_column(column, no_wrap=True)
    for name in SETTINGS:
        found = [each[name] for each in rounds]
        ends = {" ".join(map(str, each["changes"][-1])) if each["changes"] else "8 8" for each in found}
        speed = statistics.median(each["steps_per_second"] for each in found)
        prints = {each["fingerprint"][:12] for each in found}
        table.add_row(f"{name}", f"{speed:.2f}", ", ".join(sorted(ends)), ", ".join(sorted(prints)))
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print(f"ratio {statistics.median(ratios):.2f} (in the rounds: {', '.join(f'{each:.2f}' for each in ratios)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="both settings run once in each (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--settle", type=int, default=30, help="first steps that do not count (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    load, cores = os.getloadavg()[0], sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("one core; each of the two processes is pinned to one of its own")
    rounds: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            rounds.append({})
            for name in SETTINGS[:: -1 if number % 2 else 1]:
                arguments = (f"{folder}/{number}-{name}", name, options.steps, options.settle, (cores[0], cores[1]))
                rounds[-1][name] = ls.spawn(train, nproc=2, args=arguments)
    ratios = [each["measured"]["steps_per_second"] / each["equal"]["steps_per_second"] for each in rounds]
    show(rounds, ratios, load)
    if options.json is not None:
        figures = {"rounds": rounds, "ratios": ratios, "load_before": load}
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if len({found["fingerprint"] for each in rounds for found in each.values()}) > 1:
        raise SystemExit("the fingerprints differ")


if __name__ == "__main__":
    main()
