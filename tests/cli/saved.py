"""Runs that save themselves, for the tests of what looks at them. At module level, so that workers
can be told their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from training import subjects
from training.kept import STEPS, recipe
from training.subjects import Scores

import lockstep as ls


def ended(plan: str, run_dir: str, folder: str | None = None) -> None:
    """A run that has saved itself after its last step."""
    ls.train(recipe(), plan=plan, run_dir=run_dir, saving=ls.Saving(every=STEPS, folder=folder))


def scored(run_dir: str, values: Mapping[int, float]) -> ls.Result:
    """Five steps, evaluated and saved after steps 2 and 4 as they become better, and evaluated at
    the end."""
    given = subjects.recipe(steps=5, evaluation=ls.Evaluation(data=subjects.rows(8), every=2))
    return ls.train(
        given, run_dir=run_dir, hooks=[Scores(values)], saving=ls.Saving(best="place", last=5)
    )


class Noted:
    def state_dict(self) -> dict[str, Any]:
        return {"text": "kept"}

    def load_state_dict(self, state: Any) -> None:
        del state


def two(run_dir: str) -> list[str]:
    """Two models in one session, saved after one step. Returns their fingerprints."""
    with ls.Session(run_dir=run_dir, saving=ls.Saving(every=1)) as session:
        pairs = [session.prepare(lambda: nn.Linear(3, 2), sgd), session.prepare(normed, sgd)]
        session.include("notes", Noted())
        for step in session.steps(torch.randn(8, 3), global_batch=8, microbatch=4, steps=1):
            for model, optimizer in pairs:
                for batch in step.microbatches():
                    step.backward(model(batch).float().square().mean(), optimizer)
                step.commit(optimizer)
        return [ls.fingerprint(model) for model, _ in pairs]


def normed() -> nn.Module:
    """With buffers, of which two are the same, and a part in bfloat16."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model.register_parameter(
        "short", nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
    )
    model.register_buffer("one", torch.ones(2))
    model.register_buffer("other", model.one)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1
    )
