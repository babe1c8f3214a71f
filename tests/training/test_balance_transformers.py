"""The balance of mixtures of experts of transformers: routers are found, and with layers averaged
the balance loss is their own `aux_loss`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import run_files
import torch
from model.expert.families import CONFIGS, WORDS, family
from torch import Tensor, nn
from torch.nn import functional as F
from training.subjects import samples_at, state_of

import lockstep as ls
from lockstep.base.errors import RecipeError
from lockstep.model.expert.routers import find_routers

SAMPLES, TOKENS = 8, 10


def texts() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(WORDS, (SAMPLES, TOKENS), generator=generator)
    length = torch.randint(4, TOKENS + 1, (SAMPLES, 1), generator=generator)
    mask = (torch.arange(TOKENS) < length).long()
    return [{"input_ids": t, "attention_mask": m} for t, m in zip(text, mask, strict=True)]


def entropy(output: Any, batch: dict[str, Tensor]) -> ls.Sum:
    each = F.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="none"
    )
    return ls.Sum((each * batch["attention_mask"][:, 1:].flatten()).sum())


def recipe(name: str, **changes: Any) -> ls.Recipe:
    given: dict[str, Any] = {
        "model": partial(family, name),
        "data": texts(),
        "inputs": dict,
        "loss": entropy,
        "weight": lambda batch: batch["attention_mask"][:, 1:].sum(),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "global_batch": SAMPLES,
        "microbatch": 3,
        "steps": 1,
        "balance": ls.Balance(coefficient=0.5, over="step", per_layer=False),
        **changes,
    }
    return ls.Recipe(**given)


class First(ls.Hook):
    def on_start(self, run: Any) -> None:
        self.state = state_of(run.model)

    def on_finish(self, run: Any) -> None:
        self.last = state_of(run.model)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_layers_averaged_are_the_models_own_balance_loss(tmp_path: Path, name: str) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    first = First()
    ls.train(recipe(name), run_dir=str(tmp_path), hooks=[first], log_every=1)
    model: Any = family(name)
    model.load_state_dict(first.state)
    data = texts()
    batch = {
        key: torch.stack([data[place][key] for place in samples_at(0, SAMPLES, of=SAMPLES)])
        for key in data[0]
    }
    logits = model.model(**batch, output_router_logits=True).router_logits
    experts = logits[0].shape[-1]
    own = load_balancing_loss_func(logits, experts, 2, batch["attention_mask"])
    (row,) = run_files.metrics(tmp_path)
    assert row["loss/balance"] == pytest.approx(0.5 * float(own), rel=1e-5)


def test_the_routers_bias_of_deepseek_is_updated(tmp_path: Path) -> None:
    hook = First()
    balance = ls.Balance(coefficient=0.1, over="sample", scores="sigmoid", bias_rate=0.25)
    given = {"hooks": [hook], "log_every": 1}
    ls.train(recipe("deepseek-v3", balance=balance), run_dir=str(tmp_path), **given)  # type: ignore[arg-type]
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    moved = hook.last[name] - hook.state[name]
    (row,) = run_files.rows(tmp_path / "experts.jsonl")
    (loads,) = row["loads"].values()
    assert moved.tolist() == [0.25 * ((load < 1) - (load > 1)) for load in loads]
    assert moved.any()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_routers_of_transformers_are_found(name: str) -> None:
    model = family(name)
    layers = find_routers(model, None, None)
    place = "router" if name == "gpt-oss" else "gate"
    expected = (
        ["model.layers.1.mlp"]
        if name == "deepseek-v3"
        else [
            "model.layers.0.mlp",
            "model.layers.1.mlp",
        ]
    )
    assert [layer.router for layer in layers] == [f"{each}.{place}" for each in expected]
    if name == "deepseek-v3":
        (layer,) = find_routers(model, None, None, with_bias=True)
        assert layer.bias == f"{layer.router}.e_score_correction_bias"
    else:
        with pytest.raises(RecipeError, match="0 buffers around the router"):
            find_routers(model, None, None, with_bias=True)


def with_own_balance() -> nn.Module:
    model: Any = family("mixtral")
    model.config.output_router_logits = True
    return model  # type: ignore[no-any-return]


def asked_for(batch: dict[str, Tensor]) -> dict[str, Any]:
    return {**batch, "output_router_logits": True}


@pytest.mark.parametrize("changes", [{"model": with_own_balance}, {"inputs": asked_for}])
def test_a_balance_is_not_counted_twice(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="it adds a balance loss of its own"):
        ls.train(recipe("mixtral", **changes), run_dir=str(tmp_path))
