"""Which modules are a model's blocks."""

import pytest
import torch
from torch import nn

from lockstep.base.errors import RecipeError
from lockstep.model.blocks import blocks_of


class Transformer(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3))
        self.head = nn.Linear(8, 50, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


class Stages(nn.Module):
    """Lists of alike modules at several places, as in a ResNet."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.second = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def test_blocks_are_the_members_of_a_list_of_alike_modules():
    assert blocks_of(Transformer(), None) == ["layers.0", "layers.1", "layers.2"]


def test_every_such_list_counts_and_what_has_no_parameters_does_not():
    assert blocks_of(Stages(), None) == ["first.0", "first.1", "second.0", "second.2"]
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), None) == ["0", "2"]


def test_where_nothing_repeats_large_modules_are_blocks():
    model = nn.Sequential(nn.Conv1d(1, 20, 3), nn.Flatten(), nn.Linear(60, 40), nn.LayerNorm(40))
    assert blocks_of(model, None) == ["2"]


def test_a_model_may_have_no_block():
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

    assert blocks_of(Single(), None) == []


def test_what_shares_a_parameter_with_other_parts_is_no_block():
    class SharesParameter(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
            self.layers[2].weight = self.layers[0].weight

    assert blocks_of(SharesParameter(), None) == ["layers.1"]
    with pytest.raises(
        RecipeError, match=r"block 'layers.0' shares a parameter with a module outside of it"
    ):
        blocks_of(SharesParameter(), ["layers.*"])


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["layers.*"], ["layers.0", "layers.1", "layers.2"]),
        (["layers.1", "embedding"], ["embedding", "layers.1"]),
        (["layers.?.linear1"], ["layers.0.linear1", "layers.1.linear1", "layers.2.linear1"]),
    ],
)
def test_named_blocks_come_in_the_models_order(patterns, found):
    assert blocks_of(Transformer(), patterns) == found


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(
        RecipeError,
        match=(
            r"blocks have 'blocks.\*', which matches no module of the model; modules are embedding,"
            r" layers"
        ),
    ):
        blocks_of(Transformer(), ["blocks.*"])


def test_blocks_in_one_another_are_refused():
    with pytest.raises(RecipeError, match=r"'layers.0' and 'layers.0.linear1' are nested"):
        blocks_of(Transformer(), ["layers.0", "layers.0.linear1"])
