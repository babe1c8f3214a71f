"""BatchNorm's running statistics under `replicate`: those of one process that computes all microbatches in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training.subjects import recipe, rows, same, samples_at, sgd, squared_error, state_of

import lockstep as ls
from lockstep.errors import RecipeError
from lockstep.testing.pool import WorkerPool

SAMPLES, GLOBAL_BATCH, MICROBATCH, STEPS = 60, 22, 4, 4
"""Six microbatches a step, the last one short; a batch of the second epoch too."""


class Normed(nn.Module):
    """Ways to use a BatchNorm: with a momentum, without (a cumulative average), twice, recomputed, frozen, without statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.moving = nn.BatchNorm1d(5, momentum=0.3)
        self.cumulative = nn.BatchNorm1d(5, momentum=None)
        self.twice = nn.BatchNorm1d(5)
        self.recomputed = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh())
        self.frozen = nn.BatchNorm1d(5)
        self.bare = nn.BatchNorm1d(5, track_running_stats=False)
        self.last = nn.Linear(5, 3)

    def train(self, mode: bool = True) -> Normed:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.cumulative(torch.tanh(self.moving(self.first(x))))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x)) * 2 + 1))
        x = self.cumulative(x * 3 - 1)
        x = checkpoint(self.recomputed, x, use_reentrant=False)
        return self.last(self.frozen(self.bare(x)))


class Spectral(nn.Module):
    """Its forward changes a buffer that is not BatchNorm's."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.replaces = replaces
        self.register_buffer("calls_seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.replaces:
            self.calls_seen = self.calls_seen + 1
        else:
            self.calls_seen += 1
        return self.layer(x)


class States(ls.Hook):
    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def on_start(self, run: Any) -> None:
        self.states.append(state_of(run.model))

    on_step = on_start


def normed(**changes: Any) -> ls.Recipe:
    return recipe(
        model=Normed,
        data=rows(SAMPLES),
        optimizer=sgd,
        global_batch=GLOBAL_BATCH,
        microbatch=MICROBATCH,
        steps=STEPS,
        **{"evaluation": ls.Evaluation(data=rows(7), every=2), **changes},
    )


def train_normed(run_dir: str) -> list[dict[str, Tensor]]:
    states = States()
    ls.train(normed(), run_dir=run_dir, hooks=[states])
    return states.states


def train_a_model_that_changes_a_buffer(run_dir: str, replaces: bool, microbatch: int) -> None:
    ls.train(recipe(model=lambda: Spectral(replaces), microbatch=microbatch), run_dir=run_dir)


def by_hand(first: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Plain torch on one process, one microbatch after another, with torch's own updates of the statistics."""
    model = Normed().train()
    model.load_state_dict(first)
    optimizer = sgd(model)
    states = [state_of(model)]
    data = rows(SAMPLES).tensors
    for step in range(STEPS):
        samples = samples_at(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH, of=SAMPLES)
        optimizer.zero_grad()
        for start in range(0, GLOBAL_BATCH, MICROBATCH):
            chosen = samples[start : start + MICROBATCH]
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            loss = squared_error(model, [tensor[chosen] for tensor in data])
            after_forward = {name: buffer.clone() for name, buffer in model.named_buffers()}
            assert not same(buffers, after_forward)
            (loss * len(chosen) / GLOBAL_BATCH).backward()
            for name, buffer in model.named_buffers():  # torch counts what is recomputed a second time
                buffer.copy_(after_forward[name])
        optimizer.step()
        states.append(state_of(model))
    return states


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_running_statistics_are_those_of_one_process_in_every_step(pool: WorkerPool, tmp_path: Any, world_size: int) -> None:
    everyone: Sequence[list[dict[str, Tensor]]] = pool.run(world_size, train_normed, str(tmp_path / "run"))
    expected = by_hand(everyone[0][0])
    for states in everyone:
        assert same(states, everyone[0])
        for step, (found, truth) in enumerate(zip(states, expected, strict=True)):
            for name, value in truth.items():
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, at=(step, name): f"{at}: {text}")
    microbatches = STEPS * -(-GLOBAL_BATCH // MICROBATCH)
    last = everyone[0][-1]
    assert last["moving.num_batches_tracked"] == last["recomputed.1.num_batches_tracked"] == microbatches
    assert last["twice.num_batches_tracked"] == last["cumulative.num_batches_tracked"] == 2 * microbatches
    assert same(last["frozen.running_mean"], torch.zeros(5))


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize(("world_size", "microbatch"), [(1, 4), (1, 16), (2, 8)])
def test_a_forward_that_changes_another_buffer_is_refused_by_its_name(
    pool: WorkerPool, tmp_path: Any, world_size: int, microbatch: int, replaces: bool
) -> None:
    with pytest.raises(RecipeError, match=r"forward changed its buffer 'calls_seen'.*make it a parameter, or update it outside"):
        pool.run(world_size, train_a_model_that_changes_a_buffer, str(tmp_path / "run"), replaces, microbatch)
