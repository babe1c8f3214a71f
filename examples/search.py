"""Search the learning rate, width and dropout of the classifier of digits.py.

lockstep search --metric accuracy --mode max --trials 40 --pruner asha examples/search.py
lockstep run --set lr=0.01 --set width=128 examples/search.py

Alone, it trains with the defaults.
"""

from __future__ import annotations

import argparse

import torch
from digits import accuracy, read_digits
from torch import nn
from torch.nn import functional as F

import lockstep as ls


def build_model(width: int, dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 10))


def main(argv: list[str] | None = None) -> ls.Result:
    parser = argparse.ArgumentParser(
        description="The classifier of digits.py, with parameters that lockstep search chooses."
    )
    parser.add_argument(
        "--steps", type=int, default=600, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--every",
        type=int,
        default=20,
        help="steps from one evaluation to the next (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--global-batch",
        type=int,
        default=64,
        help="digits per step, over all processes (default: %(default)s)",
    )
    parser.add_argument(
        "--microbatch",
        type=int,
        default=32,
        help="digits in one forward and backward (default: %(default)s)",
    )
    options = parser.parse_args(argv)

    lr = ls.param("lr", 1e-3, low=1e-5, high=1e-1, log=True)
    width = ls.param("width", 64, choices=[16, 32, 64, 128, 256])
    dropout = ls.param("dropout", 0.2, low=0.0, high=0.6, step=0.2)
    training, held_out = read_digits()
    recipe = ls.Recipe(
        model=lambda: build_model(width, dropout),
        data=training,
        inputs=lambda batch: batch[0],
        loss=lambda logits, batch: F.cross_entropy(logits, batch[1]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        global_batch=options.global_batch,
        microbatch=options.microbatch,
        steps=options.steps,
        seed=options.seed,
        evaluation=ls.Evaluation(
            data=held_out,
            every=options.every,
            metrics={"accuracy": ls.Mean(accuracy)},
            microbatch=len(held_out),
        ),
    )
    result = ls.train(recipe)
    if result.rank == 0:
        print(
            f"accuracy {result.metrics['accuracy']:.4f} with lr={lr:g}, width={width},"
            f" dropout={dropout:g}"
        )
    return result


if __name__ == "__main__":
    main()
