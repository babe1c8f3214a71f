"""Measures tokens/s, MFU and memory of language models on one GPU: `ls.train` beside a plain loop like nanoGPT's.

    python benchmarks/gpu.py [--models gpt2-124m gpt2-350m llama-1b] [--rounds 2] [--json FILE]
                             [--write docs/performance.md]

Both train in bf16 autocast with fused AdamW, clipping, flash attention and the same batches, four microbatches per
step. The plain loop compiles the whole model and computes all logits at once. `ls.train` runs with `compile=yes`, which
compiles each block; its model's loss is `linear_cross_entropy`, which never holds the logits of all tokens in memory.
Each measurement is a process of its own, the sides alternate, and figures are medians over rounds.

Before that, two processes train the first model on the one GPU over Gloo, as if each were on its own host (NCCL allows
one process per GPU). This checks ranks on GPUs: their losses and norms must be those of one process.

MFU = tokens/s x (6 N + 12 L H Q T) / the GPU's dense bf16 peak from its data sheet (`language_models.flops_a_token`,
`lockstep.logging.flops`).

Without a GPU the script says so and ends with status 0. `--device cpu --models tiny` tries the script itself.
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
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from language_models import SIZES, LanguageModel, Size, flops_a_token
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import lockstep as ls
from lockstep.logging.flops import peak

SIDES = ("plain", "ls.train")
MICROBATCHES = 4
WARMUP, STEPS = 10, 30
CHECKED, OFF = 5, 4e-3
"""Steps of two processes on the one GPU, and the largest relative difference of a loss or norm from one process's:
bf16's rounding."""
BEGIN, END = "<!-- benchmarks/gpu.py begins -->", "<!-- benchmarks/gpu.py ends -->"


class Text:
    """Random tokens. Their values do not affect the speed."""

    def __init__(self, size: Size) -> None:
        self.context = size.context
        self.tokens = torch.randint(0, size.vocabulary, (4_000_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)

    def __len__(self) -> int:
        return len(self.tokens) // self.context - 1

    def __getitems__(self, indices: list[int]) -> Tensor:
        return torch.stack([self.tokens[index * self.context :][: self.context + 1] for index in indices]).long()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def synchronise(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def batches(size: Size, device: torch.device) -> Iterator[Tensor]:
    """Yield batches through pinned memory, one ahead of the GPU."""
    text, rng = Text(size), torch.Generator().manual_seed(1)
    while True:
        batch = text.__getitems__(torch.randint(len(text), (size.batch,), generator=rng).tolist())
        yield batch.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch


def plain(size: Size, device: torch.device) -> tuple[float, LanguageModel]:
    """Return the seconds per step."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model = LanguageModel(size, chunked=False).to(device)
    run = torch.compile(model) if device.type == "cuda" else model
    optimizer = adamw(model)
    autocast: AbstractContextManager[Any] = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
    following = batches(size, device)
    batch = next(following)
    began = 0.0
    for step in range(WARMUP + STEPS):
        if step == WARMUP:
            began = synchronise(device)
        for _ in range(MICROBATCHES):
            with autocast:
                loss = run(batch[:, :-1], batch[:, 1:]) / MICROBATCHES
            batch = next(following)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 9:
            loss.item()
    return (synchronise(device) - began) / STEPS, model


class Clock(ls.Hook):
    def on_start(self, run: ls.Run) -> None:
        self.device = run.context.device
        self.model = run.model

    def after_step(self, run: ls.Run) -> None:
        if run.step == WARMUP:
            self.began = synchronise(self.device)
        if run.step == WARMUP + STEPS:
            self.ended = synchronise(self.device)


def recipe_of(size: Size, device: torch.device, steps: int) -> ls.Recipe:
    return ls.Recipe(
        model=lambda: LanguageModel(size, chunked=True),
        data=Text(size),
        loss=lambda model, batch: model(batch[:, :-1], batch[:, 1:]),
        optimizer=adamw,
        global_batch=MICROBATCHES * size.batch,
        microbatch=size.batch,
        steps=steps,
        clip_norm=1.0,
        precision="bf16" if device.type == "cuda" else "fp32",
        blocks=["blocks.*"],
    )


def lockstep(size: Size, device: torch.device) -> tuple[float, LanguageModel]:
    """Return the seconds per step."""
    clock = Clock()
    recipe = recipe_of(size, device, WARMUP + STEPS)
    with tempfile.TemporaryDirectory() as folder:
        ls.train(recipe, plan="compile=yes" if device.type == "cuda" else "", run_dir=f"{folder}/run", hooks=[clock])
    return (clock.ended - clock.began) / STEPS, clock.model


def measure(name: str, side: str, device: torch.device) -> dict[str, float]:
    """Measure one side in a process of its own."""
    size = SIZES[name]
    seconds, model = (plain if side == "plain" else lockstep)(size, device)
    tokens = MICROBATCHES * size.batch * size.context / seconds
    found = {"tokens_per_second": tokens, "step_seconds": seconds}
    if device.type == "cuda":
        found["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if (most := peak(torch.cuda.get_device_name(), "bf16")) is not None:
            found["mfu"] = tokens * flops_a_token(model, size) / most
    return found


def measured(name: str, side: str, device: str) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).resolve()), "--device", device, "--one", name, side]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def first_steps(name: str, processes: int, device: str) -> list[float]:
    """Return each step's loss and gradient norm, from `processes` processes on the one device."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--device", device, "--member", name, folder]
        places = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": str(processes)}
        members = [subprocess.Popen(command, env={**os.environ, **places, "RANK": str(rank)}) for rank in range(processes)]
        statuses = [member.wait() for member in members]
        if any(statuses):
            raise SystemExit(f"{processes} processes on one device failed")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)[figure] for line in lines for figure in ("loss", "gradient_norm")]


def member(name: str, folder: str, device: torch.device) -> None:
    """Train as one of these processes."""
    processes = int(os.environ["WORLD_SIZE"])
    if processes > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(os.environ["RANK"]), world_size=processes)
    ls.train(recipe_of(SIZES[name], device, CHECKED), plan=f"replicate={processes}", run_dir=f"{folder}/run", log_every=1)
    if processes > 1:
        dist.destroy_process_group()


def check_shared(name: str, device: str) -> str:
    """Return the result in words. Ends the benchmark if it is wrong."""
    one, two = (first_steps(name, processes, device) for processes in (1, 2))
    off = max(abs(a - b) / abs(a) for a, b in zip(one, two, strict=True))
    if not off <= OFF:
        raise SystemExit(
            f"2 processes on one device over Gloo have losses and norms {two}, one process {one}: off by {off:.1e}, more than {OFF:g}"
        )
    return f"2 processes on the one device, over Gloo: {name}'s first {CHECKED} losses and norms are those of one process to {off:.1e}."


def rows_of(models: list[str], rounds: int, device: str) -> list[dict[str, Any]]:
    rows = []
    for name in models:
        found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for turn in range(rounds):
            for side in SIDES if turn % 2 == 0 else reversed(SIDES):
                found[side].append(measured(name, side, device))
        for side in SIDES:
            pairs = zip(found[side], found["plain"], strict=True)
            row = {figure: statistics.median(each[figure] for each in found[side]) for figure in found[side][0]}
            ratio = statistics.median(own["tokens_per_second"] / other["tokens_per_second"] for own, other in pairs)
            rows.append({"model": name, "side": side, **row, "ratio": ratio, "turns": found[side]})
    return rows


def cells(row: dict[str, Any]) -> list[str]:
    share, memory = row.get("mfu"), row.get("memory_gib")
    return [
        row["model"],
        row["side"],
        f"{row['tokens_per_second']:,.0f}",
        f"{row['ratio']:.3f}",
        "-" if share is None else f"{share:.1%}",
        "-" if memory is None else f"{memory:.1f}",
    ]


HEADS = ("model", "side", "tokens/s", "to plain", "MFU", "memory, GiB")


def markdown(rows: list[dict[str, Any]], rounds: int, shared: str) -> str:
    hardware = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {date.today()}, medians of {rounds} rounds"
    lines = [f"`python benchmarks/gpu.py --rounds {rounds}` on one {hardware}:", "", f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    return "\n".join([BEGIN, *lines, *(f"| {' | '.join(cells(row))} |" for row in rows), "", shared, END])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(SIZES), default=["gpt2-124m", "gpt2-350m", "llama-1b"])
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--write", metavar="PAGE", help="put the table into this page, between its markers")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--member", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing was measured")
        return
    if options.one:
        print(json.dumps(measure(*options.one, torch.device(options.device))))
        return
    if options.member:
        member(*options.member, torch.device(options.device))
        return
    shared = check_shared(options.models[0], options.device)
    print(shared)
    rows = rows_of(options.models, options.rounds, options.device)
    table = Table(title=f"one device ({options.device}), median of {options.rounds} rounds")
    for place, column in enumerate(HEADS):
        table.add_column(column, justify="left" if place < 2 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    if options.json:
        Path(options.json).write_text(json.dumps({"rounds": options.rounds, "rows": rows, "shared": shared}, indent=2))
    if options.write:
        page = Path(options.write)
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        page.write_text(before + markdown(rows, options.rounds, shared) + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
