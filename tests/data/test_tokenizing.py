"""Tokenizing on the way: in the dataset, in the stream and in `collate`, by a fast tokenizer of
Hugging Face that has used its threads before the workers were forked."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import lockstep as ls
from lockstep.data.loader import Loader, Microbatch, Span, StreamLoader

tokenizers = pytest.importorskip("tokenizers", reason="Hugging Face's tokenizers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")

TEXTS = [" ".join(f"w{place * row % 17}" for place in range(1 + row % 9)) for row in range(300)]
STEPS = 6


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["?"])
    made.train_from_iterator(TEXTS, trainer)
    made.encode_batch(TEXTS)
    return made


class Tokenized:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, index: int) -> list[int]:
        ids: list[int] = self.tokenizer.encode(TEXTS[index]).ids
        return ids


def padded(tokenizer: Any, texts: list[str]) -> torch.Tensor:
    ids = [torch.tensor(each.ids) for each in tokenizer.encode_batch(texts)]
    return torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)


def streamed(tokenizer: Any, shard: int, epoch: int, start: int) -> Iterator[list[int]]:
    return (tokenizer.encode(text).ids for text in TEXTS[shard::2][start:])


def fetched(tokenizer: Any, how: str, workers: int, first: int = 0) -> list[Microbatch]:
    """Two microbatches a step; a stream continues after `first` steps where it stood."""
    options: dict[str, Any] = {"seed": 0, "workers": workers, "device": torch.device("cpu")}
    spans = [
        Span(step=step, index=index, start=6 * step + 3 * index, stop=6 * step + 3 * index + 3)
        for step in range(STEPS)
        for index in range(2)
    ]
    if how == "stream":
        stream = ls.pack(ls.Stream(partial(streamed, tokenizer), shards=2, window=8), 16)
        reader = StreamLoader(stream, **options)
        before = fetched(tokenizer, how, 0)[: 2 * first] if first else []
        positions = {each.origin.shard: each.origin.after for each in before if each.origin}
        found = list(reader.fetch(spans[2 * first :], microbatches=2, positions=positions))
        reader.close()
        return found
    loader = (
        Loader(ls.pack(Tokenized(tokenizer), 16), **options)
        if how == "dataset"
        else Loader(TEXTS, collate=partial(padded, tokenizer), **options)
    )
    found = list(loader.fetch(spans[2 * first :]))
    loader.close()
    return found


@pytest.mark.parametrize("how", ["dataset", "stream", "collate"])
def test_workers_tokenize_as_the_process_itself_and_go_on_in_the_midst(
    tokenizer: Any, how: str
) -> None:
    alone = fetched(tokenizer, how, 0)
    assert len(alone) == 2 * STEPS
    assert repr(fetched(tokenizer, how, 2)) == repr(alone)
    assert repr(fetched(tokenizer, how, 2, first=3)) == repr(alone[6:])
