"""Values that a loop of one's own carries in a variable from one step into the loss of a later
one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import run_files
import torch
from torch import nn
from training.subjects import each_of, rows, sgd

import lockstep as ls
from lockstep.testing.pool import WorkerPool


class Baseline:
    """A running value that is saved."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def trained(run_dir: str, kind: str, plan: str) -> list[Any]:
    """The names of the events, and the variables that they name."""
    own, mean, logged, cached = 0.0, 0.0, 0.0, None
    saved = Baseline()
    with ls.Session(run_dir=run_dir, plan=plan) as session:
        model, optimizer = session.prepare(lambda: nn.Linear(6, 3), sgd)
        session.include("saved", saved)
        for step in session.steps(rows(48), global_batch=8, microbatch=2, steps=5):
            losses = []
            if cached is None:
                cached = torch.ones(3)
            for _, x, y in step.microbatches():
                loss = ((model(x) * cached - y) ** 2).mean()
                losses.append(loss.item())
                used = {"own": own, "mean": mean, "saved": saved.value}.get(kind, 0.0)
                step.backward(loss * (1.0 + used))
            step.commit(optimizer)
            new = 0.1 * session.mean(torch.tensor(losses))
            if kind == "own":
                own = 0.9 * own + 0.1 * sum(losses)
            elif kind == "mean":
                mean = 0.9 * mean + new
            elif kind == "saved":
                saved.value = 0.9 * saved.value + new
            logged += sum(losses)
            step.log({"total": logged})
    told = run_files.events(Path(run_dir), "loss-keeps-state", "variables-not-saved")
    return [[each["event"], each.get("variables")] for each in told]


KINDS = ("own", "mean", "saved", "none")


def each(run_dir: str, plan: str) -> list[Any]:
    return each_of(trained, run_dir, [(kind, plan) for kind in KINDS])


LOST = "variables-not-saved"


def test_a_value_that_a_later_loss_uses_is_named(pool: WorkerPool, tmp_path: Path) -> None:
    assert each(str(tmp_path / "one"), "replicate=1") == [
        [[LOST, ["own"]]],
        [[LOST, ["mean"]]],
        [],
        [],
    ]
    fast = pool.run(2, each, str(tmp_path / "two"), "replicate=2")[0]
    assert fast == [[["loss-keeps-state", None]], [[LOST, ["mean"]]], [], []]
    refused, *others = pool.run(2, each, str(tmp_path / "bits"), "shard=2,numerics=bitwise")[0]
    assert others == fast[1:]
    assert refused.startswith("LossError: the loss uses own, which the loop carries from one step")
    assert "on rank 1: what is learned depends on the number of processes" in refused
