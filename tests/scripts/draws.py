"""Prints what a process draws at module level, as a dataset might be made there."""

import json
import os
import random

import numpy as np
import torch

DRAWN = [
    random.random(),
    float(np.random.random()),
    float(torch.rand(())),
    list({"cat", "dog", "frog", "horse"}),
]


def drawn() -> None:
    line = json.dumps([int(os.environ["RANK"]), *DRAWN])
    os.write(1, f"{line}\n".encode())  # in one go, because two ranks write


if __name__ == "__main__":
    if "RANK" in os.environ:
        drawn()
    else:
        import lockstep as ls

        ls.spawn(drawn, nproc=2)
