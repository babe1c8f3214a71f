"""Runs that are asked to end and go on, for the tests of resuming. At module level, so that workers
can be told their names."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

import lockstep as ls
from lockstep.launch.termination import Preempted
from lockstep.training.state import state_of

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from models import MODELS

STEPS = 7
STOPPED_AT = 3
PLANS = {
    "replicate=1": 1,
    "replicate=2": 2,
    "replicate=3": 3,
    "shard=2": 2,
    "shard=3": 3,
    "tensor=2": 2,
    "pipeline=2": 2,
    "pipeline=2,schedule=interleaved": 2,
    "replicate=2,shard=2": 4,
    "shard=2,tensor=2": 4,
    "tensor=2,pipeline=2": 4,
    "shard=2,pipeline=2": 4,
}
"""And the processes that they need."""


def recipe(**changes: Any) -> ls.Recipe:
    """Seven steps of the GPT with dropout and tied embeddings, in epochs of five, the last one
    short."""
    given: dict[str, Any] = {
        **MODELS["gpt-dropout"],
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        "global_batch": 28,
        "microbatch": 4,
        "steps": STEPS,
        "clip_norm": 0.5,
        "schedule": ls.warmup_cosine(warmup=2, total=STEPS),
        "evaluation": ls.Evaluation(data=Subset(MODELS["gpt-dropout"]["data"], range(10)), every=2),
        **changes,
    }
    return ls.Recipe(**given)


class Asked(ls.Hook):
    """Sends a signal to the last rank after a step, and notes what the run is like then: it ends
    after the step after it."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.state = ""

    def after_step(self, run: Any) -> None:
        if self.at is not None and run.step >= self.at:
            self.state = of_all(run)
        if run.step == self.at and run.context.world.rank == run.context.world.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)


def of_all(run: Any) -> str:
    """The fingerprint of all that is saved of models and optimizers."""
    return ls.fingerprint(run.context.mesh.union(state_of(run.training.modules, {}).tensors))


def run(plan: str, run_dir: str, at: int | None, given: Mapping[str, Any]) -> tuple[str, str]:
    """Train; asked to end after `at` steps. Returns how it ended: a fingerprint, or "preempted" and
    the state's."""
    asked = Asked(at)
    average = ls.ExponentialMovingAverage(0.5)
    try:
        result = ls.train(
            recipe(**given), plan=plan, run_dir=run_dir, hooks=[asked, average], log_every=1
        )
    except Preempted:
        return "preempted", asked.state
    return "ended", result.fingerprint


def restored(plan: str, run_dir: str) -> str:
    """The state's fingerprint, as a session takes it up."""
    given = recipe()
    with ls.Session(plan=plan, run_dir=run_dir, resume="must", recipe=given.describe()) as session:
        session.run.training.stateful |= {
            "run": Anything(),
            "1-ExponentialMovingAverage": Anything(),
        }
        session.prepare(given.model, given.optimizer, stages=given.stages, tensor=given.tensor)
        steps = session.steps(
            given.data, global_batch=28, microbatch=4, steps=STEPS, weight=given.weight
        )
        state = of_all(session.run)
        del steps
    return state


class Anything:
    """Takes up what somebody else saved."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass
