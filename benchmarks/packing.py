"""Measures training on packed documents beside the same documents in rows of their own.

    python benchmarks/packing.py [--length 2048] [--rounds 5] [--steps 4] [--json FILE]

`ls.train` trains examples/gpt.py's model in new processes of one thread, alternately on padded and
on packed rows of `--length` tokens. The lengths of documents are spread evenly from 1 to the row's:
padded rows are half full, and packed ones as `ls.pack` fills them. Attention in packed rows is
within each document. A step has 4 rows; the first step of each run does not count. Tokens are those
that are predicted. The ratio is the median of the rounds' ratios.

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
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

import lockstep as ls

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import gpt

DOCUMENTS = 256
ROWS_OF_STEP = 4


class Clock(ls.Hook):
    def __init__(self) -> None:
        self.times: list[float] = []

    def after_step(self, run: Any) -> None:
        self.times.append(time.perf_counter())


def documents(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, length + 1, (DOCUMENTS,), generator=generator).tolist()
    return [torch.randint(0, 256, (each,), generator=generator) for each in lengths]


def loss(logits: Tensor, batch: dict[str, Tensor]) -> ls.Sum:
    labels = batch["labels"][:, 1:].flatten()
    return ls.Sum(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum"))


def train(run_dir: str, length: int, steps: int, packed: bool) -> tuple[float, float]:
    """Return tokens per second, and the share of the rows' tokens that are documents'."""
    torch.set_num_threads(1)
    given, clock, tokens = documents(length), Clock(), list[int]()
    rows: Any = ls.pack(given, length)
    if not packed:
        rows = [ls.pack([document], length)[0] for document in given]

    def weight(batch: dict[str, Tensor]) -> int:
        tokens.append(int((batch["labels"] != -100).sum()))
        return tokens[-1]

    ls.train(
        ls.Recipe(
            model=lambda: gpt.GPT(layers=4, width=256, heads=4, context=length, dropout=0.0),
            data=rows,
            inputs=lambda batch: batch["input_ids"],
            loss=loss,
            weight=weight,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
            global_batch=ROWS_OF_STEP,
            microbatch=1,
            steps=steps + 1,
            sequence=ls.Sequence(documents=lambda batch: batch["document_ids"]) if packed else None,
        ),
        run_dir=run_dir,
        hooks=[clock],
    )
    trained = sum(tokens[-steps * ROWS_OF_STEP :])
    filled = statistics.fmean((row["document_ids"] >= 0).float().mean().item() for row in rows)
    return trained / (clock.times[-1] - clock.times[0]), filled


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the figures to this file"
    )
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    load = os.getloadavg()[0]
    speeds: dict[bool, list[float]] = {True: [], False: []}
    filled: dict[bool, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for packed in (True, False) if number % 2 else (False, True):
                arguments = f"{folder}/{number}-{packed}", options.length, options.steps, packed
                speed, filled[packed] = ls.spawn(train, nproc=1, args=arguments)
                speeds[packed].append(speed)
    ratio = statistics.median(
        packed / padded for packed, padded in zip(speeds[True], speeds[False], strict=True)
    )
    table = Table("rows", "filled", "tokens/s", title=f"{options.rounds} rounds, load {load:.1f}")
    for packed, name in ((False, "padded"), (True, "packed")):
        table.add_row(name, f"{filled[packed]:.1%}", f"{statistics.median(speeds[packed]):.0f}")
    table.add_row("ratio", f"{filled[True] / filled[False]:.2f}", f"{ratio:.2f}")
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    if options.json is not None:
        figures = {"padded": speeds[False], "packed": speeds[True], "ratio": ratio}
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
