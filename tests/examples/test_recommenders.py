"""The optimizer on the page on recommenders, in place of sparse gradients."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch.optim import SparseAdam

import lockstep as ls
from lockstep.testing.pool import WorkerPool

PAGE = Path(__file__).parents[2] / "docs" / "recommenders.md"


def page() -> dict[str, Any]:
    """The names that the page's script defines."""
    script = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert script is not None
    names: dict[str, Any] = {"__name__": "recommender"}
    exec(script[1], names)
    return names


def test_it_moves_what_sparse_adam_moves() -> None:
    names = page()
    ours, theirs = names["TwoTowers"](), names["TwoTowers"]()
    theirs.load_state_dict(ours.state_dict())
    theirs.users.sparse = theirs.items.sparse = True
    before = ours.users.weight.detach().clone()
    optimizers = [
        (ours, names["LazyAdam"](ours.parameters())),
        (theirs, SparseAdam(theirs.parameters())),
    ]
    for rows in torch.arange(64).split(16):
        batch = names["ratings"][rows]
        for model, optimizer in optimizers:
            optimizer.zero_grad()
            names["recipe"].loss(model(batch[0], batch[1]), batch).backward()
            optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    moved = (ours.users.weight != before).any(dim=1).nonzero().flatten().tolist()
    assert moved == sorted(set(names["user"][:64].tolist()))


def fingerprint(plan: str, run_dir: str) -> str:
    return ls.train(page()["recipe"], plan=f"{plan},numerics=bitwise", run_dir=run_dir).fingerprint


def test_it_gives_the_same_bits_on_a_shard(tmp_path: Path, pool: WorkerPool) -> None:
    (one,) = pool.run(1, fingerprint, "replicate=1", str(tmp_path / "one"))
    assert pool.run(2, fingerprint, "shard=2", str(tmp_path / "two")) == [one] * 2
