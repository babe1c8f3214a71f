"""Models of transformers as they come, under the plans of the data and tensor axes: what one
process gives, to rounding."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache

import pytest
from tiers import tier

from lockstep.testing.pool import WorkerPool

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None,
        reason="transformers is not installed (pip install -e .[dev])",
    ),
    pytest.mark.timeout(300),  # on a busy machine, importing transformers alone takes half a minute
]

PLANS = {
    "replicate=2": 2,
    "shard=2": 2,
    "shard=2,logits=chunked": 2,
    "tensor=2": 2,
    "tensor=2,checkpointing=full": 2,
    "replicate=2,shard=2": 4,
    "shard=2,tensor=2": 4,
}
MORE_PLANS = {
    "replicate=2,checkpointing=full": 2,
    "shard=2,checkpointing=full": 2,
    "tensor=2,checkpointing=selective": 2,
    "replicate=2,tensor=2": 4,
    "shard=2,tensor=2,checkpointing=full": 4,
}
NAMES = (
    "gpt2 with dropout",
    "gpt2's own loss, of cut logits",
    "llama",
    "llama, tied, with cut logits",
)
Check = Callable[..., None]


@pytest.fixture(scope="module")
def check(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Check:
    from training.hugging_face import Found, train_all

    def run(names: tuple[str, ...], plan: str, ranks: int) -> list[list[Found]]:
        return pool.run(
            ranks, train_all, names, plan, str(tmp_path_factory.mktemp("runs")), timeout_seconds=200
        )

    alone = cache(lambda names: run(names, "replicate=1", 1)[0])

    def checked(names: tuple[str, ...], plan: str, ranks: int) -> None:
        for everything in run(names, plan, ranks):
            for name, (losses, state, events), (expected, truth, _) in zip(
                names, everything, alone(names), strict=True
            ):
                short = "bf16" in name
                assert losses == pytest.approx(expected, rel=2e-3 if short else 1e-6), name
                assert "model-built-whole" not in events
                for key, value in truth.items():
                    furthest = float((state[key] - value).abs().max())
                    assert furthest <= (2e-2 if short else 2e-6), f"{name}, {key}: {furthest}"

    return checked


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(plan, marks=pytest.mark.command if plan == "tensor=2" else tier(ranks, 1))
        for plan, ranks in PLANS.items()
    ],
)
def test_models_of_transformers_train_as_on_one_process(check: Check, plan: str) -> None:
    check(NAMES, plan, PLANS[plan])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plan", {**PLANS, **MORE_PLANS})
def test_all_models_of_transformers_train_as_on_one_process(check: Check, plan: str) -> None:
    from training.hugging_face import CASES

    check(tuple(CASES), plan, {**PLANS, **MORE_PLANS}[plan])
