"""Laws 1 and 2 in a pipeline: the gradients and the masks of one process, under every schedule; and
what fails, fails on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from model.pipeline.staged import (
    KEY,
    MODELS,
    failing,
    in_a_pipeline,
    in_two_pipelines,
    masks_in_a_pipeline,
    masks_on_one_process,
    microbatches as rows_of,
    on_one_process,
    outputs,
    statistics,
    statistics_on_one_process,
    values,
)

from lockstep.base.errors import RecipeError
from lockstep.model.initialization.deferred_init import build
from lockstep.plan import Schedule
from lockstep.testing.pool import WorkerPool

STEPS = [[3, 3, 3, 3], [3, 3, 3, 2, 3, 1, 1], [2], [3, 3, 3, 3]]
"""The samples of each microbatch: even, uneven and no multiple of the ranks, fewer than stages,
even again."""
SLOW = [(2, "gpipe"), (4, "gpipe"), (4, "1f1b"), (4, "zero-bubble")]
PIPELINES = {
    (2, "gpipe"): ["mlp", "recomputed", "tuples", "gpt"],
    (2, "1f1b"): ["mlp", "recomputed", "tuples", "gpt"],
    (2, "interleaved"): ["mlp", "recomputed", "tuples", "gpt"],
    (2, "zero-bubble"): ["mlp", "recomputed", "tuples", "gpt"],
    (4, "gpipe"): ["gpt"],
    (4, "1f1b"): ["gpt"],
    (4, "interleaved"): ["deep"],
    (4, "zero-bubble"): ["gpt"],
}
CASES = [
    pytest.param(ranks, schedule, name, marks=pytest.mark.slow if (ranks, schedule) in SLOW else ())
    for (ranks, schedule), names in PIPELINES.items()
    for name in names
]

one_process = cache(lambda name, sizes, dtype: on_one_process(name, list(sizes), dtype))


def close(recorded: list[list[float]], records: list[list[float]]) -> bool:
    return torch.allclose(torch.tensor(recorded), torch.tensor(records), rtol=1e-5)


@pytest.fixture(scope="module")
def measured(pool: WorkerPool) -> Callable[[int, str], list[Any]]:
    return cache(
        lambda ranks, schedule: pool.run(
            ranks, in_a_pipeline, PIPELINES[ranks, schedule], schedule, STEPS
        )
    )


@pytest.mark.parametrize(("ranks", "schedule", "name"), CASES)
def test_the_gradient_is_one_process_in_float64_within_4_times_float32s_own_error(
    measured: Callable[[int, str], list[Any]], ranks: int, schedule: str, name: str
) -> None:
    for step, sizes in enumerate(STEPS):
        exact, _ = one_process(name, tuple(sizes), torch.float64)
        own, records = one_process(name, tuple(sizes), torch.float32)
        found: dict[str, torch.Tensor] = {}
        counted: list[str] = []
        for rank in measured(ranks, schedule):
            gradients, recorded, counts = rank[name][step]
            assert close(recorded, records)
            for parameter, gradient in gradients.items():
                assert torch.equal(found.setdefault(parameter, gradient), gradient), (
                    f"{parameter} differs between the ranks that hold it"
                )
            counted += counts
        assert sorted(counted) == sorted(exact) == sorted(found)
        truth, mine, here = (
            torch.cat([each[name].reshape(-1) for name in exact]) for each in (exact, own, found)
        )
        assert (here - truth).norm() <= 4 * (mine - truth).norm(), f"step {step}"


def test_two_pipelines_side_by_side_sum_their_gradients(pool: WorkerPool) -> None:
    steps = [[3, 3, 3, 3], [3, 2, 3, 1, 1], [2]]
    ranks = pool.run(4, in_two_pipelines, "gpt", "1f1b", steps)
    for step, sizes in enumerate(steps):
        exact, _ = one_process("gpt", tuple(sizes), torch.float64)
        own, records = one_process("gpt", tuple(sizes), torch.float32)
        for first in (0, 1):  # ranks 0 and 2 are one pipeline, 1 and 3 the other
            found = {**ranks[first][step][0], **ranks[first + 2][step][0]}
            truth, mine, here = (
                torch.cat([each[name].reshape(-1) for name in exact])
                for each in (exact, own, found)
            )
            assert (here - truth).norm() <= 4 * (mine - truth).norm(), f"step {step}"
        for place, rank in enumerate(ranks):
            assert close(rank[step][1], records)
            # of those who share out the microbatches at one stage
            assert rank[step][2] is (step == 0 and place in (0, 1))


@pytest.mark.parametrize(
    ("ranks", "schedule", "name"),
    [
        (2, "1f1b", "gpt"),
        (2, "interleaved", "gpt"),
        (4, "zero-bubble", "gpt"),
        (4, "interleaved", "deep"),
    ],
)
def test_the_masks_of_dropout_are_those_of_one_process(
    pool: WorkerPool, ranks: int, schedule: str, name: str
) -> None:
    expected = masks_on_one_process(name, STEPS[1])
    found = [
        item
        for masks in pool.run(ranks, masks_in_a_pipeline, name, schedule, STEPS[1])
        for item in masks.items()
    ]
    assert sorted(module for module, _ in found) == sorted(expected)
    for module, masks in found:
        assert all(
            torch.equal(mask, other) for mask, other in zip(masks, expected[module], strict=True)
        )
        assert 0 < sum(int((~mask).sum()) for mask in masks) < sum(mask.numel() for mask in masks)


@pytest.mark.parametrize(
    ("schedule", "watched"), [("1f1b", False), ("1f1b", True), ("interleaved", True)]
)
def test_running_statistics_are_those_of_one_process(
    pool: WorkerPool, schedule: str, watched: bool
) -> None:
    steps = [[4, 4, 3, 4], [4, 4, 4, 3, 3]]
    expected = statistics_on_one_process("normed", steps)
    first, last = pool.run(2, statistics, "normed", schedule, steps, watched)
    assert {**first, **last}.keys() == expected.keys()
    for name, buffer in {**first, **last}.items():
        torch.testing.assert_close(buffer, expected[name])


def test_a_ranks_part_of_the_model_has_the_values_of_one_process(pool: WorkerPool) -> None:
    whole = build(MODELS["gpt"][0], KEY).state_dict()
    parts = pool.run(2, values, "gpt", "interleaved")
    assert parts[0].keys() & parts[1].keys() == {"embedding.bytes.weight", "head.weight"}
    assert {**parts[0], **parts[1]}.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for part in parts for name, tensor in part.items())


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_an_evaluation_has_the_output_on_the_last_rank(pool: WorkerPool, schedule: str) -> None:
    model = build(MODELS["gpt"][0], KEY).eval()
    expected = [model(inputs)["logits"] for inputs, _, _ in rows_of("gpt", STEPS[1], torch.float32)]
    first, last = pool.run(2, outputs, "gpt", schedule, STEPS[1])
    assert first == []
    for output, logits in zip(last, expected, strict=True):
        torch.testing.assert_close(output["logits"], logits)


OTHER_SHAPE = "returns float32 [1, 8], and returned float32 [2, 8] for another microbatch"
OTHER_KIND = "the part '0' of the model returns a dict, and the next one is on another rank"
FAILURES: dict[tuple[str, Schedule], list[tuple[str, str]]] = {
    ("inputs", "gpipe"): [
        ("ValueError", "spoilt"),
        ("StageFailed", "rank 0 of the pipeline failed: ValueError"),
    ],
    ("score", "1f1b"): [("LossError", "spoilt")] * 2,
    ("part", "1f1b"): [
        ("StageFailed", "rank 1 of the pipeline failed: ArithmeticError"),
        ("ArithmeticError", "spoilt"),
    ],
    ("part", "zero-bubble"): [
        ("StageFailed", "ArithmeticError"),
        ("ArithmeticError", "spoilt"),
    ],
    ("boundary", "interleaved"): [("RecipeError", OTHER_KIND)] * 2,
    ("shape", "1f1b"): [("RecipeError", OTHER_SHAPE)] * 2,
}
"""Where a microbatch fails, and the schedule -> the error on each rank."""


def failing_in_turn() -> list[tuple[str, str, list[list[float]]]]:
    return [failing("mlp", schedule, where) for where, schedule in FAILURES]


def test_a_failure_is_raised_on_every_rank_and_the_next_step_is_right(pool: WorkerPool) -> None:
    _, records = one_process("mlp", (2, 2, 2, 2), torch.float32)
    for rank, found in enumerate(pool.run(2, failing_in_turn)):
        for (case, expected), (kind, text, after) in zip(FAILURES.items(), found, strict=True):
            name, message = expected[rank]
            assert kind == name, (case, rank, text)
            assert message in text, (case, rank)
            assert close(after, records), (case, rank)


def only(name: str, schedule: Schedule) -> str:
    with pytest.raises(RecipeError) as raised:
        in_a_pipeline([name], schedule, [[3, 3]])
    return str(raised.value)


UNREACHED: dict[tuple[str, Schedule], str] = {
    ("detached", "1f1b"): (
        "the part '0' of the model passes on float32 [3, 8] without gradient, so no gradient"
        " reaches the trainable parameters up to it"
    ),
    ("ignoring", "1f1b"): (
        "from '2' on does not depend on the input of '2', so no gradient reaches the"
    ),
    ("ignoring", "zero-bubble"): "from '2' on does not depend on the input of '2'",
}


def refused_in_turn() -> list[str]:
    return [only(*case) for case in UNREACHED]


def test_stages_that_no_gradient_would_reach_are_refused_on_every_rank(pool: WorkerPool) -> None:
    """Torch's schedules would wait for that gradient, train without a word, or take zeros for
    it."""
    one, other = pool.run(2, refused_in_turn)
    assert one == other
    for (case, text), said in zip(UNREACHED.items(), one, strict=True):
        assert text in said, case
        assert "freeze them (requires_grad_(False)), or" in said, case
