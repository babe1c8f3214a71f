"""Classify scikit-learn's handwritten digits (8 x 8 pixels) with a small perceptron.

lockstep run --nproc 2 examples/digits.py

Its accuracy on held-out digits is at least 97%.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls

HELD_OUT_EVERY = 5


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return training and held-out digits: images of shape (64,) in 0..1, and labels. Every fifth
    digit is held out."""
    digits = load_digits()
    images = torch.from_numpy(digits.data).float() / 16
    labels = torch.from_numpy(digits.target)
    held_out = torch.arange(len(labels)) % HELD_OUT_EVERY == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(
        images[held_out], labels[held_out]
    )


def build_model(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(dropout), nn.Linear(256, 10))


def accuracy(logits: Tensor, batch: list[Tensor]) -> Tensor:
    """Return 1 for each correct digit and 0 for each wrong one; `ls.Mean` averages them over all
    samples."""
    return (logits.argmax(dim=1) == batch[1]).float()


def main(argv: list[str] | None = None) -> ls.Result:
    parser = argparse.ArgumentParser(
        description="Classify scikit-learn's handwritten digits with a small perceptron."
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--epochs",
        type=int,
        default=30,
        help="passes over the training digits (default: %(default)s)",
    )
    length.add_argument("--steps", type=int, help="optimizer steps, instead of --epochs")
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
        default=8,
        help="digits in one forward and backward (default: %(default)s)",
    )
    parser.add_argument(
        "--lr", type=float, default=3e-3, help="learning rate (default: %(default)s)"
    )
    parser.add_argument("--dropout", type=float, default=0.2, help="(default: %(default)s)")
    options = parser.parse_args(argv)

    training, held_out = read_digits()
    recipe = ls.Recipe(
        model=lambda: build_model(options.dropout),
        data=training,
        inputs=lambda batch: batch[0],
        loss=lambda logits, batch: F.cross_entropy(logits, batch[1]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=options.lr),
        global_batch=options.global_batch,
        microbatch=options.microbatch,
        steps=options.steps,
        epochs=None if options.steps is not None else options.epochs,
        seed=options.seed,
        evaluation=ls.Evaluation(
            data=held_out, every=100, metrics={"accuracy": ls.Mean(accuracy)}, microbatch=64
        ),
    )
    result = ls.train(recipe)
    if result.rank == 0:
        print(
            f"accuracy {result.metrics['accuracy']:.4f} on {len(held_out)} held-out digits;"
            f" fingerprint {result.fingerprint}"
        )
    return result


if __name__ == "__main__":
    main()
