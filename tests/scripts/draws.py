"""Prints what a process draws at module level, as a dataset might be made there."""

import json
import os
import random

import numpy as np
import torch

DRAWN = [random.random(), float(np.random.random()), float(torch.rand(())), list({"cat", "dog", "frog", "horse"})]


def drawn() -> None:
    print(json.dumps([int(os.environ["RANK"]), *DRAWN]), flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        drawn()
    else:
        import lockstep as ls

        ls.spawn(drawn, nproc=2)
