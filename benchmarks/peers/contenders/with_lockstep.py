"""`ls.train` with its defaults: run directory, metrics, saving, a check of every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton import Baton
from torch import Tensor
from workloads import CLIP_NORM, SEED, Workload

import lockstep as ls


class AfterStep(ls.Hook):
    def __init__(self, baton: Baton) -> None:
        self.baton = baton

    def after_step(self, run: Any) -> None:
        self.baton.step()


def recipe_of(work: Workload, saw: Callable[[Tensor], Tensor]) -> ls.Recipe:
    """Return the recipe. `saw`: called with each microbatch's loss; returns it."""
    return ls.Recipe(
        model=work.build,
        weights=work.values,
        data=work.data,
        inputs=work.inputs,
        loss=lambda output, batch: saw(work.loss(output, batch)),
        optimizer=work.optimizer,
        global_batch=work.size.batch,
        microbatch=work.microbatch if work.size.microbatches > 1 else None,
        steps=work.task.steps,
        clip_norm=CLIP_NORM,
        seed=SEED,
    )


def train(work: Workload, baton: Baton) -> None:
    ls.train(
        recipe_of(work, baton.saw),
        plan=f"workers={work.workers}",
        run_dir=f"{work.task.scratch}/run",
        hooks=[AfterStep(baton)],
    )
