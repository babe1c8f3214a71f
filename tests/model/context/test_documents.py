"""Documents of a batch: checked ids, positions that restart, and who may attend to whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.base.errors import DataError
from lockstep.model.context.documents import Documents

CPU = torch.device("cpu")
IDS = torch.tensor([[0, 0, 0, 4, 4, 9, -1, -1], [2, 3, 3, 3, 3, 3, 3, 3]])


def test_positions_restart_and_only_tokens_of_one_document_are_allowed() -> None:
    documents = Documents.of(IDS.int(), CPU)
    assert documents.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 1], [0, *range(7)]]
    some = torch.tensor([7, 0, 3])
    every = torch.arange(8)
    assert documents.places(some).tolist() == [[1, 0, 0], [6, 0, 2]]
    assert Documents.of(IDS[:1], CPU).places(some).tolist() == [1, 0, 0]
    allowed = documents.allowed(some, every)
    assert allowed.shape == (2, 1, 3, 8)
    for row in range(2):
        for at, query in enumerate(some):
            assert allowed[row, 0, at].tolist() == (IDS[row] == IDS[row, query]).tolist()
    assert documents.lengths == [[3, 2, 1, 2], [1, 7]]
    assert documents.lasts().nonzero().tolist() == [[0, 2], [0, 4], [0, 5], [1, 0]]


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (torch.tensor([[0, 0, 0], [1, 2, 1]]), "row 1 has the id 1 at token 2, after 2"),
        (torch.tensor([[0, -1, 0]]), "row 0 has the id 0 at token 2, after -1"),
        (torch.tensor([[-2, 0, 0]]), "row 0 has the id -2 at token 0;"),
        (torch.zeros(2, 3), "returned float32 of shape (2, 3)"),
        (torch.zeros(3, dtype=torch.long), "returned int64 of shape (3,)"),
        ([0, 0, 1], "returned a list"),
        ([torch.zeros(3, dtype=torch.long), torch.zeros(5, dtype=torch.long)], "rows of 3 to 5"),
    ],
)
def test_ids_that_say_no_documents_are_refused(ids: Any, text: str) -> None:
    with pytest.raises(DataError) as found:
        Documents.of(ids, CPU)
    assert text in str(found.value)
