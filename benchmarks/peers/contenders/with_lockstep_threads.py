"""The same with `data_parallel`: a thread for each core, which computes a microbatch of its own with one."""

from __future__ import annotations

import os

from baton import Baton
from with_lockstep import AfterStep, recipe_of
from workloads import Workload

import lockstep as ls


def train(work: Workload, baton: Baton) -> None:
    count = os.cpu_count() or 1
    baton.compute_at_once(count)
    plan = f"data_parallel={count},workers={work.workers}"
    ls.train(recipe_of(work, baton.saw), plan=plan, run_dir=f"{work.task.scratch}/run", hooks=[AfterStep(baton)])
