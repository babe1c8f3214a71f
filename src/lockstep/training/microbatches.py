"""Where the microbatches of a step come from: a dataset in its keyed order, or, without one, fixed indices; or a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from lockstep import assignment
from lockstep.assignment import stream_shard
from lockstep.base.errors import CheckpointError, LossError
from lockstep.comm.mesh import Mesh
from lockstep.comm.world import exact_sum
from lockstep.data.device import to_device
from lockstep.data.generators import seed_generators
from lockstep.data.loader import Loader, Microbatch, Span, StreamLoader
from lockstep.data.streams import Origin, ShardPosition
from lockstep.keys import RandomStream, key
from lockstep.order import Order
from lockstep.training.loss import Weights, weights_of

Spans = tuple[tuple[int, int], ...]
"""Of each microbatch, [start, stop) inside its batch."""


class Length:
    """How long training is and how it is cut: arithmetic on (step, microbatch), the same on every rank."""

    def __init__(
        self,
        *,
        samples: int,
        global_batch: int,
        microbatch: int | None,
        steps: int | None,
        epochs: int | None,
        mesh: Mesh,
        microbatch_splits: int = 0,
    ) -> None:
        """`microbatch_splits`: how often each microbatch is halved; the halves are microbatches then."""
        self.samples = samples
        self.mesh = mesh
        self._parts = 2**microbatch_splits
        self.steps = assignment.total_steps(length=samples, global_batch=global_batch, steps=steps, epochs=epochs)
        self._global_batch = global_batch
        self._in_epochs = epochs is not None
        self._microbatch = microbatch
        self._cuts: dict[int, Spans] = {}
        self._dealt: dict[int, list[tuple[int, bool]]] = {}
        self.most_microbatches = len(self.cut(min(global_batch, samples) if self._in_epochs else global_batch))

    def span(self, step: int) -> tuple[int, int]:
        """The positions of a step's global batch."""
        return assignment.batch_span(step, length=self.samples, global_batch=self._global_batch, epochs=self._in_epochs)

    def cut(self, size: int) -> Spans:
        """How a batch of `size` samples is cut, into slices where microbatches are split; there are at most two sizes in a run."""
        if size not in self._cuts:
            assigned = self.mesh.assignment
            whole = assignment.microbatch_spans(size, self._microbatch, 1 if assigned.slices else assigned.ranks)
            self._cuts[size] = tuple(assignment.split_spans(whole, assigned.slices or self._parts))
        return self._cuts[size]

    @property
    def largest(self) -> int:
        """Samples of the largest microbatch."""
        start, stop = self.span(0)
        return max(stop - start for start, stop in self.cut(stop - start))

    def dealt(self, size: int) -> list[tuple[int, bool]]:
        """What this rank computes of a batch of `size` samples, as (microbatch, is_dummy)."""
        if size not in self._dealt:
            self._dealt[size] = self.mesh.assignment.with_dummies(len(self.cut(size)), self.mesh.data.rank)
        return self._dealt[size]

    def rounds(self, step: int) -> list[Span]:
        """What this rank computes in a step."""
        start, stop = self.span(step)
        spans = self.cut(stop - start)
        return [
            Span(step=step, index=index, start=start + spans[index][0], stop=start + spans[index][1], is_dummy=is_dummy)
            for index, is_dummy in self.dealt(stop - start)
        ]


@dataclass(slots=True)
class Layout:
    """Where the samples of one step are from, for whoever asks later."""

    step: int
    start: int
    """The first position of the global batch."""
    spans: Spans
    mesh: Mesh
    order: Order | None
    origins: dict[int, Origin] | None = None
    """Of a stream: where the microbatches are from that this rank has fetched."""

    def name(self, place: int) -> str:
        """Of microbatch `place`, in words."""
        split = self.mesh.assignment.slices
        return f"slice {place % split} of microbatch {place // split}" if split else f"microbatch {place}"

    def owner(self, place: int) -> str:
        """Who computes microbatch `place`, in words."""
        rank = next(rank for rank, share in enumerate(self.mesh.assignment.indices_by_rank(len(self.spans))) if place in share)
        return f"rank {rank}" if self.mesh.data.size == self.mesh.world.size else f"data rank {rank}"

    def whole(self, place: int) -> tuple[int, Sequence[int | str]]:
        """The microbatch that `place` is, or is a slice of, and all its samples; of a stream, in words, where it is this rank's."""
        if self.origins is not None:
            return place, self.origins[place].names()
        split = self.mesh.assignment.slices or 1
        number = place // split
        places = range(number * split, min((number + 1) * split, len(self.spans)))
        return number, [sample for each in places for sample in self.samples_of(each)]

    def words(self, place: int) -> str:
        """Which samples microbatch `place` is of. Every rank of `mesh.data` calls it: of a stream, only who read them knows."""
        if self.origins is None:
            return f"samples {self.samples_of(place)}"
        origin = self.origins.get(place)
        everyone = self.mesh.data.gather_values(None if origin is None else str(origin))
        return next(str(said) for said in everyone if said is not None)

    def samples_of(self, place: int) -> list[int]:
        """The indices in the dataset of microbatch `place`; without a dataset, those in the batch."""
        start, stop = self.spans[place]
        if self.order is None:
            return list(range(start, stop))
        return [int(sample) for sample in self.order.samples(np.arange(self.start + start, self.start + stop))[1]]


class Microbatches:
    """One step's microbatches on this rank."""

    def __init__(
        self,
        step: int,
        length: Length,
        items: Iterator[Microbatch],
        *,
        seed: int,
        order: Order | None,
        positions: Mapping[int, ShardPosition] | None = None,
    ) -> None:
        """`positions`: of a stream's shards before the step."""
        start, stop = length.span(step)
        self.step = step
        self.samples = stop - start
        self.layout = Layout(step, start, length.cut(self.samples), length.mesh, order, None if positions is None else {})
        self.count = len(self.layout.spans)
        self.mine = sum(not is_dummy for _, is_dummy in length.dealt(self.samples))
        """How many of them this rank computes."""
        self.most = length.most_microbatches
        self.weights: Weights | None = None
        """Each term's denominator over the whole step, where a weight function gives it."""
        self.positions = None if positions is None else dict(positions)
        """Where each shard of a stream that this rank reads goes on after the step, once the rank has run through its microbatches."""
        self._items = map(self._noted, items)
        self._kept: list[Microbatch] | None = None
        self._mesh = length.mesh
        self._seed = seed

    def weigh(self, weight: Callable[[Any], Any], names: Sequence[str] | None) -> list[str]:
        """Fetch this rank's share and add up its weights with the other ranks'. Every rank calls it. Returns the names of the terms."""
        self._kept = list(self._items)
        mine = [weights_of(weight(item.batch)) for item in self._kept if not item.is_dummy]
        if names is None:
            names = next(found for found in self._mesh.data.gather_values(list(mine[0]) if mine else None) if found is not None)
        for item, weights in zip(self._kept, mine, strict=False):
            if list(weights) != list(names):
                raise LossError(
                    f"after step {self.step}, microbatch {item.index}: the weight has terms {list(weights)} and had {list(names)} before; "
                    "it must have the same terms for every microbatch"
                )
        rows = torch.tensor([list(weights.values()) for weights in mine], dtype=torch.float64).reshape(len(mine), len(names))
        columns = self._mesh.in_order(rows, self.count).T.tolist()
        self.weights = {name: exact_sum(column) for name, column in zip(names, columns, strict=True)}
        return list(names)

    def keep(self) -> None:
        """Hold on to the batches, so that they can be run through again."""
        if self._kept is None:
            self._kept = list(self._items)

    def batches(self, passes: int) -> Iterator[tuple[Microbatch, Any]]:
        """This rank's microbatches, and their batches on the device, each under its own generators."""
        for item in self._kept if self._kept is not None else self._items:
            batch = to_device(item.batch, self._mesh.world.device)
            seed_generators(key(*self.position(item, passes)), self._mesh.world.device)
            yield item, batch

    def _noted(self, item: Microbatch) -> Microbatch:
        if item.origin is not None and self.layout.origins is not None and self.positions is not None:
            self.layout.origins[item.index] = item.origin
            if not item.is_dummy:
                self.positions[item.origin.shard] = item.origin.after
        return item

    def position(self, item: Microbatch, passes: int) -> tuple[int, ...]:
        """Of a microbatch's random streams. `passes`: how often it was run through before in this step."""
        return self._seed, RandomStream.FORWARD, self.step, item.index, passes


def from_data(loader: Loader, length: Length, *, seed: int, first: int = 0) -> Iterator[Microbatches]:
    """The steps of a dataset from step `first` on, in its keyed order. Of the steps before it nothing is fetched."""
    order = Order(length.samples, seed)
    fetched = loader.fetch(span for step in range(first, length.steps) for span in length.rounds(step))
    for step in range(first, length.steps):
        start, stop = length.span(step)
        mine = islice(fetched, len(length.dealt(stop - start)))
        yield Microbatches(step, length, mine, seed=seed, order=order)


def from_indices(length: Length, *, seed: int, first: int = 0) -> Iterator[Microbatches]:
    """Steps from step `first` on, without data: a microbatch is the range of its indices in the global batch, the same in every step."""
    for step in range(first, length.steps):
        start, _ = length.span(step)
        items = (
            Microbatch(step, span.index, span.is_dummy, span.stop - span.start, range(span.start - start, span.stop - start))
            for span in length.rounds(step)
        )
        yield Microbatches(step, length, items, seed=seed, order=None)


def from_stream(
    loader: StreamLoader, length: Length, *, seed: int, first: int = 0, positions: Mapping[int, ShardPosition] | None = None
) -> Iterator[Microbatches]:
    """The steps of a stream from step `first` on. `positions`: of all shards, as `Microbatches.positions` of all ranks were after the
    step before; a shard that is not there starts."""
    begin = positions or {}
    count, size = length.most_microbatches, length.span(0)[1]
    dealt = length.dealt(size)
    fetched = loader.fetch(
        (span for step in range(first, length.steps) for span in length.rounds(step)), microbatches=count, positions=begin
    )
    turns = range(loader.shards // count)
    own = [index for index, is_dummy in dealt if not is_dummy]
    read = [stream_shard(turn, index, microbatches=count, shards=loader.shards) for turn in turns for index in own]
    at: Mapping[int, ShardPosition] = {shard: begin.get(shard, ShardPosition()) for shard in sorted(read)}
    for step in range(first, length.steps):
        source = Microbatches(step, length, islice(fetched, len(dealt)), seed=seed, order=None, positions=at)
        yield source
        at = source.positions or {}


def positions_in(values: Mapping[str, Any], shards: int) -> dict[int, ShardPosition]:
    """Where each of a stream's shards goes on, by a checkpoint's values, which have the `Microbatches.positions` of all ranks as `shards`.

    Raises `CheckpointError` where they are of another stream.
    """
    saved = {int(shard): ShardPosition(*said) for shard, said in values["shards"].items()}
    if saved.keys() != set(range(shards)):
        raise CheckpointError(
            f"the checkpoint says where {len(saved)} shards of a stream go on, and this run's ls.Stream has shards={shards}; go on with "
            "the data that it was saved with"
        )
    return saved
