"""Train on one process, with checkpoints; then use all that must work, or be refused in words, on
every system. Prints JSON. Arguments: a folder, and perhaps --without-workers."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.base.errors import UserError

LINUX_PARTS = ("lockstep.doctor", "lockstep.testing", "lockstep.launch.worker")
COMMANDS = ("run", "verify", "audit", "evaluate", "report", "doctor", "inspect", "export", "slurm")


def data() -> TensorDataset:
    x = torch.linspace(-1, 1, 64).view(64, 1)
    return TensorDataset(x, x.square())


def inputs(batch: tuple[Tensor, Tensor]) -> Tensor:
    return batch[0]


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(output, batch[1])


def recipe(steps: int, **more: Any) -> ls.Recipe:
    return ls.Recipe(
        model=lambda: nn.Sequential(nn.Linear(1, 16), nn.GELU(), nn.Linear(16, 1)),
        data=data(),
        inputs=inputs,
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        global_batch=16,
        microbatch=8,
        steps=steps,
        evaluation=ls.Evaluation(data=data()),
        **more,
    )


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def trained(folder: Path) -> dict[str, Any]:
    saving = ls.Saving(every=4)
    first = ls.train(recipe(8), run_dir=str(folder / "a"), saving=saving)
    longer = ls.train(recipe(12), run_dir=str(folder / "a"), saving=saving, allow_change=["steps"])
    whole = ls.train(recipe(12), run_dir=str(folder / "b"), saving=saving)
    events = [
        json.loads(line)["event"]
        for line in (folder / "a" / "events.jsonl").read_text().splitlines()
    ]
    return {
        "first": first.fingerprint,
        "longer": longer.fingerprint,
        "whole": whole.fingerprint,
        "events": events,
    }


def with_workers(folder: Path) -> dict[str, Any]:
    collate = torch.utils.data.default_collate
    same = ls.train(recipe(12), run_dir=str(folder / "c"), plan="workers=1")
    refused = error_of(
        lambda: ls.train(
            recipe(2, collate=lambda rows: collate(rows)),
            run_dir=str(folder / "d"),
            plan="workers=1",
        )
    )
    return {"workers": same.fingerprint, "lambda": refused}


def commands(folder: Path) -> dict[str, Any]:
    from click.testing import CliRunner

    from lockstep.cli.main import _commands

    def status(*arguments: str) -> int:
        return CliRunner().invoke(_commands, [*arguments]).exit_code

    def refusal(*arguments: str) -> str:
        return error_of(
            lambda: CliRunner().invoke(
                _commands, [*arguments], catch_exceptions=False, standalone_mode=False
            )
        )

    run_dir = str(folder / "a")
    return {
        "helps": [status(name, "--help") for name in COMMANDS],
        "inspect": status("inspect", run_dir),
        "report": status("report", run_dir),
        "export": status("export", run_dir, str(folder / "model.safetensors")),
        "run": refusal("run", __file__) if sys.platform == "win32" else "",
        "verify": (
            refusal("verify", __file__, "--plans", "replicate=2") if sys.platform == "win32" else ""
        ),
        "audit": refusal("audit", __file__) if sys.platform == "win32" else "",
        "doctor": refusal("doctor") if sys.platform != "linux" else "",
    }


def several_processes() -> dict[str, str]:
    os.environ.update(
        RANK="0",
        WORLD_SIZE="2",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )
    joined = error_of(lambda: ls.train(recipe(2)))
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        del os.environ[name]
    return {"torchrun": joined, "spawn": error_of(lambda: ls.spawn(data, nproc=2))}


def imported() -> list[str]:
    names = [module.name for module in pkgutil.walk_packages(ls.__path__, "lockstep.")]
    portable = [
        name for name in names if not name.endswith("__main__") and not name.startswith(LINUX_PARTS)
    ]
    for name in portable:
        importlib.import_module(name)
    return portable


def main(folder: Path) -> None:
    found: dict[str, Any] = {"platform": sys.platform, **trained(folder), **commands(folder)}
    if "--without-workers" not in sys.argv:
        found |= with_workers(folder)
    if sys.platform == "win32":
        found |= several_processes()
    print(json.dumps({**found, "imported": len(imported())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
