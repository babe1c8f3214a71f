"""Mistakes that errors of sequences answer, each with the training that its error recommends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from model.context.models import GPT, LONGEST, WIDTH, WORDS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from training.remedies import Remedy, Training
from training.subjects import sgd

import lockstep as ls

TOKENS = 22
CHUNKS = ls.Sequence(chunks=4)


def texts(tokens: int = TOKENS, *, cut_labels: bool = True) -> TensorDataset:
    """Words, labels (the same: the loss shifts them), documents."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, (8, tokens), generator=generator)
    documents = (torch.arange(tokens) >= tokens // 3).long().expand(8, -1)
    labels = words.clone()
    if cut_labels:
        labels[:, 1:][documents.diff(dim=1) != 0] = -100
    return TensorDataset(words, labels, documents)


DATA = texts()


def words_of(batch: Sequence[Tensor]) -> Any:
    return batch[0]


def documents_of(batch: Sequence[Tensor]) -> Tensor:
    return batch[2]


def entropy(output: Any, batch: Sequence[Tensor]) -> ls.Sum:
    logits = output[:, :-1].flatten(0, 1)
    return ls.Sum(F.cross_entropy(logits, batch[1][:, 1:].flatten(), reduction="sum"))


def labels_of(batch: Sequence[Tensor]) -> Tensor:
    return (batch[1][:, 1:] != -100).sum()


PACKED = ls.Sequence(chunks=4, documents=documents_of)


def trains(without: str = "", also: str = "", **changes: Any) -> Training:
    """One step of a small model. `without`: a part of the plan that is left out. `also`: one that
    is added."""

    def train(folder: str, plan: str, allow_change: Sequence[str] = ()) -> tuple[str, float]:
        given: dict[str, Any] = {
            "model": partial(GPT, dropout=0.0),
            "data": DATA,
            "inputs": words_of,
            "loss": entropy,
            "weight": labels_of,
            "optimizer": sgd,
            "global_batch": 4,
            "microbatch": 2,
            "steps": 1,
            **changes,
        }
        result = ls.train(
            ls.Recipe(**given),
            run_dir=folder,
            plan=plan.replace(without or ";", "replicate=2" if without == "context=2" else "")
            + also,
            allow_change=allow_change,
        )
        return result.fingerprint, result.loss

    return train


def cut(mistake: Training, says: str, remedy: Training, **how: Any) -> Remedy:
    """What two ranks of `context` refuse, and one process computes."""
    how = {"plan": "context=2", "alone": False, **how}
    return Remedy(mistake, says, remedy, bitwise=False, **how)


def kept(mistake: Training, says: str, remedy: Training, **how: Any) -> Remedy:
    """What one process refuses as two do."""
    return Remedy(mistake, says, remedy, bitwise=False, **{"plan": "replicate=2", **how})


def with_model(model: Callable[[], nn.Module], **changes: Any) -> Training:
    return trains(model=model, **changes)


def extra(name: str, **given: Any) -> Training:
    return trains(model=partial(GPT, extra=name, dropout=0.0, **given))


class Following(GPT):
    """A model that updates a buffer in its forward."""

    self_updating_buffers = ("fixed",)

    def __init__(self) -> None:
        super().__init__(dropout=0.0)

    def forward(self, words: Tensor) -> Tensor:
        x = super().forward(words)
        with torch.no_grad():
            self.fixed.lerp_(x.mean(), 0.1)
        return x


class Changed(GPT):
    """A model whose hidden states are changed before its blocks."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)

    def forward(self, words: Tensor) -> Tensor:
        x = self.changed(self.words(words))
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def changed(self, x: Tensor) -> Tensor:
        return x


class WholeTable(Changed):
    """A table of positions that is not sliced."""

    def changed(self, x: Tensor) -> Tensor:
        return x + self.fixed[LONGEST - TOKENS :]


class TwoTables(Changed):
    """Positions for each row of a batch of two."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.ones(2, LONGEST, WIDTH))

    def changed(self, x: Tensor) -> Tensor:
        return x + self.both[:, : x.shape[1]].sum(0)


class Skipping(Changed):
    """Leaves a layer out of its first forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def changed(self, x: Tensor) -> Tensor:
        self.calls += 1
        for _ in range(1 + (self.calls > 2)):
            x = F.dropout(x, 0.1)
        return x


class FlatDropout(Changed):
    """Draws for all tokens of all rows in one dim."""

    def changed(self, x: Tensor) -> Tensor:
        return F.dropout(x.flatten(0, 1), 0.1).view(x.shape)


class OwnCheckpointing(Changed):
    def changed(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.blocks[0], x, use_reentrant=False)
        return y


class Permuted(Changed):
    def changed(self, x: Tensor) -> Tensor:
        return x + torch.randperm(x.shape[1])[:, None] / LONGEST


class OwnPlaces(Changed):
    """A table that is made for the tokens of the call."""

    def changed(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        return x + torch.linspace(0, 1, tokens)[torch.arange(tokens)][:, None]


class Placed(GPT):
    """Takes its positions as an argument."""

    def forward(self, words: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]  # another argument
        x = self.words(words) + self.places(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Penalized(GPT):
    """Returns a term that is not for each token."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)

    def forward(self, words: Tensor) -> Any:
        return super().forward(words), 1e-9 * self.table.square().sum().reshape(1)


def with_penalty(output: Any, batch: Sequence[Tensor]) -> ls.Sum:
    logits, penalty = output
    return ls.Sum(entropy(logits, batch).total + penalty.sum())


def without_penalty(output: Any, batch: Sequence[Tensor]) -> ls.Sum:
    return entropy(output[0], batch)


def mean_of_tokens(output: Tensor, batch: Sequence[Tensor]) -> ls.Sum:
    return ls.Sum(entropy(output, batch).total / labels_of(batch))


def one(batch: Sequence[Tensor]) -> int:
    return len(batch[0])


def one_longer(output: Tensor, batch: Sequence[Tensor]) -> ls.Sum:
    return ls.Sum(F.cross_entropy(output.flatten(0, 1), batch[0][:, 1:].flatten(), reduction="sum"))


def without_last(batch: Sequence[Tensor]) -> Tensor:
    return batch[0][:, :-1]


def all_but_first(batch: Sequence[Tensor]) -> int:
    return batch[0][:, 1:].numel()


def halves(items: Sequence[Any]) -> list[Tensor]:
    """Words without the last, and the word after each."""
    words = torch.stack([item[0] for item in items])
    return [words[:, :-1].contiguous(), words[:, 1:].contiguous()]


def after_each(output: Tensor, batch: Sequence[Tensor]) -> ls.Sum:
    return ls.Sum(F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum"))


def of_class(output: Tensor, batch: Sequence[Tensor]) -> ls.Sum:
    return ls.Sum(F.cross_entropy(output, batch[1][:, 0].clamp(min=0), reduction="sum"))


GPTS = trains()
HEADS = "context=2,exchange=heads"
CLASSES: dict[str, Any] = {
    "model": partial(GPT, extra="class token", dropout=0.0),
    "loss": of_class,
    "weight": one,
}
CHUNKED, GPTS_PACKED = trains(sequence=CHUNKS), trains(sequence=PACKED)
SEQUENCES = [
    kept(
        trains(also=",numerics=bitwise,slices=2", sequence=CHUNKS),
        "leave slices or sequence out",
        trains(also=",numerics=bitwise", sequence=CHUNKS),
    ),
    cut(extra("own mask"), "write is_causal=True instead of a causal mask", GPTS),
    cut(
        trains(model=partial(GPT, dropout=0.0, attention_dropout=0.1), sequence=CHUNKS),
        "leave exchange out, or give exchange=keys",
        trains(
            model=partial(GPT, dropout=0.0, attention_dropout=0.1),
            sequence=CHUNKS,
            without=",exchange=heads",
        ),
        plan=HEADS,
    ),
    cut(
        trains(model=partial(GPT, dropout=0.0, heads=3)),
        "leave exchange out, give exchange=keys",
        trains(model=partial(GPT, dropout=0.0, heads=3), without=",exchange=heads"),
        plan=HEADS,
    ),
    cut(
        trains(inputs=lambda batch: batch[0].flatten(), sequence=CHUNKS),
        "return token ids of shape (samples, tokens)",
        CHUNKED,
        alone=True,
    ),
    cut(
        trains(sequence=ls.Sequence(chunks=4, positions="position_ids")),
        "or leave positions out if the model computes them",
        CHUNKED,
        alone=True,
    ),
    cut(
        trains(sequence=ls.Sequence(chunks=4, positions="position")),
        "name the argument that takes positions",
        trains(
            model=partial(Placed, dropout=0.0),
            sequence=ls.Sequence(chunks=4, positions="position_ids"),
        ),
        alone=True,
    ),
    cut(
        trains(data=texts(4), sequence=ls.Sequence(chunks=16)),
        "fewer chunks (ls.Sequence(chunks=...))",
        trains(data=texts(4), sequence=CHUNKS),
    ),
    cut(
        trains(data=texts(1), loss=after_each, weight=one, sequence=CHUNKS),
        "give sequences of several tokens",
        CHUNKED,
        alone=True,
    ),
    cut(
        trains(model=WholeTable, sequence=CHUNKS),
        "slice its tables, such as",
        trains(model=partial(GPT, "buffer", dropout=0.0), sequence=CHUNKS),
        alone=True,
    ),
    cut(
        trains(inputs=without_last, loss=one_longer, weight=all_but_first),
        "such as words = text[:, :-1] and labels = text[:, 1:]",
        trains(collate=halves, loss=after_each, weight=lambda batch: batch[1].numel()),
    ),
    cut(
        trains(loss=mean_of_tokens, weight=one),
        "return ls.Sum(total), the sum over the tokens with a label",
        GPTS,
    ),
    cut(
        trains(model=Penalized, loss=with_penalty),
        "each part of the tokens; leave the term out, or",
        trains(model=Penalized, loss=without_penalty),
    ),
    cut(
        trains(model=GPT),
        "give Recipe(sequence=ls.Sequence()): random numbers",
        trains(model=GPT, sequence=ls.Sequence()),
    ),
    cut(
        trains(model=Skipping, sequence=CHUNKS),
        "leave out layers that are skipped at random",
        CHUNKED,
        alone=True,
    ),
    cut(
        trains(model=FlatDropout, sequence=CHUNKS),
        "draw for a tensor of (samples, tokens, features)",
        trains(model=GPT, sequence=CHUNKS),
        alone=True,
    ),
    cut(
        trains(model=OwnCheckpointing, sequence=CHUNKS),
        "and give the plan checkpointing=full",
        trains(blocks=["blocks.*"], sequence=CHUNKS, also=",checkpointing=full"),
        alone=True,
    ),
    cut(
        trains(model=Permuted, sequence=CHUNKS),
        "draw by dropout, torch.rand, torch.randn, rand_like",
        trains(model=partial(GPT, extra="noise"), sequence=CHUNKS),
    ),
    cut(
        trains(model=OwnPlaces),
        "compute each token by itself but for attention",
        trains(model=partial(GPT, "buffer", dropout=0.0)),
    ),
    cut(
        trains(**CLASSES),
        "no class token or mean of all; return an output for each token, or",
        trains(**CLASSES, without="context=2"),
    ),
    cut(extra("multihead"), "write it with linear layers and", GPTS),
    cut(extra("batch norm"), "use nn.LayerNorm or nn.RMSNorm", GPTS),
    cut(with_model(Following), "update them between steps, in a hook's", GPTS),
    cut(extra("own attention"), "scaled_dot_product_attention(query, key, value, is_causal", GPTS),
    cut(extra("convolution"), "are on other ranks: use attention", GPTS),
    cut(extra("mean"), "normalise each token over its features", GPTS),
    cut(
        extra("", positions="cumsum"),
        "for positions write torch.arange(tokens) or table[:tokens]",
        trains(model=partial(GPT, "slice", dropout=0.0)),
    ),
]

DOCUMENTS = [
    kept(
        trains(sequence=ls.Sequence(documents=lambda batch: batch["document"])),
        "it must return the document of each token, a tensor of (samples, tokens); rows of ls.pack",
        GPTS_PACKED,
    ),
    kept(
        trains(sequence=ls.Sequence(documents=lambda batch: batch[2][:, 1:])),
        "return the document of each token of what Recipe.inputs",
        GPTS_PACKED,
    ),
    kept(
        trains(sequence=ls.Sequence(documents=lambda batch: batch[2].float())),
        "write lambda batch: batch['document']",
        GPTS_PACKED,
    ),
    kept(
        trains(
            sequence=ls.Sequence(documents=lambda batch: [batch[2][0], *(batch[2][1:, 1:])]),
        ),
        "pad them in collate, with the id",
        GPTS_PACKED,
    ),
    kept(
        trains(sequence=ls.Sequence(documents=lambda batch: 1 - batch[2])),
        "with ids that never decrease, such as",
        GPTS_PACKED,
    ),
    kept(
        trains(**CLASSES, sequence=PACKED),
        "leave Recipe.sequence out for a model with one output per sample",
        trains(**CLASSES),
    ),
    kept(
        trains(data=texts(cut_labels=False), sequence=PACKED),
        "no token predicts the first of a document",
        GPTS_PACKED,
    ),
    kept(
        trains(model=partial(GPT, extra="convolution", dropout=0.0), sequence=PACKED),
        "leave Recipe.sequence out, and give each document as a sample",
        trains(model=partial(GPT, extra="convolution", dropout=0.0)),
    ),
    kept(
        trains(model=partial(GPT, extra="own attention", dropout=0.0), sequence=PACKED),
        "call F.scaled_dot_product_attention(query, key, value, is_causal=True) without a mask",
        GPTS_PACKED,
    ),
    kept(
        trains(model=partial(GPT, "cumsum", dropout=0.0), sequence=PACKED),
        "and name it: ls.Sequence(documents=..., positions='position_ids')",
        trains(
            model=partial(Placed, dropout=0.0),
            sequence=ls.Sequence(chunks=4, documents=documents_of, positions="position_ids"),
        ),
    ),
    kept(
        trains(model=TwoTables, sequence=PACKED),
        "or take rows of a table of (positions, features): table[torch.arange(tokens)]",
        GPTS_PACKED,
    ),
]


def family(**changes: Any) -> nn.Module:
    """A Llama whose words fit these texts. transformers is imported only where it is needed."""
    from model.context import families

    return families.family("llama", **changes).train()


def with_flex_attention() -> nn.Module:
    model = family()
    model.config._attn_implementation = "flex_attention"  # type: ignore[union-attr]  # of transformers
    return model


def hugging_face(**changes: Any) -> Training:
    config = changes.pop("config", {})
    given = {
        "model": partial(family, **config),
        "loss": of_logits,
        "inputs": ids,
        "sequence": PACKED,
        **changes,
    }
    return trains(**given)


def of_logits(output: Any, batch: Sequence[Tensor]) -> ls.Sum:
    return entropy(output.logits, batch)


def ids(batch: Sequence[Tensor], **more: Any) -> dict[str, Any]:
    return {"input_ids": batch[0], **more}


def square(batch: Sequence[Tensor]) -> dict[str, Any]:
    tokens = batch[0].shape[1]
    return ids(batch, attention_mask=torch.ones(len(batch[0]), 1, tokens, tokens))


LLAMA = hugging_face()
ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
YARN = {**ROPE, "rope_type": "yarn", "original_max_position_embeddings": 16}
HUGGING_FACE = [
    cut(
        hugging_face(inputs=lambda batch: ids(batch, labels=batch[1])),
        "leave labels out of inputs, and compute the loss from output.logits",
        LLAMA,
        alone=True,
    ),
    cut(
        hugging_face(inputs=lambda batch: ids(batch, use_cache=True)),
        "leave past_key_values and use_cache out of inputs",
        LLAMA,
        alone=True,
    ),
    cut(
        hugging_face(inputs=square),
        "give one of shape (samples, tokens), 0 at padding, or none",
        hugging_face(inputs=lambda batch: ids(batch, attention_mask=torch.ones_like(batch[0]))),
        alone=True,
    ),
    cut(
        hugging_face(config={"attention_dropout": 0.1}, sequence=CHUNKS),
        "set attention_dropout=0.0 in the configuration, or ",
        hugging_face(sequence=CHUNKS),
    ),
    cut(
        hugging_face(config={"rope_parameters": ROPE}),
        "choose a type with fixed frequencies in the configuration, such as 'yarn'",
        hugging_face(config={"rope_parameters": YARN}),
        alone=True,
    ),
    cut(
        hugging_face(model=with_flex_attention),
        "make the model with attn_implementation='sdpa', or 'eager'",
        LLAMA,
        alone=True,
    ),
    cut(
        hugging_face(config={"num_key_value_heads": 1}),
        "use exchange=keys, or a context that divides the key heads",
        hugging_face(config={"num_key_value_heads": 1}, without=",exchange=heads"),
        plan=HEADS,
    ),
]
