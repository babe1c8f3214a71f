"""Where the microbatches of a step come from: a dataset in its keyed order, or, without one, fixed indices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch

from lockstep import assignment
from lockstep.comm.group import World, exact_sum
from lockstep.data.device import to_device
from lockstep.data.generators import seed_generators
from lockstep.data.loader import Loader, Microbatch, Span
from lockstep.errors import LossError
from lockstep.keys import Stream, key
from lockstep.order import Order
from lockstep.training.loss import Weights, weights_of


class Length:
    """How long training is and how it is cut: arithmetic on (step, microbatch), the same on every rank."""

    def __init__(
        self, *, samples: int, global_batch: int, microbatch: int | None, steps: int | None, epochs: int | None, ranks: int
    ) -> None:
        self.samples = samples
        self.global_batch = global_batch
        self.in_epochs = epochs is not None
        self.steps = assignment.steps_of(length=samples, global_batch=global_batch, steps=steps, epochs=epochs)
        self._microbatch = microbatch
        self._ranks = ranks
        self.most_microbatches = len(self.cut(min(global_batch, samples) if self.in_epochs else global_batch))
        self.cut = lru_cache(maxsize=8)(self.cut)  # type: ignore[method-assign]

    def cut(self, size: int) -> list[tuple[int, int]]:
        """The spans of a batch of `size` samples."""
        return assignment.microbatches(size, self._microbatch, self._ranks)

    def span(self, step: int) -> tuple[int, int]:
        """The positions of a step's global batch."""
        return assignment.batch_span(step, length=self.samples, global_batch=self.global_batch, epochs=self.in_epochs)

    def share(self, step: int, rank: int) -> list[Span]:
        """A rank's microbatches of a step."""
        start, stop = self.span(step)
        cuts = self.cut(stop - start)
        return [
            Span(step=step, index=index, start=start + cuts[index][0], stop=start + cuts[index][1])
            for index in assignment.share(len(cuts), rank, self._ranks)
        ]


class Microbatches:
    """One step's microbatches on this rank."""

    weights: Weights | None = None
    """Each term's denominator over the whole step, where a weight function gives it."""

    def __init__(self, step: int, length: Length, items: Iterator[Microbatch], *, world: World, seed: int, order: Order | None) -> None:
        start, stop = length.span(step)
        self.step = step
        self.start = start
        self.samples = stop - start
        self.cuts = length.cut(self.samples)
        self.count = len(self.cuts)
        self.most = length.most_microbatches
        self._items = items
        self._kept: list[Microbatch] | None = None
        self._world = world
        self._seed = seed
        self._order = order

    def weigh(self, weight: Callable[[Any], Any], names: Sequence[str] | None) -> list[str]:
        """Fetch this rank's share and add up its weights with the other ranks'. Every rank calls it. Returns the names of the terms."""
        self._kept = list(self._items)
        mine = [weights_of(weight(item.batch)) for item in self._kept]
        if names is None:
            names = next(found for found in self._world.gather_values(list(mine[0]) if mine else None) if found is not None)
        for item, weights in zip(self._kept, mine, strict=True):
            if list(weights) != list(names):
                raise LossError(
                    f"step {self.step}, microbatch {item.index}: the weight has terms {list(weights)} and had {list(names)} before; "
                    "it must have the same terms for every microbatch"
                )
        rows = torch.tensor([list(weights.values()) for weights in mine], dtype=torch.float64).reshape(len(mine), len(names))
        counts = [len(assignment.share(self.count, rank, self._world.size)) for rank in range(self._world.size)]
        columns = self._world.gather_rows(rows, counts).T.tolist()
        self.weights = {name: exact_sum(column) for name, column in zip(names, columns, strict=True)}
        return list(names)

    def keep(self) -> None:
        """Hold on to the batches, so that they can be run through again."""
        if self._kept is None:
            self._kept = list(self._items)

    def batches(self, passes: int) -> Iterator[tuple[int, Any, int]]:
        """(index, batch on the device, samples) of this rank's microbatches, each under its own generators."""
        for item in self._kept if self._kept is not None else self._items:
            batch = to_device(item.batch, self._world.device)
            seed_generators(key(self._seed, Stream.FORWARD, self.step, item.index, passes), self._world.device)
            yield item.index, batch, item.size

    def owner(self, place: int) -> int:
        """The rank that computes microbatch `place`."""
        ranks = range(self._world.size)
        return next(rank for rank in ranks if place in assignment.share(self.count, rank, self._world.size))

    def samples_of(self, place: int) -> list[int]:
        """The indices in the dataset of microbatch `place`."""
        start, stop = (self.start + offset for offset in self.cuts[place])
        if self._order is None:
            return list(range(*self.cuts[place]))
        return [int(sample) for sample in self._order.samples(np.arange(start, stop))[1]]


def from_data(loader: Loader, length: Length, *, world: World, seed: int) -> Iterator[Microbatches]:
    """The steps of a dataset, in its keyed order."""
    order = Order(length.samples, seed)
    fetched = loader.fetch(span for step in range(length.steps) for span in length.share(step, world.rank))
    for step in range(length.steps):
        mine = islice(fetched, len(length.share(step, world.rank)))
        yield Microbatches(step, length, mine, world=world, seed=seed, order=order)


def from_indices(length: Length, *, world: World, seed: int) -> Iterator[Microbatches]:
    """Steps without data: a microbatch is the range of its indices in the global batch, the same in every step."""
    for step in range(length.steps):
        start = length.span(step)[0]
        items = (
            Microbatch(step=step, index=span.index, size=span.stop - span.start, batch=range(span.start - start, span.stop - start))
            for span in length.share(step, world.rank)
        )
        yield Microbatches(step, length, items, world=world, seed=seed, order=None)
