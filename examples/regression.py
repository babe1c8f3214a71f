"""The smallest training: fit a linear model to points near a line.

lockstep run --nproc 2 examples/regression.py
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls


def main(argv: list[str] | None = None) -> ls.Result:
    parser = argparse.ArgumentParser(description="Fit a linear model to 2048 points near a line.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--global-batch", type=int, default=64, help="samples per step, over all processes"
    )
    parser.add_argument(
        "--microbatch", type=int, default=8, help="samples in one forward and backward"
    )
    options = parser.parse_args(argv)

    generator = torch.Generator().manual_seed(options.seed)
    x = torch.randn(2048, 20, generator=generator)
    slope = torch.randn(20, 1, generator=generator)
    y = x @ slope + 0.1 * torch.randn(2048, 1, generator=generator)

    recipe = ls.Recipe(
        model=lambda: nn.Linear(20, 1),
        data=TensorDataset(x, y),
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        global_batch=options.global_batch,
        microbatch=options.microbatch,
        steps=options.steps,
        seed=options.seed,
    )
    return ls.train(recipe)


if __name__ == "__main__":
    main()
