"""Texts of words with labels, and losses over words, that tests of sequences train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

import lockstep as ls


def texts_of(words: int, tokens: int, samples: int, seed: int = 3) -> TensorDataset:
    """Texts, and the word that follows each; the ends of texts are ignored."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(words, (samples, tokens + 1), generator=generator)
    labels = text[:, 1:].clone()
    for row, length in enumerate(torch.randint(2, tokens, (samples,), generator=generator)):
        labels[row, length:] = -100
    return TensorDataset(text[:, :-1].contiguous(), labels)


def cropped(rows: Sequence[Any]) -> list[Tensor]:
    """A batch as long as its longest text. The lengths of microbatches differ."""
    text, labels = default_collate(rows)
    longest = int((labels != -100).sum(1).max())
    return [text[:, :longest].contiguous(), labels[:, :longest].contiguous()]


def first(batch: Sequence[Tensor]) -> Tensor:
    return batch[0]


def count(batch: Sequence[Tensor]) -> Tensor:
    return (batch[1] != -100).sum()


def entropy(output: Tensor, batch: Sequence[Tensor]) -> ls.Sum:
    return ls.Sum(F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum"))


def weighted(output: Tensor, batch: Sequence[Tensor]) -> ls.Loss:
    """A loss whose weight the forward computes."""
    return ls.Loss(entropy(output, batch).total, count(batch))


def is_right(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return (output.argmax(2) == batch[1])[batch[1] != -100].double()
