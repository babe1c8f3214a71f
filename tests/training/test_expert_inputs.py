"""Bad inputs of experts under `expert` with `shard` and `context`: each is computed as on one
process, or refused on all ranks by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.subjects import Trained, off
from training.test_expert_axis import (
    WIDTH,
    Block,
    Generator,
    astray,
    poisoned,
    recipe,
    texts_with_one_word,
    train,
)

import lockstep as ls
from lockstep.base.errors import RecipeError, UserError
from lockstep.testing.pool import WorkerPool

PLANS = ("shard=2,expert=2", "expert=2,context=2")


class ToOne(Block):
    """Sends all tokens to the experts 0 and 1, which are on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, self.router.out_features)
        with torch.no_grad():
            self.router.bias[:2] += torch.tensor([60.0, 60.5])


class Few(Block):
    """Sends few tokens to experts. Some microbatches have none, and so has some rank."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.qkv(self.norm(x))[..., :WIDTH]
        tokens = self.second_norm(x).flatten(0, 1)
        (sent,) = (tokens[:, 0] > 0.6).nonzero(as_tuple=True)
        weights, index = self.router(tokens[sent]).softmax(-1).topk(2)
        computed = self.experts(tokens[sent], index, weights)
        return x + torch.zeros_like(tokens).index_add(0, sent, computed).view_as(x)


class Dense(Block):
    """Has no experts."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts, self.router

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x)  # type: ignore[no-any-return]


class Odd(Block):
    """Has a number of experts that two ranks cannot share."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in list(self.experts.named_parameters()):
            setattr(self.experts, name, nn.Parameter(parameter[:7].detach()))


ONE_WORD = texts_with_one_word()
RIGHT: dict[str, dict[str, Any]] = {
    "all tokens to one rank": {"model": partial(Generator, ToOne)},
    "ranks without tokens": {"model": partial(Generator, Few)},
}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no experts": (
        {"model": partial(Generator, Dense)},
        "PlanError",
        "expert=2, but the model has no modules of experts",
    ),
    "not a multiple": (
        {"model": partial(Generator, Odd)},
        "PlanError",
        "blocks.0.experts has 7 experts; each rank must hold equally many",
    ),
    "NaN in the router": (
        {"model": poisoned, "data": ONE_WORD},
        "LossError",
        "a step needs a finite",
    ),
}


def train_each(folder: str, plan: str) -> dict[str, Trained | list[str]]:
    """Case -> the model, or the error."""
    found: dict[str, Trained | list[str]] = {}
    for case, changes in RIGHT.items():
        found[case] = train(f"{folder}/{plan}-{case}", plan, **changes)
    for case, (changes, _, _) in REFUSED.items() if plan in PLANS else ():
        try:
            ls.train(recipe(**changes, steps=2), plan=plan, run_dir=f"{folder}/{plan}-{case}")
        except UserError as error:
            found[case] = [type(error).__name__, str(error)]
    return found


@pytest.fixture(scope="module")
def alone(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    (found,) = pool.run(1, train_each, str(tmp_path_factory.mktemp("alone")), "replicate=1")
    return found


@pytest.mark.timeout(120)
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_bad_inputs_are_right_or_refused(
    pool: WorkerPool, tmp_path: Path, alone: Any, plan: str
) -> None:
    first, *others = pool.run(4, train_each, str(tmp_path), plan, timeout_seconds=110)
    for case in RIGHT:
        assert off(first[case], alone[case]) < 1e-12, case
    for case, (_, kind, text) in REFUSED.items():
        assert case in first, f"{case} was not refused"
        assert first[case][0] == kind, first[case]
        assert text in first[case][1], first[case]
        assert all(each[case] == first[case] for each in others), case


def train_astray(folder: str, plan: str) -> None:
    ls.train(recipe(model=astray, data=ONE_WORD, steps=2), plan=plan, run_dir=f"{folder}/run")


@pytest.mark.timeout(120)
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_an_index_out_of_range_ends_the_run_by_name(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    """The ranks that exchange tokens raise it; the others stop because of them."""
    with pytest.raises(RecipeError, match="was called with experts from 0 to 8 on rank"):
        pool.run(4, train_astray, str(tmp_path), plan, timeout_seconds=110)
