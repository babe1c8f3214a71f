"""The axes `expert` and `tensor` together under `ls.train`: layers are sharded over the ranks of
`tensor`, and experts are whole on each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model.expert.models import StackedExperts
from torch import Tensor, nn
from torch.nn import functional as F
from training.subjects import Fails, LastState, Trained, each_of, off
from training.test_expert_axis import EXPERTS, WIDTH, Generator, recipe

import lockstep as ls
from lockstep.base.errors import DataError
from lockstep.testing.pool import WorkerPool

LAYERS = {
    "*.query": "colwise",
    "*.key": "colwise",
    "*.value": "colwise",
    "*.out": "rowwise",
    "*.up": "colwise",
    "*.down": "rowwise",
}
ON_SEQUENCE = {
    **LAYERS,
    "*.norms.*": "sequence",
    "*.out": "rowwise_sequence",
    "*.down": "rowwise_sequence",
}
SAVING = ls.Saving(every=2)
CASES = {
    1: [("replicate=1", "sequence")],
    2: [("tensor=2", "sequence")],
    4: [("expert=2,tensor=2,checkpointing=full", "sequence")],
}
"""Number of processes -> plans, and names of recipes."""


class Block(nn.Module):
    """Attention, a mixture of experts, and an expert for all tokens beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = StackedExperts(EXPERTS)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        heads = (
            layer(normed).unflatten(-1, (-1, WIDTH // 2)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        tokens = normed.flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(2)
        mixed = self.experts(tokens, index, weights).view_as(x)
        return x + self.dropout(mixed + self.down(F.gelu(self.up(normed))))  # type: ignore[no-any-return]


class Model(Generator):
    def __init__(self) -> None:
        super().__init__(Block)


RECIPES: dict[str, dict[str, Any]] = {
    "layers": {"tensor": LAYERS},
    "sequence": {
        "tensor": ON_SEQUENCE,
        "balance": ls.Balance(coefficient=0.1, over="step", z=0.01),
    },
}


def train(run_dir: str, plan: str, name: str, steps: int = 2) -> Trained:
    """Return the model, the last loss and the metrics."""
    last = LastState()
    given = recipe(model=Model, sequence=None, steps=steps, **RECIPES[name])
    result = ls.train(given, plan=plan, run_dir=run_dir, hooks=[last], log_every=1)
    whole = [each.details["modules"] for each in result.events if each.name == "experts-whole"]
    assert whole == ([["blocks.0.experts", "blocks.1.experts"]] if "tensor" in plan else [])
    return last.state, [result.loss, *result.metrics.values()]


def train_each(folder: str, size: int) -> dict[tuple[str, str], Trained]:
    found = each_of(train, folder, CASES[size], may_refuse=False)
    return dict(zip(CASES[size], found, strict=True))


@pytest.fixture(scope="module")
def alone(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    (found,) = pool.run(1, train_each, str(tmp_path_factory.mktemp("alone")), 1)
    return {name: trained for (_, name), trained in found.items()}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [2, 4])
def test_experts_stay_whole_on_the_ranks_that_share_out_layers(
    pool: WorkerPool, tmp_path: Path, alone: dict[str, Trained], size: int
) -> None:
    for rank in pool.run(size, train_each, str(tmp_path), size, timeout_seconds=110):
        for (plan, name), found in rank.items():
            assert off(found, alone[name]) < 1e-12, (plan, name)


def begin(run_dir: str, plan: str) -> str:
    """Train until it fails after a checkpoint."""
    given = recipe(model=Model, sequence=None, tensor=LAYERS)
    try:
        return ls.train(given, plan=plan, run_dir=run_dir, hooks=[Fails()], saving=SAVING).plan
    except DataError as error:
        return str(error)


def test_a_run_goes_on_without_the_axes(pool: WorkerPool, tmp_path: Path) -> None:
    """After two steps with both axes."""
    said = pool.run(4, begin, str(tmp_path / "both"), "expert=2,tensor=2")
    assert set(said) == {"a step too far"}
    resumed, whole = (
        pool.run(1, train, str(tmp_path / folder), "replicate=1", "layers", 3)[0]
        for folder in ("both", "alone")
    )
    assert off(resumed, whole) < 1e-12
