"""Session: the lower level, for loops with several models or without data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus
from training.subjects import rows, same, sgd, state_of

import lockstep as ls
from lockstep.testing.pool import WorkerPool

NOISE = 4


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(NOISE, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6))


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


def train_gan(run_dir: str, numerics: str) -> dict[str, Any]:
    """Each loss reaches both models."""
    strays = []
    with ls.Session(run_dir=run_dir, plan=f"numerics={numerics}", seed=3, log_every=1) as session:
        made, made_optimizer = session.prepare(generator, sgd)
        judge, judge_optimizer = session.prepare(critic, sgd)
        first = state_of(made), state_of(judge)
        for step in session.steps(rows(40), global_batch=14, microbatch=4, steps=3):
            for batch in step.microbatches():
                fake = made(torch.randn(len(batch[0]), NOISE))
                step.backward((softplus(judge(fake)) + softplus(-judge(batch[1]))).mean(), judge_optimizer)
            strays += [p.grad for p in made.parameters()] if step.index == 0 else []
            step.commit(judge_optimizer)
            before = [None if p.grad is None else p.grad.clone() for p in judge.parameters()]
            for batch in step.microbatches():
                fake = made(torch.randn(len(batch[0]), NOISE))
                step.backward(softplus(-judge(fake)).mean(), made_optimizer)
            step.commit(made_optimizer, clip_norm=1.0)
            assert same([p.grad for p in judge.parameters()], before)
            step.log({"of the generator": step.committed[0].loss(), "of the critic": step.committed[1].loss()})
    assert strays == [None] * len(strays)
    return {"first": first, "last": (state_of(made), state_of(judge))}


@pytest.mark.parametrize("numerics", ["fast", "bitwise"])
def test_two_models_whose_losses_reach_both_train_alike_at_any_world_size(pool: WorkerPool, tmp_path: Path, numerics: str) -> None:
    found = {size: pool.run(size, train_gan, str(tmp_path / str(size)), numerics) for size in (1, 2, 3)}
    alone = found[1][0]
    for first, last in zip(alone["first"], alone["last"], strict=True):
        assert not any(same(first[part], last[part]) for part in first if part.endswith("weight"))
    for results in found.values():
        for result in results:
            assert same(result["first"], alone["first"])
            assert same(result["last"], results[0]["last"])
            if numerics == "bitwise":
                assert same(result["last"], alone["last"])
            for one, other in zip(result["last"], alone["last"], strict=True):
                for part, value in one.items():
                    torch.testing.assert_close(value, other[part], rtol=1e-4, atol=1e-5, msg=lambda text, part=part: f"{part}: {text}")
    assert int(alone["last"][0]["1.num_batches_tracked"]) == 3 * 4 * 2
    assert int(alone["last"][1]["1.num_batches_tracked"]) == 3 * 4 * 3
    lines = [json.loads(line) for line in (tmp_path / "3" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["of the generator"] == line["loss"] != line["of the critic"] for line in lines)
