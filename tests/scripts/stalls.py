"""A training that hangs in its fourth step: `stalls.py KIND RANK RUN_DIR`.

The line on which it hangs is marked `# KIND`.
"""

import ctypes
import math
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import lockstep as ls
from lockstep.options import WatchdogTimeouts

STEP = 3
KIND, WHERE, RUN_DIR = sys.argv[1], int(sys.argv[2]), sys.argv[3]
done = 0


def is_me() -> bool:
    return int(os.environ.get("RANK", "0")) == WHERE


def limit_seconds(self, phase, usual_seconds):
    """As given from the third step on: on a busy machine, what comes before may take longer."""
    return _limit_seconds(self, phase, usual_seconds) if done >= STEP - 1 else math.inf


_limit_seconds, WatchdogTimeouts.limit_seconds = WatchdogTimeouts.limit_seconds, limit_seconds


class Samples(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.given = 0

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> torch.Tensor:
        self.given += 1
        if KIND == "data" and is_me() and self.given > 32 * STEP:
            time.sleep(1000)  # data
        return torch.full((8,), index / 512)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    if is_me() and done == STEP:
        if KIND == "loop":
            while True:  # loop
                pass
        if KIND == "computes":
            torch.linalg.svd(torch.rand(4000, 4000))  # computes
        if KIND == "sleeps":
            time.sleep(1000)  # sleeps
        if KIND == "lock":
            ctypes.PyDLL(None).sleep(1000)  # lock
    return output.square().mean() + batch.mean()


class Between(ls.Hook):
    def after_step(self, run) -> None:
        global done
        done = run.step
        if done != STEP:
            return
        if KIND == "stopped" and is_me():
            os.kill(os.getpid(), signal.SIGSTOP)
        if KIND == "alone" and is_me():
            dist.all_reduce(torch.ones(3))  # alone
        if KIND == "another":
            if is_me():
                dist.all_reduce(torch.ones(3))  # another
            else:
                dist.broadcast(torch.ones(3), 0)
        if KIND == "swallowed":
            try:
                if is_me():
                    raise ValueError("odd")
                dist.all_reduce(torch.ones(3))  # swallowed
            except ValueError:
                pass
        if KIND == "receives" and is_me():
            dist.recv(torch.ones(3), (WHERE + 1) % dist.get_world_size())  # receives


recipe = ls.Recipe(
    model=model,
    data=Samples(),
    inputs=lambda batch: batch,
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters()),
    global_batch=64,
    microbatch=8,
    steps=20,
)
if __name__ == "__main__":
    ls.train(recipe, hooks=[Between()], run_dir=RUN_DIR)
