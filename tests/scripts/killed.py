"""Trains with numerics=bitwise: `killed.py RECIPE STEPS [RANK STEP]`. RANK is killed after STEP,
once the checkpoint of the step before it is there.

Recipes: "gpt", with stages and layers that can be sharded; "experts"; "chunks", experts with
sequences.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from scripts.models import MODELS
from torch.utils.data import Subset
from training import test_expert_bits

import lockstep as ls
from lockstep.training.run import Run


class Killed(ls.Hook):
    def __init__(self, rank: str, step: str) -> None:
        self.rank, self.step = int(rank), int(step)

    def after_step(self, run: Run) -> None:
        if (run.context.world.rank, run.step) == (self.rank, self.step):
            saved = f"checkpoints/step-{self.step - 1:08}-*/manifest.json"
            while not list(run.dir.glob(saved)):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


def gpt(steps: int) -> ls.Recipe:
    given = MODELS["gpt-dropout"]
    return ls.Recipe(
        **given,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        global_batch=28,
        microbatch=3,
        steps=steps,
        clip_norm=0.5,
        evaluation=ls.Evaluation(data=Subset(given["data"], range(30)), every=3),
    )


def main() -> None:
    name, count, *killed = sys.argv[1:]
    steps = int(count)
    recipes = {
        "gpt": lambda: gpt(steps),
        "experts": lambda: test_expert_bits.small(steps=steps),
        "chunks": lambda: test_expert_bits.small(steps=steps, sequence=ls.Sequence(chunks=4)),
    }
    ls.train(
        recipes[name](),
        hooks=[Killed(*killed)] if killed else [],
        saving=ls.Saving(every=2),
        log_every=1,
    )


if __name__ == "__main__":
    main()
