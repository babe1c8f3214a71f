"""Models and losses that cannot be cut are refused before the first step, on every rank, with what
to do; right ones pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from model.context.models import GPT, shifted_before, shifting, text
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from worlds import ALONE, all_ranks

from lockstep.base.errors import LossError, RecipeError, UserError
from lockstep.model.context.cut import SequenceCut
from lockstep.model.context.exchange import TokenLayout
from lockstep.model.context.label_shift import BatchCut, find_shift, loss_of_part, scalars_of
from lockstep.recipe.recipe import Loss, Sum
from lockstep.recipe.sequence import Sequence
from lockstep.testing.pool import WorkerPool


class Recomputed(GPT):
    """Checkpoints its blocks itself."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)  # type: ignore[no-any-return]


class OneLength(GPT):
    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words) + self.table[:, :, :])  # type: ignore[no-any-return]


class Permuted(GPT):
    """Draws by what is not drawn by chunk."""

    def forward(self, words: Tensor) -> Tensor:
        torch.randperm(words.shape[1])
        return super().forward(words)


class Gated(GPT):
    """Begins with a gate that hides a convolution."""

    def __init__(self) -> None:
        super().__init__(extra="convolution")
        for block in self.blocks:
            torch.nn.init.zeros_(block.convolution.weight)
            torch.nn.init.zeros_(block.convolution.bias)


class Kept(GPT):
    """Keeps the longest table of positions that a forward has made."""

    kept: Tensor = torch.empty(0)

    def forward(self, words: Tensor) -> Tensor:
        tokens = words.shape[1]
        if tokens > len(self.kept):
            self.kept = torch.arange(tokens)
        x = self.words(words) + self.places(self.kept[:tokens])
        return self.head(x)  # type: ignore[no-any-return]


class Short(GPT):
    """Computes in bf16."""

    def forward(self, words: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(words).bfloat16()


class Counting(GPT):
    """Says that its forward updates a buffer."""

    self_updating_buffers = ("fixed",)


MADE: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "right": (GPT, ""),
    "right, a slice, noise, not causal": (
        lambda: GPT("slice", "noise", attention_dropout=0.1, causal=False),
        "",
    ),
    "convolution": (
        lambda: GPT(extra="convolution"),
        "(conv1d) computes a convolution over tokens",
    ),
    "convolution behind a gate": (Gated, "(conv1d) computes a convolution over tokens"),
    "convolution in bf16": (lambda: Short(extra="convolution"), "a convolution over tokens"),
    "right, in bf16": (Short, ""),
    "a table kept by a forward": (Kept, "(__getitem__) computes other rows for a part"),
    "mean over tokens": (lambda: GPT(extra="mean"), "(mean) computes a value of several tokens"),
    "own attention": (lambda: GPT(extra="own attention"), "computes attention of its own"),
    "own mask": (lambda: GPT(extra="own mask"), "its own mask (attn_mask)"),
    "batch norm": (lambda: GPT(extra="batch norm"), "blocks.0.batch_norm is a BatchNorm"),
    "a self-updating buffer": (Counting, "the model has self_updating_buffers = ('fixed',)"),
    "cumsum": (lambda: GPT("cumsum"), "(cumsum) computes a running sum over tokens"),
    "class token": (lambda: GPT(extra="class token"), "without a dim 1 of 32 tokens"),
    "multihead": (
        lambda: GPT(extra="multihead"),
        "blocks.0.multihead is a torch.nn.MultiheadAttention",
    ),
    "one length": (OneLength, "the model cannot compute the first 17 of 64 tokens"),
    "other numbers": (Permuted, "draws other random numbers"),
    "its own checkpointing": (
        lambda: Recomputed(reentrant=False),
        "in its own torch.utils.checkpoint",
    ),
    "its own reentrant checkpointing": (
        lambda: Recomputed(reentrant=True),
        "in its own torch.utils.checkpoint",
    ),
}


class Flat(GPT):
    """Drops out after samples and tokens are one dim."""

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words).flatten(0, 1)
        return self.head(F.dropout(x, 0.1)).view(*words.shape, -1)  # type: ignore[no-any-return]


PLANS: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, Any], str]] = {
    "random numbers without a sequence": (
        GPT,
        {"sequence": None},
        "context=2, and the model draws random numbers by dropout",
    ),
    "attention dropout without a sequence": (
        lambda: GPT(dropout=0.0, attention_dropout=0.1),
        {"sequence": None},
        "random numbers by scaled_dot_product_attention",
    ),
    "no random numbers": (lambda: GPT(dropout=0.0), {"sequence": None}, ""),
    "attention dropout by heads": (
        lambda: GPT(attention_dropout=0.1),
        {"exchange": "heads"},
        "exchange=heads, and attention with dropout_p=0.1",
    ),
    "odd heads": (
        lambda: GPT(heads=3),
        {"exchange": "heads"},
        "exchange=heads on context=2, and attention with 3 heads of keys",
    ),
    "odd heads, with what the error says": (lambda: GPT(heads=3), {}, ""),
    "more chunks than tokens": (
        GPT,
        {"sequence": Sequence(chunks=200)},
        "",
    ),
    "a rank without tokens": (
        GPT,
        {"sequence": Sequence(chunks=200), "tokens": 2},
        "a sequence of 2 tokens, in 200 chunks on context=2: rank",
    ),
    "dropout on flat tokens": (Flat, {}, "in which no single dim is the tokens"),
}


def plans_refused() -> dict[str, str]:
    found = {}
    for name, (make, options, _) in PLANS.items():
        options = {"sequence": Sequence(chunks=4), **options}
        batch = text(2, options.pop("tokens", 64))
        torch.manual_seed(0)
        cut = SequenceCut(make(), all_ranks(), **options)
        try:
            cut.check((batch["words"],), shifting, batch)
            cut.run((batch["words"],), batch)
            found[name] = ""
        except UserError as error:
            found[name] = str(error)
    return found


def test_a_plan_that_a_model_cannot_follow_is_refused(pool: WorkerPool) -> None:
    for found in pool.run(2, plans_refused):
        wrong = {
            name: said
            for name, said in found.items()
            if (PLANS[name][2] not in said if PLANS[name][2] else said)
        }
        assert wrong == {}


def refusals() -> dict[str, str]:
    batch = text(2, 64)
    found = {}
    for name, (make, _) in MADE.items():
        torch.manual_seed(0)
        cut = SequenceCut(make(), all_ranks(), Sequence(chunks=4))
        state = [each.clone() for each in cut._model.state_dict().values()]
        torch.manual_seed(3)
        before = torch.default_generator.get_state()
        try:
            cut.check((batch["words"],), shifting, batch)
            if "checkpointing" in name:
                cut.run((batch["words"],), batch)
            found[name] = ""
        except UserError as error:
            found[name] = str(error)
            if "checkpointing" in name:
                continue
        assert torch.equal(before, torch.default_generator.get_state()), name
        assert all(map(torch.equal, cut._model.state_dict().values(), state)), name
    return found


def test_a_model_that_mixes_tokens_is_refused_and_named(pool: WorkerPool) -> None:
    for found in pool.run(2, refusals):
        wrong = {
            name: said
            for name, said in found.items()
            if (MADE[name][1] not in said if MADE[name][1] else said)
        }
        assert wrong == {}


def mean(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def last(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output[:, -1], batch["labels"][:, -1].clamp(min=0), reduction="sum")


def two_ahead(output: Tensor, batch: Any) -> Tensor:
    pairs = output[:, :-2].flatten(0, 1), batch["labels"][:, 2:].flatten()
    return F.cross_entropy(*pairs, reduction="sum")


def of_the_mean(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.mean(1), batch["labels"][:, 0].clamp(min=0), reduction="sum")


def terms(output: Tensor, batch: Any) -> Any:
    return {"ce": Sum(shifting(output, batch)), "z": Loss(output[:, :-1].square().sum(), 3.0)}


def sum_terms(output: Tensor, batch: Any) -> Any:
    return {"ce": Sum(shifting(output, batch))}


def with_penalty(output: Any, batch: Any) -> Tensor:
    """Adds a small number that the model returns once."""
    return shifting(output[0], batch) + 1e-6 * output[1].square().sum()


def scaled(output: Any, batch: Any) -> Tensor:
    return shifting(output[0], batch) * output[1].exp().sum()


def test_a_term_that_is_not_for_each_token_counts_once() -> None:
    batch = text(2, 37)
    layout = TokenLayout(37, 8, replace(ALONE, size=2))
    output = torch.zeros(2, 37, 50), torch.ones(3)
    assert find_shift(scaled, output, batch, BatchCut(layout, 1, [True, True])) == 1
    with pytest.raises(LossError, match=r"a term of a tensor of shape \(3,\)"):
        find_shift(with_penalty, output, batch, BatchCut(layout, 1, [True, True]))


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def by_itself() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["more"] = value
    return value


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (None, "loss"),
        (itself(), "loss"),
        (object(), "loss"),
        (by_itself(), "more"),
        ({"ce": torch.ones(()), 1: itself()}, 1),
        ({"ce": Sum(torch.ones(())), "z": {}}, "z"),
    ],
)
def test_a_term_that_is_no_number_is_named(value: Any, name: Any) -> None:
    batch, output = text(2, 37), torch.zeros(2, 37, 50)
    cut = BatchCut(TokenLayout(37, 8, replace(ALONE, size=2)), 1, [True, True])
    refusal = pytest.raises(LossError, match=rf"term {name!r} of the loss is .* \(an? ")
    with refusal:
        find_shift(lambda *_: value, output, batch, cut)
    with refusal:
        loss_of_part(lambda *_: value, output, batch, cut, 0, 0)


def test_names_of_terms_need_not_be_of_one_type() -> None:
    terms = {"ce": Sum(torch.ones(())), 1: Loss(torch.ones(()), 2.0)}
    assert [*map(float, scalars_of(terms))] == [1.0, 2.0, 1.0]


def test_labels_longer_than_the_output_are_refused() -> None:
    words = torch.randint(50, (2, 38))
    layout = TokenLayout(37, 8, replace(ALONE, size=2))

    def loss(output: Tensor, batch: Tensor) -> Tensor:
        return shifted_before(output, {"labels": batch[:, 1:]})

    with pytest.raises(LossError, match=r"labels = text\[:, 1:\] in collate"):
        find_shift(loss, torch.zeros(2, 37, 50), words, BatchCut(layout, 1, [False]))


@pytest.mark.parametrize(
    ("loss", "shift"),
    [(shifting, 1), (shifted_before, 0), (sum_terms, 1)]
    + [(each, "not a sum over tokens") for each in (mean, last, two_ahead, of_the_mean, terms)],
)
@pytest.mark.parametrize(("ranks", "chunks"), [(2, 8), (3, 7), (2, 2), (2, 48)])
def test_the_shift_of_a_loss_is_found(
    loss: Callable[[Tensor, Any], Any], shift: int | str, ranks: int, chunks: int
) -> None:
    batch = text(2, 37)
    layout = TokenLayout(37, chunks, replace(ALONE, size=ranks))
    output = torch.zeros(2, 37, 50)
    if isinstance(shift, int):
        assert find_shift(loss, output, batch, BatchCut(layout, 1, [True, True])) == shift
        batch["labels"][:] = -100
        assert find_shift(loss, output, batch, BatchCut(layout, 1, [True, True])) is None
    else:
        with pytest.raises(LossError, match=shift):
            find_shift(loss, output, batch, BatchCut(layout, 1, [True, True]))


def if_any(output: Tensor, batch: Any) -> Any:
    """A loss that does not use the output if no token has a label."""
    labels = batch["labels"] != -100
    total = shifted_before(output, batch) if labels.any() else torch.zeros(())
    return {"ce": Loss(total, labels.sum())}


def all_detached(output: Tensor, batch: Any) -> Any:
    return {"ce": Sum(output.detach().square().sum())}


def test_a_part_without_labels_has_a_gradient_of_zeros() -> None:
    batch, layout = text(2, 37), TokenLayout(37, 8, replace(ALONE, size=2))
    batch["labels"][:, :-2] = -100
    output = torch.randn(2, layout.counts[1], 50, requires_grad=True)

    def total(loss: Callable[[Tensor, Any], Any]) -> Tensor:
        value = loss_of_part(loss, output, batch, BatchCut(layout, 1, [True, True]), 1, 0)
        return value["ce"].total  # type: ignore[no-any-return]

    total(if_any).backward()
    assert output.grad is not None
    assert not output.grad.any()
    assert not total(all_detached).requires_grad


class Shifting:
    """A loss without a hash."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        return shifting(output, batch)


def shift_of_one_label(only: int) -> tuple[int | None, int]:
    """Each text has one label, and a loop makes a loss for each step."""
    batch = text(2, 64)
    batch["labels"][:, :only], batch["labels"][:, only + 1 :] = -100, -100
    cut = SequenceCut(GPT(), all_ranks(), Sequence(chunks=4))
    loss = Shifting()
    cut.check((batch["words"],), loss, batch)
    output = cut.run((batch["words"],), batch)
    for _ in range(20):
        cut.loss(loss := Shifting(), output, batch)
    return cut._shifts.get(loss), len(cut._shifts._found)


@pytest.mark.parametrize("only", [37, 48])
def test_one_label_shows_the_shift(pool: WorkerPool, only: int) -> None:
    """48: the first token of a chunk."""
    assert pool.run(2, shift_of_one_label, only) == [(1, 16)] * 2


def test_positions_that_the_model_does_not_take_are_refused() -> None:
    said = r"Sequence.positions is 'places', but the model's forward takes words"
    with pytest.raises(RecipeError, match=said):
        SequenceCut(GPT(), ALONE, Sequence(positions="places"))
