"""Means over labels that do not all count as 1 are found in a loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.hooks.label_means import LabelMeans

OUTPUT = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 0, 0, 1])
IGNORED = LABELS.masked_fill(torch.arange(6) == 5, -100)
WEIGHT = torch.tensor([1.0, 2.0, 3.0])
PIXELS, CLASSES = torch.randn(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.int64)
OVER_CLASSES, OVER_OTHERS = "class weights", "labels other than"


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda: F.cross_entropy(OUTPUT, LABELS), []),
        (lambda: F.cross_entropy(OUTPUT, LABELS, ignore_index=-1), []),
        (lambda: F.cross_entropy(OUTPUT, LABELS, weight=WEIGHT, reduction="sum"), []),
        (lambda: F.cross_entropy(OUTPUT, OUTPUT.softmax(1), weight=WEIGHT), []),
        (lambda: F.cross_entropy(OUTPUT, LABELS, weight=torch.full((3,), 0.1)), []),
        (lambda: F.cross_entropy(OUTPUT, LABELS, weight=WEIGHT), [(OVER_CLASSES, 10 / 6)]),
        (
            lambda: F.cross_entropy(OUTPUT, LABELS, weight=WEIGHT, label_smoothing=0.1),
            [(OVER_CLASSES, 10 / 6)],
        ),
        (lambda: F.cross_entropy(OUTPUT, IGNORED), [(f"{OVER_OTHERS} -100", 5 / 6)]),
        (lambda: F.nll_loss(OUTPUT, IGNORED), [(f"{OVER_OTHERS} -100", 5 / 6)]),
        (
            lambda: F.cross_entropy(PIXELS, CLASSES, ignore_index=255),
            [(f"{OVER_OTHERS} 255", 1.0)],
        ),
    ],
)
def test_means_that_are_weighted_by_labels(
    loss: Callable[[], Tensor], expected: list[tuple[str, float]]
) -> None:
    with LabelMeans(2) as means:
        loss()
    assert [(mean.over, pytest.approx(mean.weight)) for mean in means.found] == expected


@pytest.mark.parametrize(
    ("ignored", "expected"),
    [([2, 5], False), ([0, 4], False), ([4, 5], True), ([5], True)],
)
def test_a_mean_without_equally_many_labels_of_each_sample_may_differ(
    ignored: list[int], *, expected: bool
) -> None:
    labels = LABELS.index_fill(0, torch.tensor(ignored), -100)
    with LabelMeans(2) as means:
        F.cross_entropy(OUTPUT, labels)
        F.cross_entropy(OUTPUT, labels.clamp(min=0), ignore_index=0)
    assert [mean.may_differ for mean in means.found] == [expected, True]
