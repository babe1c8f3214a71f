"""A model whose sequences are cut computes what it computes on one process: loss and gradients,
with dropout, under both exchanges, checkpointing and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model.context.models import GPT, WORDS, shifted_before, shifting, text
from model.tensor.models import mesh_of
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import ALONE, all_ranks

from lockstep.base.errors import LossError, RecipeError
from lockstep.comm.mesh import Mesh, full_tensor
from lockstep.comm.world import World
from lockstep.model.block_wrappers import checkpoint_activations
from lockstep.model.chunked_logits import chunk_logits
from lockstep.model.context.cut import SequenceCut
from lockstep.recipe.sequence import Sequence
from lockstep.testing.pool import WorkerPool

Case = tuple[dict[str, Any], str, str, int]
"""The model, the exchange, what it is wrapped in, and the tokens."""
CASES: dict[str, Case] = {
    "arange": ({}, "keys", "", 37),
    "a slice": ({"positions": "slice"}, "heads", "", 37),
    "a buffer": ({"positions": "buffer"}, "auto", "", 24),
    # as many tokens on each of two or three ranks as features, or heads
    "sizes equal by chance": ({}, "heads", "", 48),
    "noise": ({"extra": "noise"}, "auto", "", 37),
    "experts": ({"extra": "experts", "positions": "slice"}, "auto", "", 37),
    "not causal": ({"causal": False}, "keys", "", 37),
    "attention dropout": ({"attention_dropout": 0.1}, "auto", "", 37),
    "attention dropout, not causal": ({"attention_dropout": 0.1, "causal": False}, "auto", "", 37),
    "checkpointing": ({"positions": "slice", "extra": "noise"}, "keys", "full", 37),
    "selective checkpointing": ({"attention_dropout": 0.1}, "auto", "selective", 37),
    "checkpointing by heads": ({}, "heads", "full", 37),
    "shards": ({}, "auto", "shard", 37),
    "shards and checkpointing": ({}, "keys", "shard,full", 37),
    "shards, selective": ({"positions": "slice"}, "keys", "shard,selective", 37),
    "chunked logits": ({}, "auto", "chunked", 37),
    "chunked logits, shards": ({}, "keys", "chunked,shard", 37),
    "chunked logits, checkpointing": ({"extra": "noise"}, "heads", "chunked,shard,full", 24),
}


def step(
    world: World, case: Case, loss: Callable[[Tensor, Any], Tensor], chunks: int, mesh: Mesh
) -> tuple[float, list[Tensor]]:
    """The loss and the gradients of one microbatch, summed over the axis."""
    options, exchange, wrapped, tokens = case
    torch.manual_seed(0)
    model, batch = GPT(**options).double(), text(2, tokens)
    if world.size > 1 and "chunked" in wrapped:
        chunk_logits(model, "head")
    if world.size > 1 or "shard" not in wrapped:
        for block in model.blocks:
            for mode in ("full", "selective"):
                if mode in wrapped:
                    checkpoint_activations(block, mode)  # type: ignore[arg-type]
    if world.size > 1 and "shard" in wrapped:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh.torch_mesh).set_gradient_divide_factor(1.0)
    cut = SequenceCut(model, world, Sequence(chunks=chunks), exchange)  # type: ignore[arg-type]
    total = torch.zeros((), dtype=torch.float64)
    for seed in (5, 6):
        torch.manual_seed(seed)
        value = cut.loss(loss, cut.run((batch["words"],), batch), batch)
        value.backward()
        total += value.detach()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if world.size > 1:
        dist.all_reduce(total)
        if "shard" not in wrapped:
            for gradient in gradients:
                dist.all_reduce(gradient)
    return total.item(), [full_tensor(gradient) for gradient in gradients]


ON_THREE = (
    "a slice",
    "a buffer",
    "sizes equal by chance",
    "experts",
    "attention dropout",
    "checkpointing by heads",
    "shards, selective",
    "chunked logits, checkpointing",
)


def far_off(cases: tuple[str, ...], chunks: int) -> dict[str, float]:
    found, mesh = {}, mesh_of(shard=dist.get_world_size())
    for number, name in enumerate(cases):
        case, loss = CASES[name], (shifting, shifted_before)[number % 2]
        total, gradients = step(all_ranks(), case, loss, chunks, mesh)
        truth, expected = step(ALONE, case, loss, chunks, mesh)
        off = [
            ((one - other).norm() / other.norm()).item()
            for one, other in zip(gradients, expected, strict=True)
        ]
        found[name] = max(abs(total - truth) / truth, *off)
    return {name: off for name, off in found.items() if not off <= 1e-14}


@pytest.mark.parametrize(
    ("ranks", "cases", "chunks"), [(2, (*CASES,), 8), (3, ON_THREE, 7)], ids=["2", "3"]
)
def test_the_gradients_of_one_process(
    pool: WorkerPool, ranks: int, cases: tuple[str, ...], chunks: int
) -> None:
    assert pool.run(ranks, far_off, cases, chunks) == [{}] * ranks


DOCUMENTS = [[9, 20, 8], [1, 30, 6]]
"""Tokens of the documents in each row."""


def of_documents(positions: str, attention: str, exchange: str) -> float:
    """The relative distance of the gradients of two rows from those of their documents alone."""
    torch.manual_seed(0)
    model = GPT(positions, dropout=0.0, causal=attention == "causal").double()
    batch = text(2, 37)
    rows = [[document for document, n in enumerate(row) for _ in range(n)] for row in DOCUMENTS]
    batch["document"] = torch.tensor(rows)
    batch["labels"][:, 1:][batch["document"].diff(dim=1) != 0] = -100
    cut = SequenceCut(
        model,
        all_ranks(),
        Sequence(chunks=7, documents=lambda batch: batch["document"]),
        exchange,  # type: ignore[arg-type]
    )
    cut.check((batch["words"],), shifting, batch)
    cut.loss(shifting, cut.run((batch["words"],), batch), batch).backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for gradient in found:
        dist.all_reduce(gradient)
    model.zero_grad()
    for row, lengths in enumerate(DOCUMENTS):
        for words, labels in zip(
            batch["words"][row].split(lengths), batch["labels"][row].split(lengths), strict=True
        ):
            shifting(model(words[None]), {"labels": labels[None]}).backward()
    expected = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return max(
        ((one - other).norm() / other.norm()).item()
        for one, other in zip(found, expected, strict=True)
    )


def all_of_documents() -> dict[str, float]:
    cases = [("arange", "causal", "keys"), ("slice", "causal", "heads"), ("buffer", "", "keys")]
    cases += [("arange", "", "heads"), ("slice", "", "auto")]
    found = {str(case): of_documents(*case) for case in cases}
    return {case: off for case, off in found.items() if not off <= 1e-13}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_gradients_of_documents_alone(pool: WorkerPool, ranks: int) -> None:
    assert pool.run(ranks, all_of_documents) == [{}] * ranks


class Largest(TorchDispatchMode):
    """Records the most tokens with a number for each word that a call returns."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor) and each.is_floating_point() and WORDS in each.shape:
                self.tokens = max(self.tokens, each.numel() // WORDS)
        return result


def most_logits(ranks: int) -> dict[str, int]:
    """The most logits of a step, or of what is tried before it, on texts of 1024 tokens with a
    label late in the second row, on so many ranks."""
    batch = text(2, 1024, ignored=0.0)
    batch["labels"][0], batch["labels"][1, :600], batch["labels"][1, 602:] = -100, -100, -100
    batch["document"] = torch.arange(1024).gt(400).long().expand(2, -1)
    found = {}
    for kind in ("whole", "chunked"):
        model = GPT("none", dropout=0.0)
        if kind == "chunked":
            chunk_logits(model, "head")
        sequence = Sequence(chunks=4, documents=lambda batch: batch["document"])
        cut = SequenceCut(model, all_ranks() if ranks > 1 else ALONE, sequence)
        with Largest() as largest:
            cut.check((batch["words"],), shifting, batch)
            if kind == "chunked":
                cut.loss(shifting, cut.run((batch["words"],), batch), batch).backward()
        if kind == "whole":
            output = cut.run((batch["words"],), batch)
            with largest, torch.no_grad():
                layout = cut.current.layout
                cut._check_labels(shifting, output, layout.local, batch, cut.current)
                if ranks > 1:
                    cut._find_shift(shifting, output, layout, batch, cut.current)
        found[kind] = largest.tokens
    assert cut._shifts.get(shifting) == (1 if ranks > 1 else None)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_check_and_no_loss_of_chunks_makes_logits_of_all_tokens(
    pool: WorkerPool, ranks: int
) -> None:
    for found in pool.run(ranks, most_logits, ranks):
        assert found["whole"] <= 2 * 32 * 2, "of some tokens for each chunk"
        assert found["chunked"] <= 2 * 1024 / ranks / 2, "at most half of the tokens"


def kept(world: World, exchange: str) -> int:
    """The bytes that a forward keeps for the backward."""
    torch.manual_seed(0)
    model, batch = GPT("none", dropout=0.0), text(1, 256)
    sizes = {parameter.untyped_storage().data_ptr(): 0 for parameter in model.parameters()}
    tensors = []

    def pack(tensor: Tensor) -> Tensor:
        tensors.append(tensor)  # its address is not used again
        sizes.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    cut = SequenceCut(model, world, Sequence(chunks=8), exchange)  # type: ignore[arg-type]
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        cut.run((batch["words"],), batch)
    return sum(sizes.values())


def shares_kept() -> list[float]:
    alone_too = kept(ALONE, "auto")
    return [kept(all_ranks(), exchange) / alone_too for exchange in ("keys", "heads")]


def test_ranks_keep_their_share_of_the_activations(pool: WorkerPool) -> None:
    """The keys and values of a rank, which lockstep keeps, are in one tensor with its queries."""
    for shares in pool.run(2, shares_kept):
        assert max(shares) <= 1.01 / 2


class Captions(GPT):
    """Attends to the parts of an image: (samples, parts, features)."""

    def forward(self, words: Tensor, image: Tensor) -> Tensor:
        image = image.flatten(1, -2)
        x = F.scaled_dot_product_attention(self.words(words), image, image)
        return super().forward(words) + self.head(x)  # type: ignore[no-any-return]


def captions_as_long_as_images() -> tuple[list[float], str, list[float]]:
    """Errors of texts of some lengths, and what is said if the first of them is as long as the
    image; then the errors of what that recommends."""
    image, said = torch.randn(2, 40, 24, generator=torch.Generator().manual_seed(5)), ""

    def errors_of(lengths: list[int], image: Tensor) -> list[float]:
        torch.manual_seed(0)
        model = Captions(dropout=0.0)
        cut, found = SequenceCut(model, all_ranks(), Sequence(chunks=4)), []
        for tokens in lengths:
            batch = text(2, tokens)
            arguments = (batch["words"], image)
            if not found:
                cut.check(arguments, shifting, batch)
            with torch.no_grad():
                output, whole = cut.whole(cut.run(arguments, batch)), model(*arguments)
            found.append(float((output - whole).abs().max()))
        return found

    errors = errors_of([36, 40, 50], image)
    try:
        errors_of([40, 36], image)
    except RecipeError as error:
        said = str(error)
    return errors, said, errors_of([40, 36], image[:, None])


def test_tensors_that_are_as_long_as_a_sequence_by_chance_are_not_cut(pool: WorkerPool) -> None:
    for errors, said, with_remedy in pool.run(2, captions_as_long_as_images):
        assert max(*errors, *with_remedy) < 1e-5
        assert "tensor 1 has the shape (2, 40, 24), in a batch of 36 tokens" in said
        assert "return tensor[:, None]" in said


def weighted(output: Tensor, batch: Any) -> Tensor:
    """Weighs each sample by one of its weights, of which it has 40."""
    pairs = F.cross_entropy(
        output[:, :-1].flatten(0, 1), batch["words"][:, 1:].flatten(), reduction="none"
    )
    weights: Tensor = batch["weights"].flatten(1)[:, -1]
    return (pairs.view(len(output), -1).sum(1) * weights).sum()


def weights_as_long_as_texts() -> tuple[list[float], str]:
    """This rank's losses, less its share of those of one process, for texts of some lengths; what
    is said if the first is as long as the weights."""
    weights, said = torch.rand(2, 40, generator=torch.Generator().manual_seed(5)), ""

    def losses_of(
        lengths: list[int], weights: Tensor, loss: Callable[[Tensor, Any], Tensor] = weighted
    ) -> list[float]:
        torch.manual_seed(0)
        model, found = GPT(dropout=0.0), []
        cut = SequenceCut(model, all_ranks(), Sequence(chunks=4))
        for tokens in lengths:
            batch = {"words": text(2, tokens)["words"], "weights": weights}
            arguments = (batch["words"],)
            if not found:
                cut.check(arguments, loss, batch)
            with torch.no_grad():
                part = cut.loss(loss, cut.run(arguments, batch), batch)
                found.append(float(part - loss(model(*arguments), batch) / all_ranks().size))
        return found

    try:
        losses_of([40, 36], weights)
    except LossError as error:
        said = str(error)
    return (
        losses_of([36, 40, 50], weights)
        + losses_of([40, 36], weights[:, None])
        + losses_of([40, 36, 40], weights, shifting_words),  # which does not read the weights
        said,
    )


def shifting_words(output: Tensor, batch: Any) -> Tensor:
    return shifting(output, {"labels": batch["words"]})


def test_tensors_of_a_batch_that_are_as_long_as_a_sequence_by_chance_are_not_cut(
    pool: WorkerPool,
) -> None:
    (losses, said), (others, _) = pool.run(2, weights_as_long_as_texts)
    assert max(abs(one + other) for one, other in zip(losses, others, strict=True)) < 1e-3
    assert said.startswith("the loss is not a sum over tokens")
