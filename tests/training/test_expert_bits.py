"""Experts on several ranks with bitwise numerics: one fingerprint at any number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from model.expert.models import Counted
from torch import Tensor, nn
from training.subjects import each_of
from training.test_expert_axis import Block, Generator, entropy, first, recipe

import lockstep as ls
from lockstep.testing.pool import WorkerPool

CASES = {
    1: [("replicate=1", "own"), ("replicate=1", "transformers")],
    2: [
        ("expert=2", "own"),
        ("expert=2,checkpointing=full", "own"),
        ("replicate=2", "own"),
        ("shard=2", "own"),
        ("expert=2", "transformers"),
    ],
    4: [("expert=4", "own"), ("replicate=2,expert=2", "own")],
}
"""Number of processes -> plans and models."""


class Unnamed(Block):
    """With experts that read their number from an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Counted()


def qwen() -> nn.Module:
    from model.expert.families import family

    return family("qwen3-moe")


def words(batch: Sequence[Tensor]) -> dict[str, Any]:
    return {"input_ids": batch[0]}


def entropy_of_logits(output: Any, batch: Sequence[Tensor]) -> ls.Sum:
    return entropy(output.logits, batch)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


MODELS: dict[str, dict[str, Any]] = {
    "own": {"model": lambda: Generator(Unnamed).float()},
    "transformers": {"model": qwen, "inputs": words, "loss": entropy_of_logits},
}


def fingerprint(folder: str, plan: str, model: str) -> tuple[str, str, list[Any]]:
    """The model, its fingerprint, and the modules that compute one expert after another."""
    small = {"evaluation": None, "sequence": None, "steps": 2, "optimizer": adamw, "inputs": first}
    made = ls.train(
        recipe(**(small | MODELS[model])), plan=f"{plan},numerics=bitwise", run_dir=folder
    )
    eager = [each.details["modules"] for each in made.events if each.name == "experts-eager"]
    return model, made.fingerprint, eager


def fingerprints(folder: str, size: int) -> list[Any]:
    return each_of(fingerprint, folder, CASES[size], may_refuse=False)


@pytest.mark.timeout(120)
def test_one_fingerprint(pool: WorkerPool, tmp_path: Path) -> None:
    found = [
        each
        for size in CASES
        for rank in pool.run(size, fingerprints, str(tmp_path / str(size)), size)
        for each in rank
    ]
    for model in MODELS:
        digests = {digest for name, digest, _ in found if name == model}
        assert len(digests) == 1, [each for each in found if each[0] == model]
    layers = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    for model, _, eager in found:
        assert eager == ([layers] if model == "transformers" else [])
