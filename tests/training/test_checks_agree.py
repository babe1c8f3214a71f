"""Checks before the first step whose outcome depends on a rank's own samples: all ranks raise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.testing.pool import WorkerPool

WORDS, WIDTH, TOKENS, CHUNKS = 12, 8, 16, 4
CASES = {
    "a branch on the first word": ("shard=2,numerics=bitwise", "RecipeError"),
    "a branch in evaluation": ("context=2", "RecipeError"),
    "an error": ("shard=2", "IndexError"),
}


class Reader(nn.Module):
    """Computes something else for texts of one kind."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.double()

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text)
        for block in self.blocks:
            x = torch.tanh(block(x))
            if self.case == "an error" and text[0, 0] == 0:
                raise IndexError("a text that begins with 0")
        if self.case == "a branch on the first word" and text[0, 0] > 0:
            x = 2 * x
        if self.case == "a branch in evaluation" and not self.training:
            x = x - x.mean(1, keepdim=True)
        return self.head(x)  # type: ignore[no-any-return]


def texts() -> TensorDataset:
    """A text that begins with 0, and one that does not: one for each rank. Later chunks do."""
    text = (torch.arange(2 * TOKENS).view(2, TOKENS) ** 2) % WORDS
    text[:, :: TOKENS // CHUNKS] = 0
    text[1, 0] = 1
    return TensorDataset(text)


def recipe(case: str) -> ls.Recipe:
    def loss(output: Tensor, batch: Sequence[Tensor]) -> ls.Sum:
        return ls.Sum(F.cross_entropy(output.flatten(0, 1), batch[0].flatten(), reduction="sum"))

    return ls.Recipe(
        model=lambda: Reader(case),
        data=texts(),
        inputs=lambda batch: batch[0],
        loss=loss,
        weight=lambda batch: batch[0].numel(),
        sequence=None if case == "an error" else ls.Sequence(chunks=CHUNKS),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        evaluation=ls.Evaluation(data=texts(), every=1),
        global_batch=2,
        microbatch=1,
        steps=2,
        blocks=["blocks.*"],
    )


def errors(run_dir: str) -> list[tuple[str, str, list[str]]]:
    found = []
    for case, (plan, _) in CASES.items():
        try:
            ls.train(recipe(case), run_dir=f"{run_dir}/{case}", plan=plan)
            found.append(("", "", [""]))
        except Exception as error:
            found.append((type(error).__name__, str(error), getattr(error, "__notes__", [])))
    return found


def test_a_check_that_fails_on_one_rank_raises_on_all(pool: WorkerPool, tmp_path: Path) -> None:
    both = pool.run(2, errors, str(tmp_path / "2"))
    for (_, kind), one, other in zip(CASES.values(), *both, strict=True):
        if kind == "RecipeError":
            assert one[:2] == other[:2]
            assert one[0] == kind
            assert "computes a value of several tokens" in one[1] or "computes other rows" in one[1]
        else:
            failed, waited = (one, other) if one[0] == kind else (other, one)
            assert failed[:2] == (kind, "a text that begins with 0")
            cause = f"failed first: {kind}: {failed[1]}"
            assert any(cause in note for note in waited[2]), waited


def test_an_evaluation_is_checked_though_the_loss_check_met_its_error(tmp_path: Path) -> None:
    described = recipe("a branch in evaluation")
    with pytest.raises(ls.errors.RecipeError, match="a value of several tokens"):
        ls.train(described, run_dir=str(tmp_path), plan="numerics=bitwise")
