"""`ls.pack`: each document once, in rows that follow from lengths; the loss of packed documents is
that of each by itself."""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from itertools import combinations, islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls
from lockstep.base.errors import DataError, RecipeError
from lockstep.data.packing import TOGETHER, packed_rows
from lockstep.data.positions import beginning, position_in
from lockstep.data.streams import shard_samples

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=30)


def documents(lengths: list[int]) -> list[list[int]]:
    """Each token says its document and its place in it."""
    return [[100 * number + place for place in range(n)] for number, n in enumerate(lengths)]


def some_lengths(count: int, most: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, most + 1, count).tolist()
    return found


@given(LENGTHS, st.integers(2, 12))
def test_each_token_is_in_a_row_and_each_but_the_first_of_a_document_is_predicted_once(
    lengths: list[int], length: int
) -> None:
    rows = packed_rows(lengths, length)
    tokens = Counter(
        (piece.document, place) for row in rows for piece in row for place in range(*piece[1:])
    )
    predicted = Counter(
        (piece.document, place)
        for row in rows
        for piece in row
        for place in range(piece.start + 1, piece.stop)
    )
    assert tokens.keys() == {
        (number, place) for number, n in enumerate(lengths) for place in range(n)
    }
    assert predicted == Counter(place for place in tokens if place[1])
    whole = [piece for row in rows for piece in row if lengths[piece.document] <= length]
    assert all((piece.start, piece.stop) == (0, lengths[piece.document]) for piece in whole)


@given(LENGTHS, st.integers(2, 12))
def test_rows_and_documents_are_in_order_and_no_two_rows_fit_into_one(
    lengths: list[int], length: int
) -> None:
    rows = packed_rows(lengths, length)
    assert rows == sorted(sorted(row) for row in rows)
    sizes = [sum(piece.stop - piece.start for piece in row) for row in rows]
    assert max(sizes, default=0) <= length
    assert all(one + other > length for one, other in combinations(sizes, 2))


def test_the_rows_never_change_between_versions() -> None:
    assert [
        " ".join(f"{number}:{start}-{stop}" for number, start, stop in row)
        for row in packed_rows([3, 9, 1, 4, 0, 17, 5, 2], 8)
    ] == ["0:0-3 6:0-5", "1:0-8", "1:7-9 7:0-2", "2:0-1 3:0-4 5:14-17", "5:0-8", "5:7-15"]


@given(LENGTHS, st.integers(2, 12))
def test_a_row_has_its_documents_one_after_another_and_is_filled_up(
    lengths: list[int], length: int
) -> None:
    if not any(lengths):
        return
    rows = ls.pack(documents(lengths), length)
    assert len(list(rows)) == len(rows)
    for row in rows:
        tokens, labels, ids, positions = (
            row[name].tolist() for name in ("input_ids", "labels", "document_ids", "position_ids")
        )
        end = ids.index(-1) if -1 in ids else length
        assert ids[:end] == sorted(ids[:end])
        assert set(ids[:end]) == set(range(max(ids) + 1))
        assert (set(tokens[end:]), set(labels[end:]), set(ids[end:])) in [
            ({0}, {-100}, {-1}),
            (set(), set(), set()),
        ]
        firsts = [place for place in range(length) if not place or ids[place] != ids[place - 1]]
        for start, stop in pairwise([*firsts, length]):
            assert positions[start:stop] == list(range(stop - start))
            if start < end:
                assert len({token // 100 for token in tokens[start:stop]}) == 1
                assert labels[start:stop] == [-100, *tokens[start + 1 : stop]]


def plain(row: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: values.tolist() for name, values in row.items()}


def stream_of(given: list[Any], **options: Any) -> ls.Stream:
    return ls.Stream(lambda shard, epoch, start: iter(given[start:]), shards=1, **options)


def rows_in(stream: ls.Stream, count: int, begin: Any = None) -> list[Any]:
    found = islice(shard_samples(stream, 0, seed=1, begin=begin or beginning(stream)), count)
    return [(str(sample.name), plain(sample.value), sample.after) for sample in found]


def test_a_stream_is_packed_as_a_dataset_of_its_documents() -> None:
    given = documents(some_lengths(2 * TOGETHER, 30))
    rows = [plain(row) for row in ls.pack(given, 16)]
    found = rows_in(ls.pack(stream_of(given), 16), len(rows) + 1)
    assert [row for _, row, _ in found] == [*rows, rows[0]]
    assert found[0][0] == "0 of packed shard 0 in epoch 0"
    assert found[-1][0] == "0 of packed shard 0 in epoch 1"


@pytest.mark.parametrize("kind", ["packed", "packed mixture", "mixture of packed"])
@settings(max_examples=5)
@given(st.data())
def test_a_packed_stream_goes_on_from_any_position_and_reads_few_documents_again(
    kind: str, data: st.DataObject
) -> None:
    asked = []

    def numbered(shard: int, epoch: int, start: int) -> Iterator[list[int]]:
        for number, n in enumerate(some_lengths(500, 30, seed=epoch)[start:], start=start):
            asked.append(number)
            yield [100 * number + place for place in range(n)]

    own = ls.Stream(numbered, shards=1, window=data.draw(st.integers(1, 8)))
    other = stream_of(documents(some_lengths(400, 30, seed=9)))
    stream = {
        "packed": lambda: ls.pack(own, 16),
        "packed mixture": lambda: ls.pack(ls.Stream.mix({"a": own, "b": other}, weights={"a": 2, "b": 1}), 16),
        "mixture of packed": lambda: ls.Stream.mix({"a": ls.pack(own, 16), "b": ls.pack(other, 16)}, weights={"a": 2, "b": 1}),
    }[kind]()  # fmt: skip
    whole = rows_in(stream, 500)
    place = data.draw(st.integers(0, 450))
    after = position_in(json.loads(json.dumps(whole[place][2])))
    assert after == whole[place][2]
    asked.clear()
    assert rows_in(stream, 40, after) == whole[place + 1 : place + 41]
    assert len(asked) <= 2 * (TOGETHER + 8) + 8


class Known:
    """Documents whose lengths are known; notes which are read."""

    def __init__(self, lengths: list[int]) -> None:
        self.known, self.given, self.read = lengths, documents(lengths), list[int]()
        self.epoch = 0

    def lengths(self) -> list[int]:
        return self.known

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, index: int) -> list[int]:
        self.read.append(index)
        return self.given[index]


def test_a_row_is_found_without_reading_others_where_lengths_are_known() -> None:
    data = Known(some_lengths(1000, 30))
    packed = ls.pack(data, 16)
    assert data.read == []
    row = packed[len(packed) - 3]
    assert sorted(set(data.read)) == sorted(
        set((row["input_ids"][row["document_ids"] >= 0] // 100).tolist())
    )
    assert len(data.read) == len(set(data.read)) < 16
    packed.set_epoch(3)
    assert data.epoch == 3
    again = pickle.loads(pickle.dumps(ls.pack(data.given, 16, lengths=np.array(data.known))))
    assert [plain(each) for each in again] == [plain(each) for each in packed]


def test_documents_are_lists_arrays_tensors_or_dicts_with_labels() -> None:
    tokens = [5, 6, 7]
    kinds = [
        tokens,
        tuple(tokens),
        np.array(tokens, np.int32),
        torch.tensor(tokens),
        {"input_ids": tokens, "attention_mask": [1, 1, 1], "text": "five"},
    ]
    rows = [plain(ls.pack([document], 4)[0]) for document in kinds]
    assert rows == [rows[0]] * len(kinds)
    assert rows[0] == {
        "input_ids": [5, 6, 7, 0],
        "labels": [-100, 6, 7, -100],
        "document_ids": [0, 0, 0, -1],
        "position_ids": [0, 1, 2, 0],
    }
    (answer,) = ls.pack([{"input_ids": tokens, "labels": [-100, -100, 7]}], 3)
    assert answer["labels"].tolist() == [-100, -100, 7]


WORDS = 40


class Bigrams(nn.Module):
    """Predicts from a token and its position: no token moves another's output."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.head = (
            nn.Embedding(WORDS, 8),
            nn.Linear(8, 16),
            nn.Linear(16, WORDS),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.hidden(self.words(tokens))))
        return logits


def mean_loss(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """Σ total / Σ weight, as a step has it."""
    totals = [
        F.cross_entropy(model(batch["input_ids"])[:-1], batch["labels"][1:], reduction="sum")
        for batch in batches
    ]
    return torch.stack(totals).sum() / sum(
        int((batch["labels"] != -100).sum()) for batch in batches
    )


@settings(max_examples=15)
@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=12), st.integers(2, 50), st.integers(0, 99)
)
def test_the_loss_of_packed_documents_is_that_of_each_by_itself(
    lengths: list[int], length: int, seed: int
) -> None:
    if max(lengths) < 2:
        return
    generator = torch.Generator().manual_seed(seed)
    given = []
    for n in lengths:
        tokens = torch.randint(WORDS, (n,), generator=generator)
        hidden = torch.rand(n, generator=generator) < 0.2  # a question, which is not learned
        given.append({"input_ids": tokens, "labels": tokens.masked_fill(hidden, -100)})
    alone = [
        {
            **each,
            "labels": each["labels"].index_fill(
                0, torch.zeros(min(1, len(each["labels"])), dtype=torch.long), -100
            ),
        }
        for each in given
    ]
    if not any((each["labels"] != -100).any() for each in alone):
        return
    torch.manual_seed(0)
    model = Bigrams().double()
    gradients = []
    for batches in (alone, list(ls.pack(given, length))):
        loss = mean_loss(model, [batch for batch in batches if len(batch["input_ids"])])
        gradients.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        ([[1]], {"length": 0}, RecipeError, "pack(length)=0; it counts tokens and must be"),
        ([[1]], {"length": 1}, RecipeError, "a row has a token and the one that it predicts; give at least 2"),
        ([], {}, DataError, "pack(data) is empty"),
        (DataLoader([1]), {}, DataError, "pack(data) is a DataLoader; lockstep makes the batches"),
        ([[], []], {}, DataError, "pack of 2 documents without a token; a row has at least one; check what tokenizes them"),
        ([[1], [2]], {"lengths": [1]}, DataError, "pack(lengths) with shape (1,) and dtype int64 for 2 documents"),
        ([[1], [2]], {"lengths": [[1], [1, 2]]}, DataError, "pack(lengths) with a list that is no array of numbers"),
        ([[1]], {"lengths": [1.0]}, DataError, "a whole number of at least 0; correct them"),
        ([[1]], {"lengths": [-1]}, DataError, "a whole number of at least 0; correct them"),
        (["text"], {}, DataError, "document 0 is a str of shape (); a document is a list, an array or a tensor of token ids, or a dict with them as input_ids, and perhaps labels, one for each of them; tokenize it before it is packed"),
        ([[1], [0.5]], {}, DataError, "document 1 is a list; a document is"),
        ([[1], [[1], [1, 2]]], {}, DataError, "document 1 is a list; a document is"),
        (TensorDataset(torch.ones(2, 3, dtype=torch.long)), {}, DataError, "document 0 is a tuple of shape (1, 3); a document is"),
        ([{"text": "five"}], {}, DataError, "document 0 has ['text'] without input_ids; a document is"),
        ([{"input_ids": [1, 2], "attention_mask": [1, 0]}], {}, DataError, "document 0 has an attention_mask with 0: it is padded; rows are filled after packing; tokenize without padding"),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, DataError, "document 0 has 2 input_ids and 1 labels; each token needs one label, -100"),
        (ls.pack([[1, 2]], 4), {}, DataError, "document 0 has document_ids: it is packed; pack the documents themselves"),
        (stream_of([[1]]), {"lengths": [1]}, RecipeError, "pack(lengths) with an ls.Stream, which is read in any case; leave them out"),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_is_refused(
    data: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        ls.pack(data, **{"length": 4, **options})


def test_a_document_whose_length_is_not_what_was_said_is_refused() -> None:
    packed = ls.pack(documents([3, 2]), 8, lengths=[3, 4])
    with pytest.raises(DataError) as caught:
        packed[0]
    assert str(caught.value) == (
        "document 1 has 2 tokens, and 4 when it was packed; rows depend on the lengths, so a"
        " document's length must not change; correct lengths, and leave out what changes the number"
        " of tokens at random"
    )


def test_a_stream_that_cannot_be_packed_is_refused_where_it_is_read() -> None:
    with pytest.raises(DataError, match=r"^document 0 of shard 0 in epoch 0 is a str of shape"):
        rows_in(ls.pack(stream_of(["text"]), 8), 1)
    with pytest.raises(
        DataError, match=f"^{TOGETHER} documents without a token, from document 0 of"
    ):
        rows_in(ls.pack(stream_of([[]] * 9), 8), 1)
