"""From patterns of module names to how each layer is cut, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model.expert.models import StackedExperts
from model.tensor.models import LAYERS, TIED, WIDTH, WORDS, Fused, Model
from torch import nn

from lockstep.base.errors import RecipeError
from lockstep.model.tensor.styles import kind_of, sizes_of, tensor_styles


class Conv1D(nn.Module):
    """The linear layer of GPT-2 in transformers, as far as its shape goes."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.zeros(nx, nf)), nn.Parameter(torch.zeros(nf))


class Heads(nn.Module):
    def __init__(self, **says: Any) -> None:
        super().__init__()
        self.attention = nn.Module()
        self.attention.query = nn.Linear(48, 48)
        for name, value in says.items():
            setattr(self.attention, name, value)


def layers(**named: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, module in named.items():
        model.add_module(name, module)
    return model


def test_patterns_are_matched_in_the_order_of_modules_and_the_last_counts() -> None:
    model = layers(first=nn.Linear(8, 8), second=nn.Linear(8, 8), third=nn.Linear(8, 8))
    given = {"*": "rowwise", "first": "colwise", "third": "replicated"}
    assert tensor_styles(model, given, 4) == {"first": "colwise", "second": "rowwise"}


def test_an_output_layer_tied_to_a_mapped_embedding_is_cut_like_it() -> None:
    alone = {**LAYERS, "words": "embedding"}
    assert (
        tensor_styles(Model(), alone, 2)
        == tensor_styles(Model(), TIED, 2)
        == tensor_styles(Model(), {**LAYERS, "head": "vocabulary"}, 2)
    )


def test_a_model_brings_its_own_map_and_the_recipe_goes_before_it() -> None:
    model: Any = layers(up=nn.Linear(8, 8), down=nn.Linear(8, 8))
    model.tensor_plan = {"up": "colwise", "down": "rowwise"}
    assert tensor_styles(model, None, 2) == model.tensor_plan
    assert tensor_styles(model, {"up": "colwise_gathered"}, 2) == {"up": "colwise_gathered"}


def hugging_face(plan: dict[str, str], base: dict[str, str]) -> Any:
    model: Any = layers(
        model=layers(up=nn.Linear(8, 8), norm=nn.LayerNorm(8)),
        lm_head=nn.Linear(8, 8),
        down=Conv1D(8, 8),
    )
    model.base_model_prefix, model._tp_plan, model.config = (
        "model",
        plan,
        SimpleNamespace(base_model_tp_plan=base),
    )
    return model


def test_a_plan_of_transformers_is_read_with_its_own_names() -> None:
    base = {"up": "colwise", "norm": "replicated_with_grad_allreduce", "experts.*": "rowwise"}
    model = hugging_face({"lm_head": "colwise_gather_output", "down": "rowwise_rep"}, base)
    assert tensor_styles(model, None, 2) == {
        "model.up": "colwise",
        "lm_head": "colwise_gathered",
        "down": "rowwise_split",
    }


def test_a_plan_of_transformers_may_cut_a_fused_layer_which_lies_by_heads() -> None:
    model = layers(attention=layers(query_key_value=nn.Linear(8, 24), dense=nn.Linear(8, 8)))
    model._tp_plan = {"*.query_key_value": "colwise", "*.dense": "rowwise"}  # type: ignore[assignment]
    assert tensor_styles(model, None, 2) == {
        "attention.query_key_value": "colwise",
        "attention.dense": "rowwise",
    }


def with_experts() -> Any:
    """A model of transformers whose plan names experts and their parameters."""
    experts = StackedExperts(4)
    experts.scale = nn.Linear(8, 4)
    model: Any = layers(mlp=layers(experts=experts, up=nn.Linear(8, 8)))
    model._tp_plan = {
        "mlp.experts": "moe_tp_experts",
        "mlp.experts.down": "packed_colwise",
        "mlp.experts.scale": "rowwise",
        "*.up": "colwise",  # matches a parameter of the experts too
    }
    return model


def test_a_plan_of_transformers_is_read_without_its_experts() -> None:
    assert tensor_styles(with_experts(), None, 2, experts=["mlp.experts"]) == {"mlp.up": "colwise"}


@pytest.mark.parametrize("named", ["mlp.experts", "mlp.experts.scale"])
def test_experts_in_a_map_of_ones_own_are_refused(named: str) -> None:
    given = {"*.up": "colwise", named: "sequence"}
    message = rf"'{named}', a module of experts; .* '\*.experts\*': 'replicated'"
    with pytest.raises(RecipeError, match=message):
        tensor_styles(with_experts(), given, 2, experts=["mlp.experts"])
    remedy = {**given, "*.experts*": "replicated"}
    assert tensor_styles(with_experts(), remedy, 2, experts=["mlp.experts"]) == {
        "mlp.up": "colwise"
    }


def test_a_style_of_transformers_that_is_not_known_is_named() -> None:
    with pytest.raises(
        RecipeError,
        match=(
            r"has 'model\.up': 'moe_tp_experts', an unknown style; the known styles are"
            r" .*give Recipe"
        ),
    ):
        tensor_styles(hugging_face({}, {"up": "moe_tp_experts"}), None, 2)


REFUSED: dict[str, tuple[nn.Module, Mapping[str, str] | None, int, str]] = {
    "no map": (
        layers(up=nn.Linear(8, 8)),
        None,
        2,
        r"without a map of its layers.*Recipe\(tensor=",
    ),
    "no match": (
        layers(up=nn.Linear(8, 8)),
        {"upp": "colwise"},
        2,
        r"Recipe.tensor has 'upp', which matches no module.*modules are up;",
    ),
    "unknown": (
        layers(up=nn.Linear(8, 8)),
        {"up": "column"},
        2,
        r"'up': 'column', an unknown style; the known styles are colwise, ",
    ),
    "kind": (
        layers(norm=nn.LayerNorm(8)),
        {"norm": "colwise"},
        2,
        r"'colwise' for 'norm' \(LayerNorm\); it is for linear or embedding",
    ),
    "embedding": (
        layers(e=nn.Embedding(8, 8)),
        {"e": "rowwise"},
        2,
        r"'rowwise' for 'e' \(Embedding\); it is for linear layers",
    ),
    "buffers": (
        layers(norm=nn.BatchNorm1d(8)),
        {"norm": "sequence"},
        2,
        r"'sequence' for 'norm' \(BatchNorm1d\), with .* buffers",
    ),
    "size": (
        layers(up=nn.Linear(8, 100)),
        {"up": "colwise"},
        3,
        r"up.weight of shape \(100, 8\) with tensor=3; .* shards its dim 0, and 100 is",
    ),
    "vocabulary": (
        layers(e=nn.Embedding(25, 8)),
        {"e": "embedding"},
        2,
        r"e.weight of shape \(25, 8\) with tensor=2; .*may be padded",
    ),
    "heads": (
        Heads(heads=6),
        {"*.query": "colwise"},
        4,
        r"attention has heads=6 with tensor=4; .* 6 is not a multiple of 4",
    ),
    "heads of a config": (
        Heads(config=SimpleNamespace(num_attention_heads=3)),
        {"*.query": "colwise"},
        4,
        r"num_attention_heads=3 with",
    ),
    "key heads": (
        Heads(num_key_value_heads=2, head_dim=24),
        {"*.query": "colwise"},
        4,
        r"num_key_value_heads=2 with tensor=4",
    ),
    "fused": (
        Model(Fused),
        {"*.c_attn": "colwise"},
        2,
        r"stacks several matrices; .*'colwise_gathered'.*'rowwise_split'",
    ),
    "inside": (
        layers(a=nn.MultiheadAttention(8, 2)),
        {"a.out_proj": "rowwise"},
        2,
        r"inside a torch.nn.MultiheadAttention",
    ),
    "tied": (
        Model(),
        {"words": "colwise", "head": "vocabulary"},
        2,
        r"modules 'words', 'head' share a weight.*in different ways",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused_with_the_value_the_rule_and_the_remedy(case: str) -> None:
    model, given, size, message = REFUSED[case]
    with pytest.raises(RecipeError, match=message):
        tensor_styles(model, given, size)


def test_heads_that_are_not_this_layers_do_not_matter() -> None:
    model = layers(
        block=layers(up=nn.Linear(WIDTH, 4 * WIDTH), down=nn.Linear(4 * WIDTH, WIDTH)),
        words=nn.Embedding(WORDS, WIDTH),
    )
    model.get_submodule("block").heads = 3  # type: ignore[assignment]
    assert tensor_styles(model, {"*.up": "colwise", "*.down": "rowwise"}, 4) == {
        "block.up": "colwise",
        "block.down": "rowwise",
    }


def test_a_layer_that_fsdp2_gathers_alone_is_what_it_was() -> None:
    layer = Conv1D(4, 8)
    layer.__class__ = type("FSDPConv1D", (Conv1D,), {})
    assert (kind_of(layer), sizes_of(layer)) == ("linear", (4, 8))
