"""A check says *right* only of what it compared: in records without its subject it says what it did
not see."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from audit.given_records import (
    DATASET,
    DISTRIBUTED,
    backward,
    collective,
    given,
    loss,
    mean_over_ranks,
    modes,
    passes,
    random_gradients,
    schedule,
    sketched,
    step,
    trained,
)

from lockstep.audit.checks.collectives import check_collectives, check_files
from lockstep.audit.checks.gradients import check_applied_gradients
from lockstep.audit.checks.losses import check_losses
from lockstep.audit.checks.randomness import check_modes, check_randomness
from lockstep.audit.checks.replicas import check_replicas
from lockstep.audit.checks.samples import check_samples
from lockstep.audit.checks.schedules import check_schedules
from lockstep.audit.finding import AreaResult
from lockstep.audit.records import Records
from lockstep.evidence.rows import Row

CHECKS: dict[str, Callable[[Records], AreaResult]] = {
    "samples": check_samples,
    "gradients": check_applied_gradients,
    "losses": check_losses,
    "replicas": check_replicas,
    "randomness": check_randomness,
    "schedules": check_schedules,
    "collectives": lambda records: check_collectives(records, hung=False, error=""),
    "modes": check_modes,
    "files": check_files,
}
BARE = {"lr": [None]}
"""A step of an optimizer of which no other probe saw anything."""
ALIKE = random_gradients(1, ranks=1, backwards=1)[0]


def same(rows: Sequence[Row]) -> Records:
    """The same rows on two ranks."""
    return given(rows, rows)


def augmented(rank: int) -> list[Row]:
    """Half a dataset of the rank's own, whose samples are other ones whenever they are read."""
    contents = [[f"{rank}/{epoch}/{place}" for place in range(8)] for epoch in range(2)]
    rows = passes(
        range(8),
        range(7, -1, -1),
        dataset={**DATASET, "digest": f"data {rank}", "length": 8},
        sampler=OWN,
    )
    batches = [each for each in rows if each["kind"] == "batch"]
    for number, each in enumerate(batches):
        each["samples"] = contents[number // 2][4 * (number % 2) : 4 * (number % 2) + 4]
    return [*rows, step()]


OWN = {
    "type": "RandomSampler",
    "batch_type": "BatchSampler",
    "replacement": False,
    "num_samples": 8,
}
NAN = {"w": [float("nan")] * 9}
ABSENT: dict[str, tuple[str, Records, str]] = {
    "no loader": ("samples", same([step()]), "no DataLoader gave batches"),
    "a loader for evaluations": (
        "samples",
        same([*passes(range(8), training=False, complete=False), backward(loader=None), step()]),
        "the DataLoaders gave no batch to a backward",
    ),
    "an evaluation that is not at its end": (
        "samples",
        same([*passes(range(8), training=False, complete=False), backward(loader=None), step()]),
        "did not come to its end",
    ),
    "augmented samples": (
        "samples",
        given(augmented(0), augmented(1)),
        "have other contents at each read",
    ),
    "no gradients": ("gradients", same([step()]), "no gradient was seen at the steps"),
    "equal gradients": (
        "gradients",
        given(*[[each] for each in trained([ALIKE, ALIKE], [ALIKE[0], ALIKE[0]])]),
        "were the same on all ranks",
    ),
    "gradients that are not finite": (
        "gradients",
        same([step(applied=NAN)]),
        "gradients are NaN or infinite",
    ),
    "no step together": (
        "gradients",
        given([step()], [step(1)]),
        "no optimizer step was taken by all ranks",
    ),
    "no loss function": ("losses", same([step()]), "no loss function of torch was seen"),
    "a loss of several closures": (
        "losses",
        same([step(several_closures=True, losses=[loss(0, 8)])]),
        "computes several gradients in a step",
    ),
    "one process": ("replicas", given([step()]), "one process has no replica"),
    "no replicas together": (
        "replicas",
        given([step()], [step(1)]),
        "the ranks took no step together",
    ),
    "shards": (
        "replicas",
        same([step(parameters={"w": sketched([1.0])}, sharded=["w"])]),
        "sharded, or NaN",
    ),
    "NaN": ("replicas", same([step(parameters=NAN)]), "sharded, or NaN"),
    "one backward": ("randomness", same([backward(), step()]), "from the second backward on"),
    "no read of data": ("randomness", same([backward(), step()]), "no DataLoader gave batches"),
    "no learning rate": ("schedules", same([step(**BARE)]), "no learning rate was seen"),
    "no schedule": ("schedules", same([step(**BARE)]), "no schedule of torch was stepped"),
    "a schedule of few steps": (
        "schedules",
        given([step(), schedule(), step(1), schedule()]),
        "too few to tell its speed",
    ),
    "no collective": (
        "collectives",
        same([step()]),
        "no collective of Python code or of DistributedDataParallel was seen",
    ),
    "a collective of one rank each": (
        "collectives",
        given([collective(ranks=[0])], [collective(ranks=[1])]),
        "no collective of Python code or of DistributedDataParallel was seen",
    ),
    "no dropout": (
        "modes",
        same([backward(), step()]),
        "no dropout or BatchNorm of torch was in a backward",
    ),
    "no evaluation": ("modes", same([step()]), "no evaluation with dropout"),
    "no file": ("files", same([step()]), "no file was written by torch.save"),
}


@pytest.mark.parametrize("case", ABSENT)
def test_what_is_absent_is_not_right(case: str) -> None:
    check, records, reason = ABSENT[case]
    result = CHECKS[check](records)
    assert (result.findings, result.right) == ([], "")
    assert any(reason in text for text in result.unseen), result.unseen


def test_every_check_has_a_case() -> None:
    assert {check for check, _, _ in ABSENT.values()} == CHECKS.keys()


def test_what_was_seen_is_told_from_what_was_not() -> None:
    """A backward with dropout, and no evaluation; a sum with equal weights whose scale is the
    script's own."""
    result = check_modes(same([backward(), modes(train=1), step()]))
    assert (
        result.right
        == "dropout and BatchNorm: in 2 backwards they are in the mode of the first one"
    )
    assert result.unseen == ["no evaluation with dropout or BatchNorm of torch was seen"]
    added = random_gradients(1, ranks=2, backwards=1)
    rows = trained(added, mean_over_ranks(added))
    for each in rows:
        each["losses"] = [loss(0, 8, reduction="sum")]
    result = check_losses(given(*[[backward(), each] for each in rows]))
    assert result.right == "in 1 steps all targets have one weight"
    assert result.unseen == [
        "the loss is a sum over targets that is not divided by their number: its scale is the"
        " script's own, and the reduction gives 0.5 × the sum over all ranks"
    ]


def test_a_reason_that_comes_in_every_step_is_said_once() -> None:
    result = check_applied_gradients(
        same([step(several_closures=True), step(1, several_closures=True)])
    )
    assert result.unseen == [
        "SGD computes several gradients in a step",
        "no gradient was seen at the steps of the optimizer",
    ]


def test_a_dataset_that_a_sampler_splits_is_one() -> None:
    """The records of a sampler that splits one dataset over the ranks tell samples by their
    places."""
    result = check_samples(
        given(*[passes(range(rank, 16, 2), sampler=DISTRIBUTED) for rank in range(2)])
    )
    assert (
        result.right
        == "16 samples, in passes over the data: 1; none on two ranks, and none twice in a pass"
    )
