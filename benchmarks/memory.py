"""Measures a rank's memory for a sharded model, after a step and while it is built, beside one
process with the whole model.

    python benchmarks/memory.py [--nproc 4] [--layers 12] [--width 1152] [--json FILE]

The model is examples/gpt.py's GPT (191 million parameters by default) with AdamW. `held` counts the
bytes of this rank's parameters, gradients and optimizer state after a step. `building` is the rise
of the process's peak resident memory (Linux's VmHWM) from before the call of the model factory
until the model and the optimizer are built. For the sharded plan it is that of the rank with the
largest rise.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import lockstep as ls

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import gpt

CONTEXT = 16
MIB = 2**20


def resident(field: str) -> int:
    """Return bytes of resident memory. `field`: VmRSS (now) or VmHWM (peak since `reset`)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"no {field} in /proc/self/status; this benchmark needs Linux")


def reset() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def own(tensor: Tensor) -> int:
    part = getattr(tensor, "_local_tensor", tensor)
    return part.numel() * part.element_size()


def measure(plan: str, layers: int, width: int) -> dict[str, Any]:
    """Measure one rank."""
    text = bytes(range(256)) * 4
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        redirect_stderr(nowhere),
        ls.Session(run_dir=f"{folder}/run", plan=plan) as session,
    ):
        # Import what is imported late.
        session.prepare(
            lambda: gpt.GPT(layers=1, width=32, heads=1, context=CONTEXT, dropout=0.0), optimizer
        )
        session.run.training.modules.clear()
        gc.collect()
        reset()
        before = resident("VmRSS")
        model, made = session.prepare(
            lambda: gpt.GPT(layers=layers, width=width, heads=8, context=CONTEXT, dropout=0.0),
            optimizer,
        )
        building = max(session.world.gather_values(resident("VmHWM") - before))
        for step in session.steps(
            gpt.Windows(text, CONTEXT), global_batch=4, microbatch=1, steps=1
        ):
            for batch in step.microbatches():
                step.backward(gpt.cross_entropy(model(batch[:, :-1]), batch))
            step.commit()
        parameters = list(model.parameters())
        state = [
            value
            for held in made.state.values()
            for value in held.values()
            if isinstance(value, Tensor)
        ]
        return {
            "parameters": sum(map(own, parameters)),
            "gradients": sum(own(p.grad) for p in parameters if p.grad is not None),
            "optimizer": sum(map(own, state)),
            "building": building,
            "block": (
                sum(own(p) for p in model.blocks[0].parameters()) if "shard" not in plan else 0
            ),
        }


def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nproc", type=int, default=4, help="processes of the sharded plan (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1152)
    parser.add_argument(
        "--json", metavar="FILE", help="also write the figures, in bytes, to this file"
    )
    options = parser.parse_args()
    size = (options.layers, options.width)
    alone = ls.spawn(measure, nproc=1, args=("replicate=1", *size))
    sharded = ls.spawn(measure, nproc=options.nproc, args=(f"shard={options.nproc}", *size))
    alone, sharded = (
        result if isinstance(result, dict) else result[0] for result in (alone, sharded)
    )
    table = Table(
        title=(
            f"MiB a rank, {alone['parameters'] / 4e6:.0f} million parameters, AdamW; a block has"
            f" {alone['block'] / MIB:.0f} MiB"
        )
    )
    for column in ("", "one process", f"shard={options.nproc}", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    rows = {
        "held": [
            sum(side[name] for name in ("parameters", "gradients", "optimizer"))
            for side in (alone, sharded)
        ],
        **{
            f"  {name}": [side[name] for side in (alone, sharded)]
            for name in ("parameters", "gradients", "optimizer")
        },
        "building": [side["building"] for side in (alone, sharded)],
    }
    for name, (whole, part) in rows.items():
        table.add_row(name, f"{whole / MIB:.0f}", f"{part / MIB:.0f}", f"{part / whole:.3f}")
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    if options.json:
        Path(options.json).write_text(
            json.dumps({"one process": alone, "sharded": sharded, "ranks": options.nproc}, indent=2)
        )


if __name__ == "__main__":
    main()
