"""The functions of a recipe that talk to the process group themselves: right, or refused before
they can wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from training.subjects import recipe, rows

import lockstep as ls
from lockstep.base.errors import UserError
from lockstep.comm.torch_collectives import CollectiveCalled, CollectivesRefused, as_one_process
from lockstep.testing.pool import WorkerPool

SAMPLES = 20  # five microbatches: ranks have unequally many
Function = Callable[..., Any]


def synchronised(value: Tensor) -> Tensor:
    """The sum over ranks, as torchmetrics' compute has it, and DETR's number of boxes."""
    if dist.is_available() and dist.is_initialized():
        return insistent(value)
    return value


def insistent(value: Tensor) -> Tensor:
    total = value.clone()
    dist.all_reduce(total)
    return total


def errors(output: Tensor, batch: Any) -> Tensor:
    return (output - batch[2]).square().sum(1)


def with_a_sum(talk: Function) -> dict[str, Any]:
    return {
        "metrics": {
            "sum": ls.Gathered(
                lambda output, batch: (errors(output, batch),), lambda rows: talk(rows.sum())
            )
        }
    }


def with_a_mean(talk: Function) -> dict[str, Any]:
    return {"metrics": {"mean": ls.Mean(lambda output, batch: talk(errors(output, batch)))}}


def with_rows(talk: Function) -> dict[str, Any]:
    return {
        "metrics": {
            "rows": ls.Gathered(
                lambda output, batch: (talk(errors(output, batch)),), lambda rows: rows.sum()
            )
        }
    }


def with_a_loss(talk: Function) -> dict[str, Any]:
    """As DETR's: the sum over the mean number of boxes of a rank."""
    return {
        "loss": (
            lambda output, batch: (
                errors(output, batch).sum() / talk(torch.tensor(float(len(batch[0]))))
            )
        )
    }


def with_a_weight(talk: Function) -> dict[str, Any]:
    return {"loss": as_a_sum, "weight": lambda batch: talk(torch.tensor(float(len(batch[0]))))}


def with_a_batch_loss(talk: Function) -> dict[str, Any]:
    return {
        "loss": None,
        "batch_loss": ls.Gathered(
            lambda output, batch: (errors(output, batch),),
            lambda rows: rows.mean() + talk(rows.detach().sum()),
        ),
    }


def as_a_sum(output: Tensor, batch: Any) -> ls.Sum:
    return ls.Sum(errors(output, batch).sum())


def nobody(value: Tensor) -> Tensor:
    return value


CASES = {
    each.__name__: each
    for each in (with_a_sum, with_a_mean, with_rows, with_a_loss, with_a_weight, with_a_batch_loss)
}


def train(run_dir: str, plan: str, case: str, talk: Function) -> Any:
    """The refusal; or the metrics and the fingerprint."""
    made = CASES[case](talk)
    evaluation = ls.Evaluation(data=rows(SAMPLES, seed=5), metrics=made.pop("metrics", {}))
    given = recipe(
        **{
            "inputs": lambda batch: batch[1],
            "loss": lambda output, batch: errors(output, batch).mean(),
            **made,
        },
        evaluation=evaluation,
        global_batch=SAMPLES,
    )
    try:
        result = ls.train(given, run_dir=run_dir, plan=plan)
    except UserError as error:
        return str(error)
    return {name: round(value, 4) for name, value in result.metrics.items()}


@pytest.mark.parametrize("case", ["with_a_sum", "with_a_mean", "with_rows", "with_a_batch_loss"])
def test_what_synchronises_where_there_are_several_processes_is_right(
    pool: WorkerPool, tmp_path: Path, case: str
) -> None:
    alone = pool.run(1, train, str(tmp_path / "alone"), "replicate=1", case, nobody)
    assert pool.run(1, train, str(tmp_path / "one"), "replicate=1", case, synchronised) == alone
    assert pool.run(2, train, str(tmp_path / "two"), "replicate=2", case, synchronised) == alone * 2
    assert pool.run(2, train, str(tmp_path / "shard"), "shard=2", case, synchronised) == alone * 2


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_collective_that_is_called_all_the_same_is_refused_on_all_ranks(
    pool: WorkerPool, tmp_path: Path, case: str
) -> None:
    talk = synchronised if case in ("with_a_loss", "with_a_weight") else insistent
    plans = (
        ("replicate=2", "shard=2")
        if case != "with_a_loss"
        else ("replicate=2", "shard=2", "pipeline=2")
    )
    for plan in plans:
        one, other = pool.run(2, train, str(tmp_path / plan), plan, case, talk)
        assert one == other
        assert "calls allreduce of torch.distributed" in one


def weigh(run_dir: str, plan: str) -> Any:
    """The remedy for a loss that sums its denominator over ranks."""
    given = recipe(
        inputs=lambda batch: batch[1],
        loss=as_a_sum,
        weight=lambda batch: len(batch[0]),
        global_batch=SAMPLES,
    )
    return ls.train(given, run_dir=run_dir, plan=f"{plan},numerics=bitwise").fingerprint


def test_the_remedy_of_a_loss_that_sums_its_denominator_over_ranks(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (alone,) = pool.run(1, weigh, str(tmp_path / "one"), "replicate=1")
    assert pool.run(2, weigh, str(tmp_path / "two"), "replicate=2") == [alone] * 2


def calls() -> list[str]:
    value, found = torch.ones(2), []
    for call in (
        lambda: dist.all_reduce(value),
        lambda: dist.barrier(),
        lambda: dist.all_gather([value.clone()] * 2, value),
        lambda: dist.all_gather_object([None, None], "text"),
        lambda: dist.broadcast(value, 0),
    ):
        try:
            with CollectivesRefused():
                call()
        except CollectiveCalled as error:
            found.append(str(error))
    with as_one_process():
        found.append(str(dist.is_initialized()))
    return [*found, str(dist.is_initialized())]


def test_collectives_are_found_before_they_run(pool: WorkerPool) -> None:
    assert (
        pool.run(2, calls)
        == [["allreduce", "barrier", "allgather", "allgather", "broadcast", "False", "True"]] * 2
    )


def kept_by_a_metric(run_dir: str, plan: str) -> list[int]:
    """The samples that this rank's metric functions were called with, as an object's `update` would
    be."""
    seen: list[int] = []

    def update(output: Tensor, batch: Any) -> Tensor:
        seen.extend(batch[0].tolist())
        return errors(output, batch)

    metrics = {
        "mean": ls.Mean(update),
        "rows": ls.Gathered(
            lambda output, batch: (update(output, batch),), lambda rows: rows.sum()
        ),
    }
    evaluation = ls.Evaluation(data=rows(SAMPLES, seed=5), metrics=metrics)
    given = recipe(
        inputs=lambda batch: batch[1],
        loss=lambda output, batch: errors(output, batch).mean(),
        evaluation=evaluation,
    )
    ls.train(given, run_dir=run_dir, plan=plan)
    return seen


def test_a_metric_that_keeps_what_it_is_called_with_sees_each_sample_on_one_rank(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (alone,) = pool.run(1, kept_by_a_metric, str(tmp_path / "one"), "shard=1")
    assert len(alone) == 2 * SAMPLES
    sharded = pool.run(2, kept_by_a_metric, str(tmp_path / "two"), "shard=2")
    assert sorted(sample for seen in sharded for sample in seen) == sorted(alone)
