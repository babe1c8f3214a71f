"""Measures `Recipe.gradient_compression`: bytes sent, speed over slow links, and the effect on the
loss.

    python benchmarks/compression.py [--modes none int8] [--wires 100 1000]
        [--milliseconds 10] [--steps 200]
                                     [--timed 20] [--json FILE]

The model is examples/gpt.py's GPT on two processes of one thread. For bytes and steps/s, the
processes are on two hosts, which are network namespaces joined by a link with the given rate and
round-trip delay. Bytes are those that the first host's network device sent, headers included; times
are by its wall clock. Both are over `--timed` steps, after a few warm-up steps. The loss is that of
the held-out text after `--steps` steps, from another run in which the two processes share memory:
it does not depend on the link.

Needs root, iproute2 and util-linux. Quote numbers only from a machine that did nothing else: the
link's delay is a process too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

import lockstep as ls

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]
import gpt  # noqa: E402
from doctor.network import network  # noqa: E402

MODES = ("none", "bf16", "fp16", "int8", "powersgd:4")
WARM_UP = 5
CONTEXT = 128
PORT = "29417"
PREFIX = "figures "


def recipe(gradient_compression: str, steps: int) -> ls.Recipe:
    training, held_out = (gpt.Windows(text, CONTEXT) for text in gpt.read_text())
    return ls.Recipe(
        model=lambda: gpt.GPT(layers=4, width=128, heads=2, context=CONTEXT, dropout=0.0),
        data=training,
        inputs=lambda batch: batch[:, :-1],
        loss=lambda logits, batch: F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()),
        optimizer=lambda model: torch.optim.AdamW(
            model.parameters(), lr=4e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True
        ),
        schedule=ls.warmup_cosine(warmup=min(100, steps // 10), total=steps),
        global_batch=16,
        microbatch=4,
        steps=steps,
        clip_norm=1.0,
        gradient_compression=gradient_compression,
        evaluation=ls.Evaluation(data=held_out, microbatch=32),
    )


class Meter(ls.Hook):
    """Measures time and bytes sent between two steps."""

    def after_step(self, run: Any) -> None:
        if run.step == WARM_UP:
            self.began, self.sent_before = time.perf_counter(), sent_bytes()
        if run.step == run.recipe.steps:
            steps = run.step - WARM_UP
            self.figures = {
                "bytes_a_step": (sent_bytes() - self.sent_before) / steps,
                "steps_per_second": steps / (time.perf_counter() - self.began),
            }


def sent_bytes() -> int:
    """Return the bytes that device eth0 of this namespace has sent."""
    rows = Path("/proc/self/net/dev").read_text().splitlines()
    (row,) = [row.partition(":")[2].split() for row in rows if row.strip().startswith("eth0:")]
    return int(row[8])


def timed(modes: Iterable[str], steps: int) -> None:
    """Train on one host."""
    for gradient_compression in modes:
        meter = Meter()
        with tempfile.TemporaryDirectory() as folder:
            given = recipe(gradient_compression, WARM_UP + steps)
            result = ls.train(
                given, run_dir=f"{folder}/run", plan="replicate=2,transport=torch", hooks=[meter]
            )
        if result.rank == 0:
            print(PREFIX + json.dumps({"mode": gradient_compression, **meter.figures}), flush=True)


def over_wire(
    modes: list[str], megabits: int, milliseconds: float, steps: int
) -> list[dict[str, Any]]:
    with network(2) as hosts:
        if milliseconds:
            hosts.delay(1, milliseconds / 2)
        hosts.limit(1, 2, megabits)
        hosts.limit(2, 1, megabits)
        started = [
            subprocess.Popen(
                [
                    *hosts.inside(number),
                    sys.executable,
                    __file__,
                    "--timed",
                    str(steps),
                    "--modes",
                    *modes,
                ],
                env={**os.environ, **environment(number - 1, hosts.address(1))},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if number > 1 else None,
                text=True,
            )
            for number in hosts.hosts
        ]
        said = [each.communicate()[0] for each in started]
    if any(each.returncode for each in started):
        raise SystemExit(f"a process failed: exit statuses {[each.returncode for each in started]}")
    rows = [
        json.loads(line.removeprefix(PREFIX))
        for line in said[0].splitlines()
        if line.startswith(PREFIX)
    ]
    return [{"megabits": megabits, "milliseconds": milliseconds, **row} for row in rows]


def environment(rank: int, address: str) -> dict[str, str]:
    """Return the environment of one process per host, as `lockstep run` sets it. torchrun's one
    thread would not count as requested."""
    place = {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": address,
        "MASTER_PORT": PORT,
    }
    settings = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    settings |= {"LOCKSTEP_LAUNCHER": "lockstep", "COMPRESSION_HOST": "1"}
    return {**{name: str(value) for name, value in place.items()}, **settings}


def loss_of(gradient_compression: str, steps: int) -> float:
    """Train in one of two processes that share memory."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return float(
            ls.train(
                recipe(gradient_compression, steps), run_dir=f"{folder}/run", plan="replicate=2"
            ).metrics["loss"]
        )


def show(
    modes: list[str], rows: list[dict[str, Any]], losses: dict[str, float], steps: int
) -> None:
    wires = list(dict.fromkeys((row["megabits"], row["milliseconds"]) for row in rows))
    table = Table(title=f"GPT on 2 processes of 1 thread, {os.cpu_count()} cores")
    table.add_column("gradient_compression")
    for column in (
        "bytes a step",
        *(f"steps/s, {rate} Mbit/s, {delay:g} ms" for rate, delay in wires),
        f"loss, {steps} steps",
    ):
        table.add_column(column, justify="right")
    for mode in modes:
        mine = {(row["megabits"], row["milliseconds"]): row for row in rows if row["mode"] == mode}
        sent = f"{next(iter(mine.values()))['bytes_a_step']:,.0f}" if mine else ""
        table.add_row(
            mode,
            sent,
            *(f"{mine[wire]['steps_per_second']:.2f}" for wire in wires),
            f"{losses[mode]:.4f}",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        default=list(MODES),
        help="values of Recipe.gradient_compression (default: %(default)s)",
    )
    parser.add_argument(
        "--wires", nargs="+", type=int, default=[100, 1000], help="Mbit/s (default: %(default)s)"
    )
    parser.add_argument(
        "--milliseconds", type=float, default=10.0, help="round-trip delay (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="steps for the loss (default: %(default)s)"
    )
    parser.add_argument("--timed", type=int, default=20, help="timed steps (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to this file")
    options = parser.parse_args()
    if "COMPRESSION_HOST" in os.environ:
        timed(options.modes, options.timed)
        return
    load = os.getloadavg()[0]
    try:
        rows = [
            row
            for megabits in options.wires
            for row in over_wire(options.modes, megabits, options.milliseconds, options.timed)
        ]
    except pytest.skip.Exception as reason:
        raise SystemExit(f"no wires on this machine: {reason}") from None
    os.environ["OMP_NUM_THREADS"] = "1"
    losses = {
        mode: ls.spawn(loss_of, nproc=2, args=(mode, options.steps)) for mode in options.modes
    }
    show(options.modes, rows, losses, options.steps)
    if options.json:
        found = {
            "load_before": load,
            "steps": options.steps,
            "timed": options.timed,
            "rows": rows,
            "losses": losses,
        }
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
