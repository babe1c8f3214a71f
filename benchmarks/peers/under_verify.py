"""A workload as a script for `lockstep verify`: that what is timed trains the model that one
process does.

    lockstep verify benchmarks/peers/under_verify.py wide --plans replicate=2 replicate=4

Its data are in build/benchmarks/NAME, made by the first process that looks for them there.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "contenders")]

from with_lockstep import recipe_of  # noqa: E402
from workloads import SIZES, Task, load, prepare  # noqa: E402

import lockstep as ls  # noqa: E402

STEPS = 100


def prepared(workload: str) -> Task:
    folder = HERE.parents[1] / "build" / "benchmarks" / workload
    task = Task(
        workload, processes=1, steps=STEPS, folder=str(folder), scratch="", own_launcher=True
    )
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(dir=folder.parent)
        prepare(replace(task, folder=made))
        try:
            os.rename(made, folder)
        except OSError:  # another process was first
            shutil.rmtree(made)
            if not folder.exists():
                raise
    return task


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in SIZES:
        sys.exit(f"which workload? one of {', '.join(SIZES)}")
    ls.train(recipe_of(load(prepared(sys.argv[1])), saw=lambda loss: loss))
