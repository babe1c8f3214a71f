"""Modules of experts are found by the shapes of their parameters and their forward, or named."""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import dedent
from typing import Any

import pytest
import torch
from model.expert.models import CHOSEN, EXPERTS, HIDDEN, WIDTH, Heads, ListedMixture, Mixture
from torch import nn

from lockstep.base.errors import RecipeError
from lockstep.model.expert.find import find_experts


def counts(model: nn.Module, names: Sequence[str] | None = None) -> dict[str, int]:
    return {name: each.count for name, each in find_experts(model, names).items()}


def test_experts_are_found_by_looking() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([Mixture(), Mixture()]), "other": Heads()})
    found = {"blocks.0.experts": EXPERTS, "blocks.1.experts": EXPERTS}
    assert counts(model) == found | {"other": 4}
    assert counts(model, ["blocks.*.experts"]) == found
    assert counts(model, ["blocks.1.experts"]) == {"blocks.1.experts": EXPERTS}


def test_experts_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Mixture()
    assert counts(model) == {"experts": EXPERTS}


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(3, 4),
        nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4)),
        nn.Bilinear(3, 4, 5),
        nn.TransformerDecoderLayer(8, 2),
        nn.Sequential(nn.MultiheadAttention(8, 2)),
        nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])}),
    ],
    ids=str,
)
def test_models_without_experts(model: nn.Module) -> None:
    assert find_experts(nn.ModuleDict({"model": model}), None) == {}


@pytest.mark.parametrize(("name", "names"), [("experts", None), ("mlps", None), ("x", ["x"])])
def test_a_list_of_experts_is_refused_with_lines_that_run(name: str, names: Any) -> None:
    with pytest.raises(RecipeError, match=f"{name} is a list of {EXPERTS} modules") as caught:
        find_experts(ListedMixture(name), names)
    written: dict[str, Any] = {}
    exec(dedent(str(caught.value).partition("\n")[2]), written)
    experts = written["Experts"]()
    assert experts.up.shape == (EXPERTS, WIDTH, HIDDEN)
    tokens, index = torch.randn(5, WIDTH), torch.randint(EXPERTS, (5, CHOSEN))
    weights = torch.rand(5, CHOSEN)
    expected = torch.stack(
        [
            sum(
                weight * (torch.nn.functional.silu(row @ experts.up[e]) @ experts.down[e])
                for e, weight in zip(chosen, weighing, strict=True)
            )
            for row, chosen, weighing in zip(tokens, index, weights, strict=True)
        ]
    )
    assert torch.allclose(experts(tokens, index, weights), expected, atol=1e-5)
    assert find_experts(Mixture(experts), None).keys() == {"experts"}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["mixture"], "router.weight (8, 6)"),
        (["mixture.experts", "mixture.router"], None),
        (["other.*"], "matches no module"),
        (["act"], "which has no parameters"),
    ],
)
def test_names_of_other_modules_are_refused(names: list[str], said: str | None) -> None:
    mixture = Mixture()
    mixture.gain = nn.Parameter(torch.ones(WIDTH))
    model = nn.ModuleDict({"mixture": mixture, "act": nn.SiLU()})
    if said is None:
        assert counts(model, names) == {"mixture.router": EXPERTS, "mixture.experts": EXPERTS}
        return
    with pytest.raises(RecipeError, match=re.escape(said)):
        find_experts(model, names)
