"""Records for the tests of the checks, built from values: what the probes would have written of a
small run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lockstep.audit.finding import AreaResult, Cause, Finding
from lockstep.audit.records import Rank, Records
from lockstep.evidence.rows import Row
from lockstep.evidence.sketch import sketch

Values = np.ndarray[Any, np.dtype[np.float64]]
Gradients = Mapping[str, Values]


def given(*ranks: Sequence[Row], fetches: Sequence[Row] = ()) -> Records:
    """The records of a run with these rows on each rank."""
    made = [
        Rank(number, [{**row, "place": place} for place, row in enumerate(rows)])
        for number, rows in enumerate(ranks)
    ]
    return Records(made, list(fetches))


def only(result: AreaResult) -> Finding:
    """The one finding of a result."""
    assert len(result.findings) == 1, result.findings
    return result.findings[0]


def causes(result: AreaResult) -> set[Cause]:
    return {finding.cause for finding in result.findings}


def sketched(values: Any) -> list[float]:
    return sketch(torch.as_tensor(np.asarray(values, dtype=np.float64)))


# Steps


def step(index: int = 0, **changes: Any) -> Row:
    row: Row = {
        "kind": "step",
        "optimizer": 0,
        "type": "SGD",
        "index": index,
        "line": "train.py:20",
        "made_at": "train.py:5",
    }
    row |= {
        "backward_line": "train.py:19",
        "lr": [0.1],
        "scale": None,
        "clip": None,
        "several_closures": False,
        "losses": [],
    }
    row |= {
        "applied": {},
        "added": {},
        "reduced": {},
        "sharded": [],
        "stale": [],
        "unused": [],
        "clipped": [],
    }
    return (
        row
        | {"before": {}, "states_before": {}, "parameters": {}, "states": {}, "buffers": {}}
        | changes
    )


def backward(number: int = 0, **changes: Any) -> Row:
    row: Row = {
        "kind": "backward",
        "number": number,
        "line": "train.py:19",
        "value": 1.0,
        "divisors": [],
        "loader": 0,
        "pass_number": 0,
    }
    row |= {"state": "a", "state_at_batch": "a", "drawn": "", "other_draws": False} | changes
    return {"passes": [] if row["loader"] is None else [(row["loader"], row["pass_number"])], **row}


def modes(number: int = 0, train: int = 0, evaluation: int = 0, off: int = 0) -> Row:
    return {
        "kind": "modes",
        "number": number,
        "line": "train.py:19",
        "train": train,
        "eval": evaluation,
        "off": off,
    }


def trained(
    added: Sequence[Sequence[Gradients]], applied: Sequence[Gradients], **changes: Any
) -> list[Row]:
    """One step on each rank: what each of its backwards added, and what it applies."""
    rows = []
    for backwards, own in zip(added, applied, strict=True):
        sketches = {
            str(number): {name: sketched(each) for name, each in one.items()}
            for number, one in enumerate(backwards)
        }
        rows.append(
            step(
                added=sketches,
                applied={name: sketched(each) for name, each in own.items()},
                **changes,
            )
        )
    return rows


def total(added: Sequence[Gradients]) -> Gradients:
    """The sum of several gradients."""
    return {name: np.sum([each[name] for each in added], axis=0) for name in added[0]}


def scaled(gradients: Gradients, factor: float) -> Gradients:
    return {name: factor * each for name, each in gradients.items()}


def mean_over_ranks(added: Sequence[Sequence[Gradients]]) -> list[Gradients]:
    """What each rank applies if all reduce as they should."""
    return [scaled(total([total(each) for each in added]), 1 / len(added))] * len(added)


def random_gradients(
    seed: int, *, ranks: int, backwards: int, names: int = 3, size: int = 24
) -> list[list[Gradients]]:
    random = np.random.default_rng(seed)
    shape = (ranks, backwards, names, size)
    values = random.standard_normal(shape)
    return [
        [
            {f"layer{number}.weight": values[rank, each, number] for number in range(names)}
            for each in range(backwards)
        ]
        for rank in range(ranks)
    ]


def loss(backward: int, count: float, weight: float = 1.0, **changes: Any) -> Row:
    """A call of `cross_entropy`."""
    row: Row = {
        "function": "cross_entropy",
        "line": "train.py:17",
        "reduction": "mean",
        "count": count,
        "targets": count,
    }
    return row | {"backward": backward, "weight": weight} | changes


# Data


SAMPLER: Row = {
    "type": "RandomSampler",
    "batch_type": "BatchSampler",
    "replacement": False,
    "num_samples": 16,
}
DISTRIBUTED: Row = {
    "type": "DistributedSampler",
    "batch_type": "BatchSampler",
    "shuffle": True,
    "num_replicas": 2,
    "total_size": 16,
    "epoch": 0,
}
DATASET: Row = {
    "type": "TensorDataset",
    "iterable": False,
    "length": 16,
    "held": None,
    "digest": "data",
    "data": {"x": "data"},
}


def passes(
    *samples: Sequence[int],
    contents: Sequence[Sequence[str]] | None = None,
    loader: int = 0,
    batch: int = 4,
    training: bool = True,
    complete: bool = True,
    dataset: Row = DATASET,
    epochs: Sequence[int] = (),
    **begin: Any,
) -> list[Row]:
    """The rows of a loader's passes, each with the samples given. `contents`: their digests if
    places do not tell."""
    rows: list[Row] = []
    for number, indices in enumerate(samples):
        first: Row = {
            "kind": "pass",
            "loader": loader,
            "number": number,
            "line": "train.py:10",
            "loop": "train.py:12",
            "workers": 0,
        }
        first |= {
            "batch_size": batch,
            "drop_last": False,
            "dataset": dataset if number == 0 else None,
            "sampler": DISTRIBUTED,
        } | begin
        first.setdefault("batches", -(-len(indices) // batch) + (not complete))
        if epochs:
            first["sampler"] = first["sampler"] | {"epoch": epochs[number]}
        rows.append(first)
        for start in range(0, len(indices), batch):
            part = slice(start, start + batch)
            digests = (
                [f"sample {each}" for each in indices[part]]
                if contents is None
                else list(contents[number][part])
            )
            row: Row = {
                "kind": "batch",
                "loader": loader,
                "number": number,
                "indices": list(indices[part]),
                "samples": digests,
            }
            rows.append(row | {"grad": True} | ({} if contents is None else {"indices": None}))
            if training:
                rows.append(backward(len(rows), loader=loader, pass_number=number))
        if complete:
            rows.append({"kind": "pass_end", "loader": loader, "number": number})
    return rows


# Everything else


def row(kind: str, line: str = "train.py:30", **values: Any) -> Row:
    return {"kind": kind, "line": line, **values}


def collective(name: str = "all_reduce", line: str = "train.py:30", **changes: Any) -> Row:
    return (
        row(
            "collective",
            line,
            name=name,
            ranks=[0, 1],
            shape=[[4], "float32"],
            operation="SUM",
            floats=4,
            in_backward=False,
        )
        | changes
    )


def schedule(**changes: Any) -> Row:
    return (
        row(
            "schedule",
            "train.py:21",
            type="StepLR",
            schedule=1,
            optimizer=0,
            epoch=0,
            horizon=None,
            by="__main__",
        )
        | changes
    )


def statistics(values: Sequence[float], **changes: Any) -> Row:
    found = row(
        "statistics",
        "train.py:16",
        sketches=[sketched(values)],
        loader=0,
        number=0,
        training=True,
        grad=True,
        call=1,
    )
    return found | changes
