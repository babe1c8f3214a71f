"""Run directories of any size, written as a run writes them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

BEGAN = 1_790_000_000.0


def write(folder: Path, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def run_json(
    folder: Path, *, plan: Mapping[str, Any] | None = None, recipe: Mapping[str, Any] | None = None
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    values = {"replicate": 2, "shard": 1, "numerics": "fast", **(plan or {})}
    text = f"replicate={values['replicate']},shard={values['shard']},numerics={values['numerics']}"
    said = {
        "recipe": (
            {
                "model": "train.GPT",
                "data": "train.Corpus[1000000]",
                "global_batch": 64,
                "microbatch": 8,
                "steps": 1000,
            }
            | {
                "epochs": None,
                "precision": "bf16",
                "seed": 0,
                "evaluation": {"every": 100, "metrics": {"accuracy": "train.accuracy"}},
            }
            | dict(recipe or {})
        ),
        "seed": 0,
        "plan": {"text": text, **values},
        "world_size": values["replicate"] * values["shard"],
        "launcher": "lockstep",
        "checkpoints": None,
        "started": "2026-09-21T14:13:20+00:00",
        "environment": (
            {"versions": {"lockstep": "0.1.0", "torch": "2.13.0"}, "host": "a", "cpus": 16}
            | {
                "device": {"type": "cuda", "name": "NVIDIA H100 80GB"},
                "command_line": ["python", "train.py", "--lr", "3e-4"],
            }
        ),
    }
    (folder / "run.json").write_text(json.dumps(said), encoding="utf-8")


def event(after: float, kind: str, step: int, **details: Any) -> dict[str, Any]:
    """`after`: seconds since the run began."""
    return {"time": BEGAN + after, "event": kind, "step": step, **details}


def metrics(
    steps: Sequence[int],
    *,
    seed: int = 0,
    rate: float = 3e-4,
    seconds: float = 0.1,
    more: int = 0,
    floor: float = 1.4,
    last: int | None = None,
) -> list[dict[str, Any]]:
    """Rows of a run whose loss falls, with a spike now and then; `more`: metrics besides."""
    noise = random.Random(seed)
    last = steps[-1] if last is None else last
    rows: list[dict[str, Any]] = []
    for step in steps:
        share = step / last
        loss = (
            floor
            + 4 * math.exp(-9 * share)
            + noise.gauss(0, 0.06)
            + (2.0 if noise.random() < 3 / len(steps) else 0.0)
        )
        rows.append({
            "step": step, "time": BEGAN + seconds * step, "loss": loss,
            "lr": rate * min(1, 20 * share) * (0.5 + 0.5 * math.cos(math.pi * share)),
            "gradient_norm": math.exp(noise.gauss(-0.5,
            0.4)) * (30 if noise.random() < 2 / len(steps) else 1),
            "samples_per_second": 640 * (1 + noise.gauss(0, 0.03)),
            "weight_per_second": 1.3e6 * (1 + noise.gauss(0, 0.03)),
            "mfu": 0.41 * (1 + noise.gauss(0, 0.03)), "memory_bytes": 5.2e10 + 2e9 * min(1,
            30 * share),
            "loss/ce": loss - 0.05, "loss/balance": 0.05 + noise.gauss(0, 0.005),
            **{f"metric_{number}": noise.gauss(number, 1) for number in range(more)},
        })  # fmt: skip
        if step % max(1, last // 20) == 0:
            values = {
                "evaluation/loss": floor + 0.1 + 4 * math.exp(-9 * share),
                "evaluation/accuracy": 0.7 * (1 - math.exp(-5 * share)),
            }
            rows.append({"step": step, "time": BEGAN + seconds * step, **values})
    return rows


def ranks(
    steps: Sequence[int], world: int, *, seed: int = 0, slow: int | None = None
) -> list[dict[str, Any]]:
    """Rows of `ranks.jsonl`; from the middle on, rank `slow` takes 30% longer to compute, and the
    others wait for it."""
    noise = random.Random(seed)
    rows = []
    for step in steps:
        compute = [0.060 * (1 + noise.gauss(0, 0.01)) for _ in range(world)]
        if slow is not None and step > steps[-1] / 2:
            compute[slow] *= 1.3
        data = [0.003 * (1 + abs(noise.gauss(0, 0.3))) for _ in range(world)]
        longest = max(a + b for a, b in zip(compute, data, strict=True)) + 0.012
        communication = [longest - a - b - 0.001 for a, b in zip(compute, data, strict=True)]
        took = [longest + noise.gauss(0, 1e-4) for _ in range(world)]
        said = {"step": took, "data": data, "compute": compute, "communication": communication}
        rows.append(
            {
                "step": step,
                "time": BEGAN + 0.1 * step,
                "ranks": said,
                "hosts": [f"node{rank // 8}" for rank in range(world)],
            }
        )
    return rows


def whole(
    folder: Path,
    *,
    steps: int = 1000,
    every: int = 10,
    world: int = 16,
    seed: int = 0,
    more: int = 0,
    **recipe: Any,
) -> None:
    """A run that ended, after a failure from which it was resumed."""
    at = list(range(every, steps + 1, every))
    run_json(
        folder,
        plan={"replicate": world // 8 or 1, "shard": min(world, 8)},
        recipe={"steps": steps, **recipe},
    )
    rows = metrics(at, seed=seed, more=more)
    broken = steps * 3 // 5
    for row in rows:
        if row["step"] > broken:
            row["time"] += 0.05 * steps * 0.1
        if broken - 3 * every <= row["step"] < broken and "gradient_norm" in row:
            row.update({"gradient_norm": None, "not_finite": {"gradient_norm": "inf"}})
    write(folder, "metrics.jsonl", rows)
    write(folder, "ranks.jsonl", ranks(at, world, seed=seed, slow=world - 5 if world > 5 else None))
    again = 0.1 * broken + 0.05 * steps * 0.1
    plan = {
        "plan": f"replicate={world // 8 or 1},shard={min(world, 8)},numerics=fast",
        "world_size": world,
    }
    saves = [
        event(
            0.1 * step + (again - 0.1 * broken) * (step > broken),
            "checkpoint-saved",
            step,
            checkpoint=f"step-{step:08}",
            seconds=1.2,
        )
        for step in at[4::5]
    ]
    events = [
        event(0, "run-started", 0, **plan), *saves,
        event(0.1 * broken, "run-failed", broken,
        error="PeerDied: an exchange failed on rank 0 of 16, for rank 11: its process ended"),
        event(0.1 * broken + 0.2, "rescued", broken, checkpoint=f"step-{broken:08}-17c3cba3"),
        event(again, "run-started", 0, **plan),
        event(again, "restarted", 0, reason="rank 11 was killed by SIGKILL", restarts=1),
        event(again + 0.1, "resumed", broken, checkpoint=f"step-{broken:08}-17c3cba3"),
        event(again + 0.01 * steps, "straggler", broken + steps // 10, rank=11, part="compute",
        text="rank 11 computes longer"),
        event(again + 0.02 * steps, "something-new", broken + steps // 5, of="a later version"),
        event(again + 0.04 * steps, "run-ended", steps),
    ]  # fmt: skip
    write(folder, "events.jsonl", sorted(events, key=lambda each: each["time"]))
    result = {
        "steps": steps,
        "loss": 1.43,
        "metrics": {"loss": 1.51},
        "fingerprint": f"{seed:064x}",
        "run_dir": str(folder),
    }
    (folder / "result.json").write_text(
        json.dumps({**result, "plan": plan["plan"], "world_size": world}), encoding="utf-8"
    )
