"""The checks that documents in one row do not meet, in the model and in the labels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.base.errors import LossError, RecipeError
from lockstep.base.nested import map_tensors
from lockstep.model.chunked_logits import ChunkedLogits, Head
from lockstep.model.context.document_check import check_labels, check_model
from lockstep.model.context.documents import Documents

WORDS, WIDTH = 11, 8
CPU = torch.device("cpu")
IDS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 11 + [-1]])
TEXT = torch.randint(WORDS, IDS.shape, generator=torch.Generator().manual_seed(0))
TABLES = [
    torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(size)) for size in (WORDS, 32)
]


def attended(
    text: Tensor, documents: Documents, *, leaks: bool = False, restarts: bool = True
) -> Any:
    every = torch.arange(text.shape[1])
    places = documents.places(every) if restarts else every
    x = F.embedding(text, TABLES[0]) + F.embedding(places, TABLES[1])
    allowed = (every[:, None] >= every) & (documents.allowed(every, every) | leaks)
    (x,) = (F.scaled_dot_product_attention(*[x[:, None]] * 3, attn_mask=allowed).unbind(1),)[0]
    return {"logits": x @ TABLES[0].T}


def convolved(text: Tensor, documents: Documents) -> Any:
    return (
        attended(text, documents)["logits"]
        + F.pad(F.embedding(text, TABLES[0]).sum(2)[..., None], (0, 0, 1, 0))[:, :-1]
    )


def slightly(text: Tensor, documents: Documents) -> Any:
    """As with the small weights of a new model."""
    leak = attended(text, documents, leaks=True)["logits"]
    return attended(text, documents)["logits"] + 1e-3 * leak


def pooled(text: Tensor, documents: Documents) -> Any:
    return attended(text, documents)["logits"].mean(1)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda *a: attended(*a, leaks=True), "changes the model's output for the next document"),
        (slightly, "changes the model's output for the next document"),
        (convolved, "changes the model's output for the next document"),
        (lambda *a: attended(*a, restarts=False), "depends on its place in the row"),
        (pooled, "has no tensor of shape (samples, tokens, ...)"),
    ],
)
def test_models_in_which_documents_meet_are_refused(model: Any, text: str) -> None:
    documents = Documents.of(IDS, CPU)

    def call(arguments: dict[str, Tensor], documents: Documents) -> Any:
        return model(arguments["text"], documents)

    with pytest.raises(RecipeError) as found:
        check_model(call, {"text": TEXT}, documents)
    assert text in str(found.value)


def test_a_model_that_keeps_documents_apart_passes() -> None:
    calls = []

    def call(arguments: tuple[Tensor], documents: Documents) -> Any:
        calls.append(tuple(arguments[0].shape))
        return attended(arguments[0], documents)

    check_model(call, (TEXT,), Documents.of(IDS, CPU))
    assert calls == [(1, 12), (1, 12), (1, 6)]


def token_sum(shift: bool, penalty: float = 0.0) -> Callable[[Any, Any], Tensor]:
    def loss(output: Any, batch: Any) -> Tensor:
        logits, labels = output["logits"], batch["labels"]
        size = penalty * logits.logsumexp(2).square().sum() if penalty else 0.0
        if shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return size + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    return loss


def check_labels_of(loss: Any, output: Any, batch: Any, documents: Documents, most: int) -> bool:
    """Check the labels in windows of `most` tokens."""

    def part(batch: Any, row: int, start: int) -> tuple[Any, Any]:
        def cut(tensor: Tensor) -> Tensor:
            return tensor[row : row + 1, start : start + most]

        return map_tensors(output, cut), map_tensors(batch, cut)

    return check_labels(loss, part, most, batch, documents)


@pytest.mark.parametrize("most", [12, 5, 2])
def test_labels_at_the_cut_of_documents(most: int) -> None:
    check_labels = partial(check_labels_of, most=most)
    documents = Documents.of(IDS, CPU)
    output = {"logits": torch.randn(*IDS.shape, WORDS)}
    firsts = documents.lasts().roll(1, 1)
    following = TEXT.roll(-1, 1)
    tags = torch.randint(WORDS, IDS.shape, generator=torch.Generator().manual_seed(9))
    wrong = {True: TEXT, False: following}
    right = {
        True: TEXT.masked_fill(firsts, -100),
        False: following.masked_fill(documents.lasts(), -100),
    }
    for penalty in (0.0, 0.1):
        for shift in (True, False):
            loss = token_sum(shift, penalty)
            batch = {"text": TEXT, "labels": right[shift]}
            assert check_labels(loss, output, batch, documents)
            with pytest.raises(LossError) as found:
                check_labels(loss, output, {**batch, "labels": wrong[shift]}, documents)
            first = 5 if shift else 4
            assert f"a label at token {first} of row 0 with the output of token 4" in str(
                found.value
            )
    hidden, weight = torch.randn(*IDS.shape, WIDTH), torch.randn(WORDS, WIDTH)
    for head, is_seen in ((weight, True), (weight * 0, False)):
        chunked = ChunkedLogits.of(hidden, Head(head, None, (torch.float32,)), 2)
        batch = {"text": TEXT, "labels": right[True]}
        assert check_labels(token_sum(True), {"logits": chunked}, batch, documents) is is_seen
        if is_seen:
            batch["labels"] = TEXT
            with pytest.raises(LossError, match="a label at token 5 of row 0"):
                check_labels(token_sum(True), {"logits": chunked}, batch, documents)
    # labels of the tokens themselves, which a last token has too
    assert check_labels(token_sum(False), output, {"text": TEXT, "labels": tags}, documents)
    check_labels(
        token_sum(True), output, {"labels": TEXT}, Documents.of(IDS[1:].repeat(2, 1) * 0, CPU)
    )
