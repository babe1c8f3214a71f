from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lockstep.data.loader import structure, structure_difference

Pair = namedtuple("Pair", ["x", "y"])
F, L = torch.zeros(2), torch.zeros(3, dtype=torch.int64)


@dataclass
class Record:
    x: object
    y: object


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (F, torch.ones(7, 7)),
        ([F, F], [F, F, F]),
        ([F, L], [F, L]),
        (((F, F), ({"y": L}, {"y": L})), ((F,), ({"y": L},))),
        (((F, F), ()), ((F,), ({"y": L},))),
        ({"x": F, "y": "a"}, {"y": None, "x": F}),
        (Record([F], 1), Record([], 2)),
        (Pair(np.zeros(2), F), Pair(np.ones(1), F)),
    ],
)
def test_batches_made_alike_allow_change_in_shapes_and_plain_values(then, now):
    assert structure_difference(structure(then), structure(now)) is None


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        (F, L, "batch is torch.int64 and was torch.float32"),
        (F, [F], "batch is a list and was torch.float32"),
        ([F, L], (F, L), "batch is a tuple and was a list"),
        ((F, L), Pair(F, L), "batch is a Pair and was a tuple"),
        ((F, F), (F, F, F), "batch has 3 parts and had 2 parts"),
        ({"x": (F, L)}, {"x": (F, L, L)}, "batch['x'] has 3 parts and had 2 parts"),
        (
            {"x": (F, F)},
            {"x": (F, L)},
            "batch['x'] has 2 parts and had any number of torch.float32",
        ),
        ([F, L], [F, L, L], "batch has 3 parts and had 2 parts"),
        ([F, F], [F, L], "batch has 2 parts and had any number of torch.float32"),
        ({"x": F, "y": L}, {"x": F}, "batch has ['x'] and had ['x', 'y']"),
        (
            {"x": [{"y": F}, L]},
            {"x": [{"y": L}, L]},
            "batch['x'][0]['y'] is torch.int64 and was torch.float32",
        ),
        (Record(F, [L]), Record(F, [F]), "batch['y'][0] is torch.float32 and was torch.int64"),
        (
            {"x": np.zeros(2)},
            {"x": "a"},
            "batch['x'] is no tensor or container and was an array of float64",
        ),
    ],
)
def test_a_difference_names_the_place_and_both_sides(then, now, words):
    assert structure_difference(structure(then), structure(now)) == words
