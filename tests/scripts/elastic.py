"""Trains 30 steps with numerics=bitwise: `elastic.py SECONDS [RANK STEP]`.

It sleeps SECONDS after each step, or until a file `go-on` is there. On the first start, RANK is
killed after STEP. In a job that Slurm has restarted it does not sleep.
"""

import os
import signal
import sys
import time

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.training.run import Run

seconds, *killed = sys.argv[1:]
is_requeued = "SLURM_RESTART_COUNT" in os.environ


class Killed(ls.Hook):
    def after_step(self, run: Run) -> None:
        until = time.monotonic() + (0.0 if is_requeued else float(seconds))
        while time.monotonic() < until and not os.path.exists("go-on"):
            time.sleep(0.02)
        print(
            f"{time.time():.3f} rank {run.context.world.rank} of {run.context.world.size} did"
            f" {run.step}",
            flush=True,
        )
        if [str(run.context.world.rank), str(run.step)] == killed and os.environ[
            "TORCHELASTIC_RESTART_COUNT"
        ] == "0":
            os.kill(os.getpid(), signal.SIGKILL)


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(output, batch[1])


torch.manual_seed(0)
recipe = ls.Recipe(
    model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1)),
    data=TensorDataset(torch.randn(97, 8), torch.randn(97, 1)),
    inputs=lambda batch: batch[0],
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    global_batch=12,
    microbatch=2,
    steps=30,
)
ls.train(recipe, plan="numerics=bitwise", hooks=[Killed()], saving=ls.Saving(every=5), log_every=1)
