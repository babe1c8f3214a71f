"""`step.skip`: a model that sits a step out stays as it is, with its optimizer and its schedule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training.subjects import network, rows, same, squared_error, state_of

import lockstep as ls
from lockstep.base.errors import LossError
from lockstep.testing.pool import WorkerPool

PLANS = {"replicate=2": 2, "replicate=3": 3, "shard=2": 2}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    held = [
        value.clone()
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    ]
    return {"model": state_of(model), "held": held, "rate": optimizer.param_groups[0]["lr"]}


def in_turns(
    run_dir: str,
    plan: str,
    steps: int = 6,
    skip_all_at: int | None = None,
    stop_at: int | None = None,
) -> tuple[str, bool, float]:
    """Train one model in each step, and another in every third. Returns the fingerprint of both,
    and whether the second stayed as it was in all other steps."""
    stayed, data = True, rows(48)
    with ls.Session(run_dir=run_dir, plan=f"{plan},numerics=bitwise", log_every=1) as session:
        first, first_adam = session.prepare(network, adam)
        second, second_adam = session.prepare(network, adam, schedule=decay)
        for step in session.steps(data, global_batch=16, microbatch=4, steps=steps):
            if step.index == stop_at:
                session.stop("enough")
            if step.index == skip_all_at:
                step.skip(first_adam)
                step.skip(second_adam)
                continue
            for batch in step.microbatches():
                step.backward(squared_error(first, batch), first_adam)
            step.commit(first_adam)
            before = state(second, second_adam)
            if step.index % 3:
                step.skip(second_adam)
                stayed &= same(state(second, second_adam), before)
                continue
            for batch in step.microbatches():
                step.backward(squared_error(second, batch), second_adam)
            step.commit(second_adam)
            assert not same(state(second, second_adam), before)
        done = session.steps_done
    return ls.fingerprint(state_of(first)) + ls.fingerprint(state_of(second)), stayed, done


@pytest.mark.parametrize("plan", PLANS)
def test_a_skipped_model_stays_and_the_fingerprint_is_that_of_one_process(
    pool: WorkerPool, tmp_path: Path, plan: str
) -> None:
    (alone,) = pool.run(1, in_turns, str(tmp_path / "alone"), "replicate=1")
    assert alone[1:] == (True, 6)
    assert pool.run(PLANS[plan], in_turns, str(tmp_path / "run"), plan) == [alone] * PLANS[plan]


def test_a_request_to_stop_takes_effect_in_a_step_that_all_models_skip(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for _, _, done in pool.run(2, in_turns, str(tmp_path / "run"), "replicate=2", 6, 2, 2):
        assert done == 3


def misuse(run_dir: str, how: str) -> None:
    with ls.Session(run_dir=run_dir) as session:
        model, optimizer = session.prepare(network, adam)
        for step in session.steps(rows(48), global_batch=16, microbatch=4, steps=2):
            if how == "after a backward":
                for batch in step.microbatches():
                    step.backward(squared_error(model, batch))
            elif how == "nothing":
                continue
            step.skip(optimizer)
            step.skip(optimizer)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "after a backward",
            "a skip after a backward; the gradient would be lost; commit it, or call skip before",
        ),
        ("twice", "a commit or skip after a skip of the same model; each model has one per step"),
        ("nothing", "or step.skip(optimizer) for one that is not to change"),
    ],
)
def test_a_wrong_skip_is_refused(tmp_path: Path, how: str, message: str) -> None:
    with pytest.raises(LossError, match=re.escape(message)):
        misuse(str(tmp_path / "run"), how)


def test_the_loss_is_that_of_the_latest_step_that_was_not_skipped(tmp_path: Path) -> None:
    with ls.Session(run_dir=str(tmp_path / "run"), log_every=1) as session:
        _, optimizer = session.prepare(network, adam)
        for step in session.steps(rows(48), global_batch=16, microbatch=4, steps=2):
            if step.index == 1:
                step.skip(optimizer)
                continue
            step.compute(None, squared_error)
            step.commit()
            loss = session.run.loss
        assert session.run.loss == loss
        assert session.run.training.results == {}
