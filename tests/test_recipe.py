"""Recipes: what is refused when one is made, by the text, and how one is described."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.base.errors import DataError, RecipeError


def nothing(*_: Any) -> None:
    return None


def recipe(**changes: Any) -> ls.Recipe:
    given = {
        "model": nothing,
        "data": [1, 2, 3],
        "loss": nothing,
        "optimizer": nothing,
        "global_batch": 8,
        "microbatch": 4,
        "steps": 5,
    }
    return ls.Recipe(**{**given, **changes})


def evaluation(**changes: Any) -> ls.Evaluation:
    return ls.Evaluation(**{"data": [1], **changes})


def weights(**changes: Any) -> ls.Weights:
    return ls.Weights(**{"path": "w.safetensors", **changes})


class Fetched:
    """All samples at once, and none alone."""

    def __len__(self) -> int:
        return 3

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class HasNothing:
    """A loss whose `__getattr__` raises another error than AttributeError."""

    def __call__(self, model: Any, batch: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Shapeless:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (
            recipe,
            {"global_batch": 0},
            "Recipe.global_batch=0; it counts samples and must be a whole number of at least 1",
        ),
        (
            recipe,
            {"weights": 5},
            "weights is 5 (a int); it must be a path, ls.Weights(path, names=..., missing=...), or None",
        ),
        (
            weights,
            {"path": ""},
            "Weights(''); it takes the path of a file or of a Hugging Face folder as a str",
        ),
        (
            weights,
            {"missing": "drop"},
            "Weights(missing='drop'); it must be 'refuse', or 'keep' to keep the model's initial values",
        ),
        (
            weights,
            {"names": ["a"]},
            (
                "Weights(names=['a']); it maps names in the file to names in the model:"
                " {'module.*': '*'}"
            ),
        ),
        (
            weights,
            {"names": {"a": 1}},
            "Weights.names has 'a': 1; a name is a str, and None skips a tensor",
        ),
        (
            weights,
            {"names": {"a.*": "b"}},
            (
                "Weights.names has 'a.*': 'b'; `*` is the same text on both sides; write it once on"
                " each"
            ),
        ),
        (
            weights,
            {"names": {"*.a.*": None}},
            "Weights.names has '*.a.*': None; `*` is the same text on both sides",
        ),
        (recipe, {"global_batch": -8}, "Recipe.global_batch=-8; it counts samples"),
        (recipe, {"global_batch": 8.0}, "Recipe.global_batch=8.0; it counts samples"),
        (recipe, {"global_batch": True}, "Recipe.global_batch=True; it counts samples"),
        (
            recipe,
            {"microbatch": 0},
            "Recipe.microbatch=0; it counts samples and must be a whole number of at least 1",
        ),
        (
            recipe,
            {"microbatch": 9},
            (
                "microbatch=9 is larger than global_batch=8; a microbatch is a part of a"
                " global batch; give microbatch=8 or less, or a larger global_batch"
            ),
        ),
        (
            recipe,
            {"steps": None},
            "steps=None and epochs=None; a recipe has one length; give exactly one of the two",
        ),
        (
            recipe,
            {"epochs": 2},
            "steps=5 and epochs=2; a recipe has one length; give exactly one of the two",
        ),
        (
            recipe,
            {"steps": 0},
            "Recipe.steps=0; it counts steps and must be a whole number of at least 1",
        ),
        (recipe, {"steps": None, "epochs": 0}, "Recipe.epochs=0; it counts epochs"),
        (
            recipe,
            {"clip_norm": 0.0},
            "clip_norm=0.0; a maximum norm is positive and finite; None turns clipping off",
        ),
        (recipe, {"clip_norm": -1}, "clip_norm=-1; a maximum norm is positive"),
        (recipe, {"clip_norm": math.inf}, "clip_norm=inf; a maximum norm is positive and finite"),
        (recipe, {"clip_norm": math.nan}, "clip_norm=nan; a maximum norm is positive and finite"),
        (recipe, {"clip_norm": "1"}, "clip_norm='1'; a maximum norm is positive"),
        (recipe, {"sequence": 16}, "sequence is 16 (a int); give ls.Sequence(dim=1, chunks=16)"),
        (
            ls.Sequence,
            {"dim": 0},
            "Sequence.dim=0; it counts dims before that of the tokens (dim 0: samples) and must be",
        ),
        (ls.Sequence, {"chunks": 0}, "Sequence.chunks=0; it counts chunks of a sequence and must"),
        (
            ls.Sequence,
            {"documents": "document"},
            "Sequence.documents is 'document' (a str); it must be a function or None",
        ),
        (
            ls.Sequence,
            {"positions": "position ids"},
            "Sequence.positions is 'position ids' (a str); it must be the name of a keyword argument",
        ),
        (recipe, {"precision": "fp8"}, "precision='fp8'; the known values are fp32, bf16, fp16"),
        (
            recipe,
            {"gradient_compression": "int4"},
            (
                "gradient_compression='int4'; the known values are none, bf16, fp16, int8 and powersgd:RANK,"
                " such as powersgd:4"
            ),
        ),
        (
            recipe,
            {"gradient_compression": None},
            "gradient_compression=None; the known values are none",
        ),
        (
            recipe,
            {"gradient_compression": "int8:2"},
            "gradient_compression='int8:2'; the known values are none",
        ),
        (
            recipe,
            {"gradient_compression": "powersgd"},
            (
                "gradient_compression='powersgd'; the rank of powersgd is a whole number of at"
                " least 1 after a colon"
            ),
        ),
        (
            recipe,
            {"gradient_compression": "powersgd:0"},
            (
                "gradient_compression='powersgd:0'; the rank of powersgd is a whole number of at"
                " least 1"
            ),
        ),
        (
            recipe,
            {"gradient_compression": "powersgd:-1"},
            "gradient_compression='powersgd:-1'; the rank of powersgd is",
        ),
        (
            recipe,
            {"gradient_compression": "powersgd:two"},
            "gradient_compression='powersgd:two'; the rank of powersgd is",
        ),
        (recipe, {"seed": -1}, "seed=-1; a seed is a whole number from 0 to 2**63 - 1"),
        (recipe, {"seed": 2**63}, "seed=9223372036854775808; a seed is a whole number"),
        (recipe, {"seed": 1.5}, "seed=1.5; a seed is a whole number"),
        (
            recipe,
            {"model": nn.Linear(2, 2)},
            (
                "Recipe.model is a Linear, not a function that makes one; every process builds its"
                " own, after"
            ),
        ),
        (
            recipe,
            {"optimizer": torch.optim.SGD([torch.ones(1)])},
            "Recipe.optimizer is a SGD, not a function that makes one; every",
        ),
        (recipe, {"model": 3}, "Recipe.model is 3 (a int); it must be a function"),
        (recipe, {"loss": None}, "Recipe.loss is None (a NoneType); it must be a function"),
        (
            recipe,
            {"optimizer": "adam"},
            "Recipe.optimizer is 'adam' (a str); it must be a function",
        ),
        (
            recipe,
            {"loss": HasNothing()},
            "Recipe.loss is a HasNothing, whose __getattr__ raises RuntimeError for an attribute",
        ),
        (recipe, {"inputs": 1}, "Recipe.inputs is 1 (a int); it must be a function or None"),
        (recipe, {"weight": 1}, "Recipe.weight is 1 (a int); it must be a function or None"),
        (recipe, {"collate": 1}, "Recipe.collate is 1 (a int); it must be a function or None"),
        (
            recipe,
            {"schedule": 0.1},
            "Recipe.schedule is 0.1 (a float); it must be a function or None",
        ),
        (
            recipe,
            {"evaluation": [1]},
            (
                "evaluation is [1] (a list); give ls.Evaluation(data=..., every=..., metrics=...), "
                "several by name {'valid': ls.Evaluation(...)}, or None"
            ),
        ),
        (
            evaluation,
            {"every": 0},
            "Evaluation.every=0; it counts steps and must be a whole number of at least 1",
        ),
        (evaluation, {"microbatch": 0}, "Evaluation.microbatch=0; it counts samples"),
        (
            evaluation,
            {"metrics": {"accuracy": nothing}},
            "Evaluation.metrics['accuracy'] is <function",
        ),
        (
            evaluation,
            {"metrics": {"loss": ls.Mean(nothing)}},
            "Evaluation.metrics has a metric named 'loss'; that name belongs to the recipe's loss",
        ),
        (
            evaluation,
            {"metrics": {"loss/a": ls.Mean(nothing)}},
            (
                "Evaluation.metrics has a metric named 'loss/a'; that name belongs to the recipe's"
                " loss or a term; choose another"
            ),
        ),
        (
            evaluation,
            {"metrics": {3: ls.Mean(nothing)}},
            "Evaluation.metrics has a metric named 3 (a int); a name is a str; name it '3'",
        ),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused_when_it_is_made(
    make: Callable[..., Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        make(**changes)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("make", "data", "message"),
    [
        (
            recipe,
            [],
            (
                "Recipe.data is empty (its len() is 0); training needs at least one sample; check"
                " the path or the filter that made it"
            ),
        ),
        (
            recipe,
            iter([1]),
            (
                "Recipe.data is a list_iterator; it must be a map-style dataset, with len(data) and"
                " data[i]"
            ),
        ),
        (recipe, None, "Recipe.data is a NoneType; it must be a map-style dataset"),
        (recipe, {1, 2}, "Recipe.data is a set; it must be a map-style dataset"),
        (
            recipe,
            Shapeless(),
            "Recipe.data is a Shapeless; it must be a map-style dataset, with len(data)",
        ),
        (evaluation, [], "Evaluation.data is empty (its len() is 0)"),
    ],
)
def test_data_that_are_no_dataset_are_refused_when_the_recipe_is_made(
    make: Callable[..., Any], data: Any, message: str
) -> None:
    with pytest.raises(DataError) as caught:
        make(data=data)
    assert str(caught.value).startswith(message)


def test_a_metric_of_another_kind_is_told_which_kinds_there_are() -> None:
    with pytest.raises(
        RecipeError,
        match=(
            r"a metric is ls\.Mean\(values\) if it is a mean over samples \(accuracy\), or"
            r" ls\.Gathered\("
        ),
    ):
        evaluation(metrics={"accuracy": 0.9})


def test_a_microbatch_of_the_whole_batch_and_data_that_are_fetched_at_once_are_fine() -> None:
    assert recipe(microbatch=8, data=Fetched()).microbatch == 8


def test_a_recipe_is_frozen_and_takes_keywords_only() -> None:
    with pytest.raises(FrozenInstanceError):
        recipe().seed = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        ls.Recipe(nothing)  # type: ignore[misc]


def test_a_recipe_describes_itself_in_json() -> None:
    metrics = {"accuracy": ls.Mean(nothing), "auc": ls.Gathered(nothing, sum)}
    described = recipe(
        evaluation=evaluation(metrics=metrics, every=3),
        weight=nothing,
        clip_norm=1.0,
        sequence=ls.Sequence(chunks=8),
    ).describe()
    assert json.loads(json.dumps(described)) == described
    assert described["global_batch"] == 8
    assert described["clip_norm"] == 1.0
    assert described["schedule"] is None
    assert described["sequence"] == {"dim": 1, "chunks": 8, "documents": None, "positions": None}
    assert described["data"] == "builtins.list[3]"
    assert described["model"] == f"{__name__}.nothing"
    assert described["evaluation"]["every"] == 3
    assert described["evaluation"]["data"] == "builtins.list[1]"
    assert list(described["evaluation"]["metrics"]) == ["accuracy", "auc"]


def test_a_script_has_one_name_whatever_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a run that ls.spawn began could not go on under `lockstep run`."""
    monkeypatch.setattr(nothing, "__module__", "__mp_main__")
    spawned = recipe(model=nothing).describe()
    monkeypatch.setattr(nothing, "__module__", "__main__")
    assert spawned == recipe(model=nothing).describe()
    assert spawned["model"] == "__main__.nothing"


def test_weights_are_described_alike_however_they_are_given() -> None:
    said = {"path": "w.safetensors", "names": {"module.*": "*", "head.*": None}, "missing": "keep"}
    assert recipe(weights=ls.Weights(**said)).describe()["weights"] == said
    plain = {"path": "w.safetensors", "names": {}, "missing": "refuse"}
    for given in ("w.safetensors", Path("w.safetensors"), ls.Weights("w.safetensors")):
        assert recipe(weights=given).describe()["weights"] == plain
    assert recipe().describe()["weights"] is None
