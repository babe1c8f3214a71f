"""Packs tokenized documents of different lengths into rows of one length.

Each group of `TOGETHER` consecutive documents is packed by best-fit decreasing. Documents keep
their order in a row, and rows are in the order of their first documents. A document longer than a
row is cut into pieces, which the model sees as documents. A piece begins with the last token of the
previous piece: each token but the document's first is predicted exactly once.

Do not change the rows: a run that is resumed, or repeated years later, must get the same rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.base.errors import DataError, RecipeError
from lockstep.recipe.checks import check_count
from lockstep.recipe.data import PackedStream, Stream, check_dataset

TOGETHER = 256
IGNORED_LABEL = -100
"""The label of a document's first token, and of padding."""
NO_DOCUMENT = -1
"""The document id of padding."""
Integers = NDArray[np.int64]
PLAIN = (
    "a document is a list, an array or a tensor of token ids, or a dict with them as input_ids, and"
    " perhaps labels, one for each of them"
)


class Piece(NamedTuple):
    """The tokens [start, stop) of a document."""

    document: int
    """Index of the document in its group."""
    start: int
    stop: int


class Document(NamedTuple):
    """The tokens of a document, and one label for each token (not shifted)."""

    tokens: Integers
    labels: Integers

    def cut(self, piece: Piece) -> Document:
        return Document(*(each[piece.start : piece.stop] for each in self))


def pieces_of(document: int, tokens: int, length: int) -> list[Piece]:
    starts = range(0, max(tokens - 1, min(tokens, 1)), length - 1)
    return [Piece(document, start, min(start + length, tokens)) for start in starts]


def packed_rows(lengths: Sequence[int], length: int) -> list[list[Piece]]:
    pieces = [
        piece
        for document, tokens in enumerate(lengths)
        for piece in pieces_of(document, tokens, length)
    ]
    sizes = [stop - start for _, start, stop in pieces]
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # sorted: (tokens left, row)
    for number in sorted(range(len(pieces)), key=sizes.__getitem__, reverse=True):
        place = bisect_left(room, (sizes[number], 0))
        if place < len(room):
            left, row = room.pop(place)
            rows[row].append(number)
        else:
            left, row = length, len(rows)
            rows.append([number])
        if left > sizes[number]:
            insort(room, (left - sizes[number], row))
    return [[pieces[number] for number in sorted(row)] for row in sorted(rows, key=min)]


def row_of(documents: Sequence[Document], length: int) -> dict[str, Tensor]:
    row = {
        "input_ids": np.zeros(length, np.int64),
        "labels": np.full(length, IGNORED_LABEL, np.int64),
        "document_ids": np.full(length, NO_DOCUMENT, np.int64),
        "position_ids": np.arange(length),
    }
    start = 0
    for number, (tokens, labels) in enumerate(documents):
        stop = start + len(tokens)
        row["input_ids"][start:stop] = tokens
        row["labels"][start + 1 : stop] = labels[1:]
        row["document_ids"][start:stop] = number
        row["position_ids"][start:] = np.arange(length - start)
        start = stop
    row["position_ids"][start:] = np.arange(length - start)
    return {name: torch.from_numpy(values) for name, values in row.items()}


def document_of(value: Any, name: str) -> Document:
    labels = None
    tokens = value
    if isinstance(value, Mapping):
        if "document_ids" in value:
            raise DataError(f"{name} has document_ids: it is packed; pack the documents themselves")
        if "input_ids" not in value:
            raise DataError(f"{name} has {list(value)} without input_ids; {PLAIN}; tokenize it")
        tokens, labels = value["input_ids"], value.get("labels")
        mask = value.get("attention_mask")
        if mask is not None and not np.asarray(mask).all():
            raise DataError(
                f"{name} has an attention_mask with 0: it is padded; rows are filled after packing;"
                " tokenize without padding"
            )
    ids = _integers(tokens, name)
    if labels is None:
        return Document(ids, ids)
    targets = _integers(labels, f"labels of {name}")
    if len(targets) != len(ids):
        raise DataError(
            f"{name} has {len(ids)} input_ids and {len(targets)} labels; each token needs one"
            " label, -100 if it is not to be predicted; correct them"
        )
    return Document(ids, targets)


def _integers(value: Any, name: str) -> Integers:
    try:
        numbers = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        numbers = np.empty(1, dtype=object)
    if numbers.ndim != 1 or not (np.issubdtype(numbers.dtype, np.integer) or not numbers.size):
        shape = f" of shape {numbers.shape}" if numbers.ndim != 1 else ""
        raise DataError(
            f"{name} is a {type(value).__name__}{shape}; {PLAIN}; tokenize it before it is packed"
        )
    return numbers.astype(np.int64)


class PackedDataset(Dataset[dict[str, Tensor]]):
    """A map-style dataset of rows, into which the documents of another dataset are packed."""

    def __init__(self, data: Any, length: int, lengths: Any) -> None:
        """If `lengths` is None, the dataset's method `lengths()` is called. If the dataset has no
        method `lengths()`, all documents are read."""
        self._data, self._length = data, length
        self._lengths = self._checked(lengths)
        self._latest: tuple[int, list[list[Piece]]] = (-1, [])
        counts = [len(self._packed(group)) for group in range(-(-len(data) // TOGETHER))]
        self._bounds = np.cumsum([0, *counts])
        """Index of the first row of each group of documents."""

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        group = int(np.searchsorted(self._bounds, row, side="right")) - 1
        if self._latest[0] != group:
            self._latest = group, self._packed(group)
        pieces = self._latest[1][row - int(self._bounds[group])]
        documents: dict[int, Document] = {}
        return row_of(list(self._cut(pieces, group * TOGETHER, documents)), self._length)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(epoch)

    def _cut(
        self, pieces: list[Piece], first: int, documents: dict[int, Document]
    ) -> Iterator[Document]:
        for piece in pieces:
            number = first + piece.document
            if number not in documents:
                documents[number] = self._document(number)
            yield documents[number].cut(piece)

    def _document(self, number: int) -> Document:
        document = document_of(self._data[number], f"document {number}")
        if len(document.tokens) != self._lengths[number]:
            raise DataError(
                f"document {number} has {len(document.tokens)} tokens, and {self._lengths[number]}"
                " when it was packed; rows depend on the lengths, so a document's length must not"
                " change; correct lengths, and leave out what changes the number of tokens at"
                " random"
            )
        return document

    def _packed(self, group: int) -> list[list[Piece]]:
        start = group * TOGETHER
        return packed_rows(self._lengths[start : start + TOGETHER].tolist(), self._length)

    def _checked(self, lengths: Any) -> Integers:
        if lengths is None and hasattr(self._data, "lengths"):
            lengths = self._data.lengths()
        if lengths is None:
            lengths = [
                len(document_of(self._data[number], f"document {number}").tokens)
                for number in range(len(self._data))
            ]
        try:
            numbers = np.asarray(lengths)
        except (TypeError, ValueError, RuntimeError) as error:  # rows of several lengths, a tensor
            raise DataError(
                f"pack(lengths) with a {type(lengths).__name__} that is no array of numbers"
                f" ({error}); it has the number of tokens of each document, a whole number of at"
                " least 0; correct them"
            ) from error
        if (
            numbers.shape != (len(self._data),)
            or not np.issubdtype(numbers.dtype, np.integer)
            or numbers.min() < 0
        ):
            raise DataError(
                f"pack(lengths) with shape {numbers.shape} and dtype {numbers.dtype} for"
                f" {len(self._data)} documents; it has the number of tokens of each document, a"
                " whole number of at least 0; correct them"
            )
        if not numbers.any():
            raise DataError(
                f"pack of {len(self._data)} documents without a token; a row has at least one;"
                " check what tokenizes them"
            )
        return numbers.astype(np.int64)


@overload
def pack(data: Stream, length: int) -> Stream: ...


@overload
def pack(data: Any, length: int, *, lengths: Any = None) -> PackedDataset: ...


def pack(data: Any, length: int, *, lengths: Any = None) -> Stream | PackedDataset:
    """Pack documents into rows of `length` tokens. Returns a dataset whose samples are rows, or for
    a `Stream`, a stream of rows.

    A document is a list, an array or a tensor of token ids, or a dict with `input_ids` and perhaps
    `labels`. Each group of 256 consecutive documents of `data` is packed separately: longest first,
    each into the fullest row with enough room. A document that is longer than a row is cut into
    pieces, each of which begins with the last token of the previous piece. Every other document is
    in exactly one row.

    A row is a dict of tensors with `length` elements: `input_ids`; `labels`, not shifted, -100 at
    the first token of each document; `document_ids`, which count from 0; `position_ids`, which
    restart with each document. The rest of a row has the token id 0, the label -100 and the
    document id -1.

    `lengths`: number of tokens of each document of a dataset. `lengths=None` calls the dataset's
    method `lengths()`. If the dataset has no method `lengths()`, every process reads all documents
    once. Raises `RecipeError` and `DataError`.
    """
    check_count("pack(length)", length, "tokens")
    if length < 2:
        raise RecipeError(
            f"pack(length={length}); a row has a token and the one that it predicts; give at least"
            " 2"
        )
    if not isinstance(data, Stream):
        check_dataset("pack(data)", data)
        return PackedDataset(data, length, lengths)
    if lengths is not None:
        raise RecipeError(
            "pack(lengths) with an ls.Stream, which is read in any case; leave them out"
        )
    return Stream(PackedStream(data, length), shards=data.shards)
