"""A model's parts, and their cut into stages."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings, strategies as st
from torch import nn

from lockstep.base.errors import RecipeError
from lockstep.model.pipeline.stages import (
    SharedParameter,
    Stages,
    balanced_runs,
    check_microbatches,
    keep_only_parts,
    schedule_calls,
    sequential_parts,
)


class Named(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(4))
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 4, bias=False)
        if tied:
            self.head.weight = self.embed.weight


ALL = ["embed", "blocks.*", "norm", "head"]


def test_a_sequential_splits_by_itself() -> None:
    assert sequential_parts(
        nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()), nn.Linear(2, 2)), None
    ) == ["0", "1", "2"]


def test_patterns_name_parts_in_the_order_given_and_the_outermost_of_what_they_match() -> None:
    assert sequential_parts(Named(), ["norm", "blocks.*", "embed", "head"]) == [
        "norm", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "embed", "head",
    ]  # fmt: skip


class Overridden(nn.Sequential):
    def forward(self, x: object) -> object:
        return x


@pytest.mark.parametrize("model", [Named(), Overridden(nn.Linear(2, 2), nn.Linear(2, 2))])
def test_any_other_model_must_name_its_parts(model: nn.Module) -> None:
    with pytest.raises(
        RecipeError,
        match=r"pipeline=2 and a model .*not an nn.Sequential.*name them, as in Recipe.stages=\[",
    ):
        Stages.split(model, None, ranks=2)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ["embed", "block.*", "norm", "head"],
            r"'block.\*', which matches no module of the model; modules are embed, blocks",
        ),
        (
            ["embed", "blocks.*", "head"],
            "leave out norm.weight, norm.bias, norm.running_mean, .* every parameter and buffer",
        ),
        (
            ["embed", "blocks", "norm", "head"],
            r"'blocks' is a ModuleList, which cannot be called; name its members: 'blocks.\*'",
        ),
        (["embed", "blocks.*", "blocks.1", "norm", "head"], "match 'blocks.1' twice"),
        (
            ["embed", "blocks.*", "blocks.1.0", "norm", "head"],
            "'blocks.1' and 'blocks.1.0' are nested",
        ),
    ],
)
def test_patterns_that_name_no_parts(patterns: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        sequential_parts(Named(), patterns)


def test_more_stages_than_parts() -> None:
    with pytest.raises(
        RecipeError,
        match=(
            r"pipeline=4 with 2 stages a rank makes 8 stages, and the model has trainable"
            r" parameters for 7"
        ),
    ):
        Stages.split(Named(), ALL, ranks=4, per_rank=2)


def test_what_has_nothing_to_train_is_no_stage() -> None:
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(2, 2),
        nn.Tanh(),
        nn.Linear(2, 2).requires_grad_(False),
        nn.Linear(2, 2),
        nn.Tanh(),
    )
    assert Stages.split(model, None, ranks=2).ranges == (range(4), range(4, 6))
    with pytest.raises(RecipeError, match="3 stages, and the model has trainable parameters for 2"):
        Stages.split(model, None, ranks=3)


def test_stages_on_ranks() -> None:
    stages = Stages.split(Named(), ALL, ranks=2, per_rank=2)
    assert stages.ranges == (range(1), range(1, 3), range(3, 5), range(5, 7))
    assert stages.parts_on_rank(0) == ["embed", "blocks.2", "blocks.3"]
    assert stages.parts_on_rank(1) == ["blocks.0", "blocks.1", "norm", "head"]
    assert stages.shared_parameters == ()


def test_tied_parameters_and_what_a_rank_keeps() -> None:
    model = Named(tied=True)
    stages = Stages.split(model, ALL, ranks=2)
    assert stages.shared_parameters == (SharedParameter("embed.weight", (0, 1)),)
    keep_only_parts(model, stages.parts_on_rank(1))
    assert [name for name, _ in model.named_parameters()] == [
        "embed.weight", "blocks.2.0.weight", "blocks.2.0.bias", "blocks.3.0.weight",
        "blocks.3.0.bias", "norm.weight", "norm.bias",
    ]  # fmt: skip
    assert {"embed.weight", "head.weight", "norm.running_var"} <= model.state_dict().keys()


def test_a_parameter_that_one_rank_holds_alone_is_not_tied() -> None:
    assert Stages.split(Named(tied=True), ALL, ranks=3, per_rank=2).shared_parameters == (
        SharedParameter("embed.weight", (0, 2)),
    )
    assert Stages.split(Named(tied=True), ALL, ranks=1, per_rank=4).shared_parameters == ()


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8))
def test_no_cut_is_more_even(costs: list[int], count: int) -> None:
    count = min(count, len(costs))

    def uneven(cuts: list[range]) -> tuple[int, int]:
        sums = [sum(costs[place] for place in cut) for cut in cuts]
        return max(sums), sum(each * each for each in sums)

    every = [
        [range(start, stop) for start, stop in zip((0, *inner), (*inner, len(costs)), strict=True)]
        for inner in combinations(range(1, len(costs)), count - 1)
    ]
    found = balanced_runs(costs, count)
    assert found in every
    assert uneven(found) == min(map(uneven, every))


@given(
    st.integers(0, 40),
    st.integers(1, 6),
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
)
def test_calls_are_all_microbatches_in_order_and_what_torch_takes(
    count: int, ranks: int, schedule: str
) -> None:
    stages = Stages((), (range(0),) * ranks, ranks, ())
    made = schedule_calls(count, stages, schedule)
    assert [place for start, stop, _ in made for place in range(start, stop)] == list(range(count))
    for start, stop, name in made:
        assert name == "gpipe" or (
            stop - start >= ranks
            if name == "1f1b"
            else (stop - start) % max(1, (stop - start) // ranks) == 0
        )


def test_fewer_microbatches_than_stages() -> None:
    stages = Stages.split(Named(), ALL, ranks=4)
    check_microbatches(4, stages)
    with pytest.raises(RecipeError, match=r"^1 microbatch per step in a pipeline of 4 stages"):
        check_microbatches(1, stages)
    with pytest.raises(
        RecipeError,
        match=r"3 microbatches per step in a pipeline of 4 stages.*smaller microbatch.*fewer stages",
    ):
        check_microbatches(3, stages)
