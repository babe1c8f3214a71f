"""Runs on processes that run out of memory, or say so in a forward. At module level, so that
workers can be told their names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from training.kept import recipe

import lockstep as ls

ENOUGH: dict[str, Callable[[Any, int], bool]] = {
    "with checkpointing": lambda plan, rows: plan.checkpointing == "full",
    "with 2 samples": lambda plan, rows: plan.checkpointing == "full" and rows <= 2,
    "never": lambda plan, rows: False,
}
"""When memory is enough, by plan and samples of a microbatch."""


class Scarce(ls.Hook):
    """Has the last rank run out of memory in the forward of step `at`, unless there is enough. It
    leaves a file each time."""

    def __init__(self, at: int, enough: str, folder: Path) -> None:
        self.at = at
        self.enough = ENOUGH[enough]
        self.folder = folder

    def on_start(self, run: Any) -> None:
        for module in run.model.modules():
            if type(module).__name__.endswith("Block"):  # FSDP2 puts its own name before
                module.register_forward_pre_hook(lambda _, arguments: self.look(run, arguments[0]))

    def look(self, run: Any, hidden: torch.Tensor) -> None:
        mine = run.context.world.rank == run.context.world.size - 1 and torch.is_grad_enabled()
        if mine and run.step == self.at and not self.enough(run.context.plan, len(hidden)):
            (self.folder / f"fired-{len(list(self.folder.glob('fired-*')))}").touch()
            raise torch.OutOfMemoryError("injected: tried to allocate 2.00 GiB")


def run(
    plan: str, run_dir: str, at: int, enough: str, setting: str, given: Mapping[str, Any]
) -> tuple[str, Any]:
    """Train. Returns how it ended: "ended" and the fingerprint and plan, or an error's class and
    notes."""
    os.environ["LOCKSTEP_OUT_OF_MEMORY"] = setting
    try:
        hooks = [Scarce(at, enough, Path(run_dir).parent)]
        result = ls.train(recipe(**given), plan=plan, run_dir=run_dir, hooks=hooks, log_every=1)
    except Exception as error:
        return type(error).__name__, getattr(error, "__notes__", [])
    finally:
        del os.environ["LOCKSTEP_OUT_OF_MEMORY"]
    return "ended", [result.fingerprint, result.plan]
