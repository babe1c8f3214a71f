"""The functions of a recipe that talk to the process group themselves: right, or refused before
they can wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from training.subjects import each_of, recipe, rows

import lockstep as ls
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
    result = ls.train(given, run_dir=run_dir, plan=plan)
    return {name: round(value, 4) for name, value in result.metrics.items()}


def weigh(run_dir: str, plan: str) -> Any:
    """The remedy for a loss that sums its denominator over ranks."""
    given = recipe(
        inputs=lambda batch: batch[1],
        loss=as_a_sum,
        weight=lambda batch: len(batch[0]),
        global_batch=SAMPLES,
    )
    return ls.train(given, run_dir=run_dir, plan=f"{plan},numerics=bitwise").fingerprint


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


ASKS = ("with_a_sum", "with_a_mean", "with_rows", "with_a_batch_loss")
"""Cases that ask for the number of processes, and are right."""
INSISTS = [
    (plan, case, synchronised if case in ("with_a_loss", "with_a_weight") else insistent)
    for case in CASES
    for plan in ("replicate=2", "shard=2", *(["pipeline=2"] if case == "with_a_loss" else []))
]


def trained(run_dir: str, plans: Sequence[str]) -> dict[str, Any]:
    """What comes of all cases under plans; what is refused, where there are two processes."""
    talks = (nobody, synchronised) if len(plans) == 1 else (synchronised,)
    right = [(plan, case, talk) for case in ASKS for plan in plans for talk in talks]
    return {
        "right": each_of(train, f"{run_dir}/right", right, may_refuse=False),
        "refused": each_of(train, f"{run_dir}/refused", INSISTS if len(plans) > 1 else []),
        "weighed": weigh(f"{run_dir}/weighed", plans[0]),
        "kept": kept_by_a_metric(f"{run_dir}/kept", plans[-1]),
        "calls": calls(),
    }


@pytest.fixture(scope="module")
def found(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one process finds, and each of two."""
    folder = tmp_path_factory.mktemp("runs")
    return [
        *pool.run(1, trained, str(folder / "1"), ["shard=1"]),
        *pool.run(2, trained, str(folder / "2"), ["replicate=2", "shard=2"], timeout_seconds=50),
    ]


def test_what_synchronises_where_there_are_several_processes_is_right(
    found: list[dict[str, Any]],
) -> None:
    alone, *ranks = (rank["right"] for rank in found)
    for place, case in enumerate(ASKS):
        for each in (alone, *ranks):
            pair = each[2 * place : 2 * place + 2]
            assert pair == [alone[2 * place]] * 2, case


def test_a_collective_that_is_called_all_the_same_is_refused_on_all_ranks(
    found: list[dict[str, Any]],
) -> None:
    for case, one, other in zip(INSISTS, found[1]["refused"], found[2]["refused"], strict=True):
        assert one == other, case
        assert "calls allreduce of torch.distributed" in one, case


def test_the_remedy_of_a_loss_that_sums_its_denominator_over_ranks(
    found: list[dict[str, Any]],
) -> None:
    assert len({rank["weighed"] for rank in found}) == 1


def test_collectives_are_found_before_they_run(found: list[dict[str, Any]]) -> None:
    names = ["allreduce", "barrier", "allgather", "allgather", "broadcast", "False", "True"]
    assert [rank["calls"] for rank in found[1:]] == [names] * 2


def test_a_metric_that_keeps_what_it_is_called_with_sees_each_sample_on_one_rank(
    found: list[dict[str, Any]],
) -> None:
    alone, *ranks = (rank["kept"] for rank in found)
    assert len(alone) == 2 * SAMPLES
    assert sorted(sample for seen in ranks for sample in seen) == sorted(alone)
