"""Ranks that share out the tokens of each sequence, in one process: a small GPT in which each rank
is a copy of the model. A faulty engine overrides a method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from verify.engine import Engine, Gradients, added

from lockstep.data.digests import sample_digests
from lockstep.sequence import places

SAMPLES, LENGTH, WORDS, WIDTH, CHUNKS = 24, 26, 11, 8, 8
IGNORED = -100


class GPT(nn.Module):
    """The layers of a GPT with one head; `ContextEngine` calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.query, self.key, self.value, self.joined, self.hidden = (
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(5)
        )
        self.head = nn.Linear(WIDTH, WORDS)


def texts() -> tuple[Tensor, Tensor, Tensor]:
    """Return words, the next word of each, and the document of each."""
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(0, WORDS, (SAMPLES, LENGTH + 1), generator=generator)
    begins = torch.randint(3, LENGTH - 2, (SAMPLES, 1), generator=generator)
    documents = (torch.arange(LENGTH) >= begins).long()
    labels = words[:, 1:].clone()
    labels[:, -1] = IGNORED
    return words[:, :-1], labels, documents


class ContextEngine(Engine):
    """A correct engine. `replicas` groups of ranks compute different microbatches."""

    microbatch = 3
    global_batch = 12
    model: ClassVar[type[nn.Module]] = GPT
    replicas: ClassVar[int] = 1
    packed: ClassVar[bool] = False
    """True if attention stays inside a document."""

    def __init__(self, folder: Path, **given: Any) -> None:
        super().__init__(folder, **given)
        self.context = self.size // self.replicas
        self.texts = texts()

    # Faulty engines override these.

    def places(self, rank: int) -> Tensor:
        """Return the places in the sequence of a rank's tokens, in its order."""
        if self.context == 1:
            return torch.arange(LENGTH)
        return torch.tensor(places(LENGTH, CHUNKS, self.context, rank % self.context))

    def positions(self, rank: int) -> Tensor:
        return self.places(rank)

    def labels(self, rank: int, labels: Tensor) -> Tensor:
        return labels[:, self.places(rank)]

    def losses(self, rank: int, each: Tensor) -> Tensor:
        """Return the loss of each of a rank's tokens. `each`: (samples, tokens)."""
        return each

    def gathered(self, rank: int, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return each rank's keys or values, as `rank` gathers them."""
        return list(parts)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, mask)

    def documents(self, documents: Tensor) -> Tensor:
        return documents

    def over_context(self, parts: list[Gradients], rank: int) -> Gradients:
        """Sum the gradients of ranks that share out sequences. `rank`: its place among them."""
        return added(parts)

    # A step.

    def group(self, replica: int) -> range:
        return range(replica * self.context, (replica + 1) * self.context)

    def reduce(self, step: int, locals_: list[Gradients]) -> list[Gradients]:
        return [
            added(
                [
                    self.over_context([locals_[r] for r in self.group(replica)], at)
                    for replica in range(self.replicas)
                ]
            )
            for _ in range(self.replicas)
            for at in range(self.context)
        ]

    def step(self, step: int) -> None:
        labels = self.texts[1]
        batch = [sample for index in range(self.count) for sample in self.samples(step, index)]
        self.weight = float((labels[batch] != IGNORED).sum())
        parts: list[list[Gradients]] = [[] for _ in range(self.size)]
        total = 0.0
        for replica in range(self.replicas):
            for index in range(replica, self.count, self.replicas):
                found, loss = self.together(step, index, self.group(replica))
                total += loss
                for rank, gradients in zip(self.group(replica), found, strict=True):
                    parts[rank].append(gradients)
        locals_ = [added(part) for part in parts]
        for rank, reduced in enumerate(self.reduce(step, locals_)):
            self.commit(step, rank, reduced, locals_[rank], total)

    def samples(self, step: int, index: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.key(2, step))
        order = torch.randperm(SAMPLES, generator=generator)[: self.global_batch].tolist()
        return order[index * self.microbatch : (index + 1) * self.microbatch]

    def together(self, step: int, index: int, group: range) -> tuple[list[Gradients], float]:
        """Compute a microbatch on the ranks of a group, each its tokens."""
        samples = self.samples(step, index)
        words, labels, documents = (each[samples] for each in self.texts)
        for rank in group:
            self.tracers[rank].before_forward()
        outputs = self.forward(group, words, documents)
        losses = []
        for rank, output in zip(group, outputs, strict=True):
            each = functional.cross_entropy(
                output.transpose(1, 2), self.labels(rank, labels), reduction="none"
            )
            losses.append(self.losses(rank, each).sum() / self.weight)
        named = [dict(self.models[rank].named_parameters()) for rank in group]
        wanted = [each for parameters in named for each in parameters.values()]
        found = iter(torch.autograd.grad(sum(losses), [*wanted, *outputs], allow_unused=True))
        gradients = [
            {name: one for name in names if (one := next(found)) is not None} for names in named
        ]
        for rank, names, own, output in zip(group, named, gradients, outputs, strict=True):
            tracer = self.tracers[rank]
            if not step:
                tracer.tokens(
                    0,
                    index,
                    places=self.places(rank),
                    documents=documents if self.packed else None,
                    output=output,
                    gradient=next(found),
                )
            tracer.microbatch(
                0,
                step,
                index,
                samples,
                sample_digests([words, labels]),
                [(name, own.get(name)) for name in names],
                together=group if len(group) > 1 else (),
            )
        return gradients, float(sum(losses).detach())

    def forward(self, group: range, words: Tensor, documents: Tensor) -> list[Tensor]:
        models: list[Any] = [self.models[rank] for rank in group]
        own = [self.places(rank) for rank in group]
        order = torch.argsort(torch.cat(own))
        hidden = [
            model.words(words[:, at]) + model.positions(self.positions(rank))
            for model, at, rank in zip(models, own, group, strict=True)
        ]
        seen = self.documents(documents) if self.packed else torch.zeros_like(documents)
        for layer in range(2):
            keys, values = (
                [
                    getattr(model, name)[layer](each)
                    for model, each in zip(models, hidden, strict=True)
                ]
                for name in ("key", "value")
            )
            for place, (rank, model, at) in enumerate(zip(group, models, own, strict=True)):
                key, value = (
                    torch.cat(self.gathered(rank, parts), 1)[:, order] for parts in (keys, values)
                )
                mask = torch.arange(LENGTH) <= at[:, None]
                mask = mask & (seen[:, at, None] == seen[:, None, :])
                attended = self.attend(model.query[layer](hidden[place]), key, value, mask)
                x = hidden[place] + model.joined[layer](attended)
                hidden[place] = x + torch.tanh(model.hidden[layer](x))
        return [model.head(each) for model, each in zip(models, hidden, strict=True)]
