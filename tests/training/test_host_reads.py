"""Numbers of some of the tokens: refused on all ranks before the step is applied, if the ranks read
different ones; counts only if the model computes something else by them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import run_files
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.base.errors import LossError, RecipeError
from lockstep.testing.pool import WorkerPool

WORDS, WIDTH, TOKENS, RARE = 12, 8, 16, 11
COUNTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "any": lambda x, text: 2 * x if (text == RARE).any() else x,
    "hidden": lambda x, text: 2 * x if (x > 110).any() else x,
    "list": lambda x, text: 2 * x if max(text.flatten().tolist()) == RARE else x,
    "shape": lambda x, text: x * (1 + text[text == RARE].shape[0]),
}
"""Ways to compute something else by a count of some of the tokens; for all ways of counting see
tests/model/context/test_count_reads.py."""


class Reader(nn.Module):
    """Reads the number of rare words in some way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        with torch.no_grad():
            self.words.weight[RARE, 0] = 100.0
        self.last: list[Tensor] = []
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.double()

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text)
        heads = x[:, None]
        x = x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0]
        if self.way == "branch" and text.amax() == RARE:
            x = 2 * x
        if self.way == "number":
            x = x * (1 + (text.amax() == RARE).long().item())
        if self.way == "log":
            self.last = [x.detach().norm()]
        if self.way in COUNTS:
            x = COUNTS[self.way](x, text)
        if self.way == "each token":
            x = torch.where((text == RARE)[..., None], 2 * x, x)
        if self.way == "experts":
            for choice, expert in zip((text == RARE, text != RARE), self.experts, strict=True):
                if choice.any():
                    x = x.masked_scatter(choice[..., None], expert(x[choice]))
        return self.head(x)  # type: ignore[no-any-return]


def texts(*, rare: bool) -> TensorDataset:
    """Texts; with `rare`, one has a rare word in its second quarter."""
    text = torch.randint(RARE, (24, TOKENS), generator=torch.Generator().manual_seed(2))
    if rare:
        text[7, TOKENS // 4 + 1] = RARE
    return TensorDataset(text)


def recipe(way: str, *, in_loss: str = "", in_evaluation: bool = False) -> ls.Recipe:
    def loss(output: Tensor, batch: Sequence[Tensor]) -> ls.Sum:
        entropy = F.cross_entropy(output.flatten(0, 1), batch[0].flatten(), reduction="sum")
        rare = batch[0] == RARE
        if in_loss == "number" and batch[0].amax() == RARE:
            entropy = 2 * entropy
        if in_loss == "any" and rare.any():
            entropy = 2 * entropy
        if in_loss == "sum":
            entropy = entropy * (1 + int(rare.sum()))
        if in_loss == "rows" and rare.any():
            entropy = entropy + output[rare].square().sum()
        return ls.Sum(entropy)

    evaluation = ls.Evaluation(data=texts(rare=True), every=2) if in_evaluation else None
    return ls.Recipe(
        model=lambda: Reader(way),
        data=texts(rare=not in_evaluation),
        inputs=lambda batch: batch[0],
        loss=loss,
        weight=lambda batch: batch[0].numel(),
        sequence=ls.Sequence(chunks=4),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        evaluation=evaluation,
        global_batch=4,
        microbatch=2,
        steps=3,
        blocks=["experts.*"],
        stages=None,
    )


CASES: dict[str, dict[str, Any]] = {
    "branch": {"way": "branch"},
    "number": {"way": "number"},
    "loss": {"way": "", "in_loss": "number"},
    "evaluation": {"way": "branch", "in_evaluation": True},
}
REMEDIES = {way: {"way": way} for way in ("experts", "each token", "log")}
OF_COUNTS = {way: {"way": way} for way in COUNTS} | {
    "evaluated": {"way": "any", "in_evaluation": True}
}
ALL = CASES | REMEDIES | OF_COUNTS
ALONE = {
    "replicate=1": ("branch", *REMEDIES),
    "replicate=1,numerics=bitwise": (*CASES, *REMEDIES),
}
PLANS = {
    "context=2": tuple(ALL),
    "context=2,transport=torch": ("branch", "each token"),
    "context=2,numerics=bitwise": ("branch", "loss", "experts", "log", "any", "shape", "evaluated"),
    "replicate=2,numerics=bitwise": ("branch", "evaluation", "experts"),
    "shard=2,numerics=bitwise": ("branch", "experts"),
}
"""Plan -> names of `ALL`."""


def train(run_dir: str, plans: dict[str, Sequence[str]]) -> list[tuple[str, str, float | str]]:
    """Return (plan, case, the error or the last loss)."""
    found: list[tuple[str, str, float | str]] = []
    for plan, name in [(plan, name) for plan, names in plans.items() for name in names]:
        options = {"plan": plan, "run_dir": f"{run_dir}/{plan}/{name}", "log_every": 1}
        try:
            found.append((plan, name, ls.train(recipe(**ALL[name]), **options).loss))
        except RecipeError as error:
            found.append((plan, name, str(error)))
    return found


@pytest.mark.timeout(300)
def test_ranks_that_would_decide_differently_refuse_it(pool: WorkerPool, tmp_path: Path) -> None:
    (one,) = pool.run(1, train, str(tmp_path / "1"), ALONE, timeout_seconds=100)
    first, second = pool.run(2, train, str(tmp_path / "2"), PLANS, timeout_seconds=200)
    assert first == second, "on all ranks"
    losses = {(plan, name): found for plan, name, found in one}
    assert isinstance(losses["replicate=1", "branch"], float), "one process decides by all tokens"
    for plan, name, found in [*first, *one]:
        bits = ",numerics=bitwise" if "bitwise" in plan else ""
        if name in REMEDIES:
            assert found == pytest.approx(losses[f"replicate=1{bits}", name], rel=1e-12)
        elif plan != "replicate=1":
            assert isinstance(found, str), (plan, name)
            where = "chunk" if bits else "rank"
            assert re.search(rf"test_host_reads.py, line \d+, gives .* on {where} \d", found)
            assert ("a count, or an array," in found) == (name not in CASES)
            folder = tmp_path / ("1" if (plan, name, found) in one else "2") / plan / name
            rows = run_files.metrics(folder)
            assert rows, (plan, name, "the check before the first step does not see it")
            assert not (folder / "model.safetensors").exists()


def train_with_count(run_dir: str, plan: str, way: str) -> float:
    return ls.train(recipe("", in_loss=way), run_dir=run_dir, plan=plan, log_every=1).loss


@pytest.mark.parametrize("plan", ["context=2", "context=2,numerics=bitwise"])
def test_a_count_in_a_loss_may_only_leave_out_what_has_no_token(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    for way in ("any", "sum"):
        with pytest.raises(LossError, match=r"^the loss is not a sum over tokens: of 15"):
            pool.run(2, train_with_count, str(tmp_path / way), plan, way)
        rows = run_files.metrics(tmp_path / way)
        assert rows, (plan, way, "the check before the first step does not see it")
    alone = train_with_count(str(tmp_path / "one"), "replicate=1", "rows")
    several = pool.run(2, train_with_count, str(tmp_path / "rows"), plan, "rows")
    assert several == [pytest.approx(alone, rel=1e-12)] * 2
