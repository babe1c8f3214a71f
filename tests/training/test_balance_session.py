"""The balance of experts in a loop of one's own, which learns what a recipe learns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from model.mixtures import Mixture
from training.subjects import momentum, state_of
from training.test_balance import BATCH, balance, entropy, inputs, recipe, texts, words

import lockstep as ls
from lockstep.base.errors import RecipeError
from lockstep.comm.mesh import full_tensor
from lockstep.testing.pool import WorkerPool

LOOPS = [
    *((over, False) for over in ("microbatch", "sample", "previous")),
    *((over, True) for over in ("step", "microbatch")),
]
"""Pairs: over, and True for `step.compute` instead of a loop over microbatches."""


def train_loops(
    folder: str, plan: str, loops: Sequence[tuple[Any, bool]]
) -> list[dict[str, torch.Tensor]]:
    """Return the last state of each loop. Of two ranks, one has a microbatch less; of four, one has
    none."""
    found = []
    for number, (over, computes) in enumerate(loops):
        with ls.Session(run_dir=f"{folder}/{number}", plan=plan) as session:
            model, optimizer = session.prepare(Mixture, momentum, balance=balance(over=over))
            for step in loop(session):
                if computes:
                    step.compute(inputs, entropy)
                else:
                    for batch in step.microbatches():
                        step.backward(entropy(model(batch[0]), batch))
                step.commit(optimizer)
            found.append(state_of(model))
    return found


def loop(session: ls.Session, **changes: Any) -> Any:
    sizes = {"global_batch": BATCH, "microbatch": 3, "steps": 3, **changes}
    return session.steps(texts(), weight=words, **sizes)


def train_recipes(folder: str) -> list[dict[str, torch.Tensor]]:
    found = []
    for over in ("microbatch", "sample", "previous", "step"):
        given = recipe(balance=balance(over=over), microbatch=3, steps=3)
        ls.train(given, run_dir=f"{folder}/{over}", hooks=[last := Last()])
        found.append(last.state)
    return found


class Last(ls.Hook):
    def on_finish(self, run: Any) -> None:
        self.state = {name: full_tensor(each) for name, each in state_of(run.model).items()}


def test_a_loop_learns_what_a_recipe_learns(pool: WorkerPool, tmp_path: Path) -> None:
    (of_over,) = pool.run(1, train_recipes, str(tmp_path / "recipe"))
    expected = [of_over[place] for place in (0, 1, 2, 3, 0)]
    for size, loops in {1: slice(5), 2: slice(5), 4: slice(2, 4)}.items():
        folder = str(tmp_path / str(size))
        for rank in pool.run(size, train_loops, folder, f"replicate={size}", LOOPS[loops]):
            for found, right in zip(rank, expected[loops], strict=True):
                for name, each in right.items():
                    torch.testing.assert_close(found[name], each, rtol=1e-12, atol=1e-14)


def generate(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A model with a balance, and one without, whose loss has no term of it."""
    with ls.Session(run_dir=folder) as session:
        mixture, of_mixture = session.prepare(Mixture, momentum, balance=balance(over="microbatch"))
        other, of_other = session.prepare(Mixture, momentum)
        for step in loop(session, steps=1):
            for batch in step.microbatches():
                step.backward(entropy(other(mixture(batch[0]).argmax(-1)), batch), of_other)
            step.commit(of_other)
            for batch in step.microbatches():
                step.backward(entropy(mixture(batch[0]), batch), of_mixture)
            step.commit(of_mixture)
        return mixture.blocks[0].router.weight.grad, other.blocks[0].router.weight.grad


def test_another_model_of_the_session_has_no_balance(tmp_path: Path) -> None:
    of_mixture, of_other = generate(str(tmp_path / "run"))
    assert of_mixture.any()
    assert of_other.any()


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("without tokens; the tokens of a batch must be known", {"tokens": None}),
    ("step.microbatches with Balance(over='step')", {"over": "step"}),
]


def misused(folder: str, **changes: Any) -> None:
    with ls.Session(run_dir=folder) as session:
        session.prepare(Mixture, momentum, balance=balance(**changes))
        for step in loop(session):
            step.microbatches()


@pytest.mark.parametrize(("text", "changes"), REFUSED, ids=[text[:20] for text, _ in REFUSED])
def test_what_a_loop_cannot_balance_is_refused(
    tmp_path: Path, text: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(RecipeError, match=re.escape(text)):
        misused(str(tmp_path / "run"), **changes)


def test_a_second_balance_is_refused(tmp_path: Path) -> None:
    with ls.Session(run_dir=str(tmp_path / "run")) as session:
        session.prepare(Mixture, momentum, balance=balance(over="previous"))
        with pytest.raises(RecipeError, match=r"balance in a second session\.prepare"):
            session.prepare(Mixture, momentum, balance=balance(over="previous"))
        with pytest.raises(RecipeError, match=r"balance is 0.1 \(a float\)"):
            session.prepare(Mixture, momentum, balance=0.1)  # type: ignore[arg-type]
