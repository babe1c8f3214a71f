"""The microbatches of each step. Without data, microbatches are ranges of indices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch

from lockstep import assignment
from lockstep.assignment import MicrobatchAssignment, stream_shard
from lockstep.base.errors import CheckpointError, DataError, LossError
from lockstep.comm.gather import in_order
from lockstep.comm.mesh import Mesh
from lockstep.comm.torch_collectives import CollectiveCalled, CollectivesRefused
from lockstep.comm.world import exact_sum
from lockstep.data.device import to_device
from lockstep.data.fetch import some
from lockstep.data.generators import seed_generators
from lockstep.data.loader import Loader, Microbatch, SamplesLeftOut, Span, StreamLoader
from lockstep.data.positions import Position, fits, position_in
from lockstep.data.sampled_order import BatchOrder, SampleOrder
from lockstep.data.streams import Origin
from lockstep.keys import RandomStream, key
from lockstep.order import Order
from lockstep.recipe.data import Stream
from lockstep.recomputed import Recomputed, recomputed
from lockstep.training.loss import Weights, weights_of

Spans = tuple[tuple[int, int], ...]  # the span [start, stop) of each microbatch in its global batch


def count_steps(
    order: SampleOrder | None,
    *,
    samples: int,
    global_batch: int | None,
    steps: int | None,
    epochs: int | None,
    drop_last: bool,
) -> int:
    if isinstance(order, BatchOrder):
        return steps if steps is not None else order.batches * (epochs or 0)
    assert global_batch is not None, "a recipe has one, or a batch_sampler"
    return assignment.total_steps(
        length=samples, global_batch=global_batch, steps=steps, epochs=epochs, drop_last=drop_last
    )


class Batching:
    """The steps of a loop, the microbatches of each global batch, and their assignment to ranks."""

    def __init__(
        self,
        *,
        samples: int,
        global_batch: int | None,
        microbatch: int | None,
        steps: int | None,
        epochs: int | None,
        drop_last: bool = False,
        mesh: Mesh,
        assignment: MicrobatchAssignment,
        microbatch_splits: int = 0,
        order: SampleOrder | None = None,
        seed: int = 0,
        recompute_every: int = 0,
    ) -> None:
        self.seed, self._recompute_every = seed, recompute_every
        self.order = order
        self._batches = order if isinstance(order, BatchOrder) else None
        self.samples = samples
        self.mesh = mesh
        self._assignments = [(0, assignment)]
        self.requested = -1
        """The latest step that this rank has requested from the loader."""
        self._parts = 2**microbatch_splits
        self._drop_last = drop_last
        self.steps = count_steps(
            order,
            samples=samples,
            global_batch=global_batch,
            steps=steps,
            epochs=epochs,
            drop_last=drop_last,
        )
        self._global_batch = global_batch or 0
        self._in_epochs = epochs is not None
        self._microbatch = microbatch
        self._spans: dict[Any, Spans] = {}
        self._mine_of: tuple[MicrobatchAssignment, int] | None = None
        self._mine: list[tuple[int, bool]] = []
        if self._batches is None:
            self.max_microbatches = len(
                self._uniform(
                    min(self._global_batch, samples) if self._in_epochs else self._global_batch
                )
            )
        else:
            self.max_microbatches = self._batches.max_microbatches * self._most_parts()

    @property
    def assignment(self) -> MicrobatchAssignment:
        """The latest assignment, for steps that are not yet requested from the loader."""
        return self._assignments[-1][1]

    def assignment_in_step(self, step: int) -> MicrobatchAssignment:
        first, latest = self._assignments[-1]
        if first <= step:
            return latest
        return next(each for first, each in reversed(self._assignments) if first <= step)

    def reassign(self, assignment: MicrobatchAssignment, *, first: int, done: int) -> None:
        """Every rank must call this method. No rank may have requested step `first` yet."""
        assert first > self.requested, "what a rank has requested, it computes"
        settled = max(0, min(done, self.requested))
        oldest = max(at for at, _ in self._assignments if at <= settled)
        kept = [(at, earlier) for at, earlier in self._assignments if at >= oldest]
        self._assignments = [*kept, (first, assignment)]

    def span(self, step: int) -> tuple[int, int]:
        """Return the range [start, stop) of a global batch in the order of samples over all
        epochs."""
        if self._batches is not None:
            return self._batches.span(step)
        return assignment.batch_span(
            step,
            length=self.samples,
            global_batch=self._global_batch,
            epochs=self._in_epochs,
            drop_last=self._drop_last,
        )

    def epoch(self, step: int) -> int:
        if self._batches is not None:
            return step // self._batches.batches
        return self.span(step)[0] // self.samples

    def spans(self, step: int) -> Spans:
        """Return the span of each microbatch in the global batch. If ranks split microbatches,
        return the span of each part."""
        if self._batches is not None:
            return tuple(
                assignment.split_spans(self._batches.microbatches(step), self._most_parts())
            )
        return self.spans_of(step, *self.span(step))

    def spans_of(self, step: int, start: int, stop: int) -> Spans:
        return self._uniform(stop - start) if self._batches is None else self.spans(step)

    def _uniform(self, size: int) -> Spans:
        if size not in self._spans:
            assigned = self.assignment
            unsplit = assignment.microbatch_spans(
                size, self._microbatch, 1 if assigned.slices else assigned.ranks
            )
            self._spans[size] = tuple(assignment.split_spans(unsplit, self._most_parts()))
        return self._spans[size]

    def _most_parts(self) -> int:
        return self.assignment.slices or self._parts

    @property
    def largest(self) -> int:
        return (
            max(stop - start for start, stop in self.spans(0))
            if self._batches is None
            else max(self._batches.sizes)
        )

    @property
    def last_of_epoch(self) -> list[int]:
        """Number of samples in each microbatch of an epoch's last global batch. With a
        `batch_sampler`, the list covers all global batches of epoch 0."""
        if self._batches is not None:
            return self._batches.sizes
        per_epoch = assignment.total_steps(
            length=self.samples,
            global_batch=self._global_batch,
            steps=None,
            epochs=1,
            drop_last=self._drop_last,
        )
        return [stop - start for start, stop in self.spans(per_epoch - 1 if self._in_epochs else 0)]

    @cached_property
    def counts(self) -> set[int]:
        """The possible numbers of microbatches in a step."""
        if self._batches is not None:
            return {len(self.spans(step)) for step in range(self._batches.batches)}
        return {len(self.spans(0)), len(self.last_of_epoch)}

    def mine(self, step: int) -> list[tuple[int, bool]]:
        """Return (index in the step, is_dummy) for each microbatch that this rank computes."""
        return self.mine_among(self.assignment_in_step(step), len(self.spans(step)))

    def mine_among(self, assigned: MicrobatchAssignment, count: int) -> list[tuple[int, bool]]:
        if self._mine_of is None or self._mine_of[0] is not assigned or self._mine_of[1] != count:
            self._mine_of = assigned, count
            self._mine = assigned.with_dummies(count, self.mesh.data.rank)
        return self._mine

    def recomputed(self, step: int, count: int) -> tuple[Recomputed, ...]:
        """Return the microbatches whose gradients several ranks compute and compare."""
        every, ranks = self._recompute_every, self.mesh.data.size
        if not every or ranks == 1 or (step % every and step + 1 < self.steps):
            return ()
        shares = self.assignment_in_step(step).indices_by_rank(count)
        return recomputed(
            shares, lambda choice: key(self.seed, RandomStream.RECOMPUTATION, step, choice)
        )

    def recomputed_here(self, step: int, count: int) -> list[int | None]:
        """Return the microbatches of other ranks that this rank may recompute. The second
        microbatch is recomputed only if two other ranks got different gradients."""
        several = self.recomputed(step, count)
        if not several:
            return []
        rank = self.mesh.data.rank
        dummy = rank % count if self.assignment_in_step(step).round_robin else None
        return [
            next((each.microbatch for each in several if each.ranks[role] == rank), dummy)
            for role in range(1, len(several[0].ranks))
        ]

    def mine_in_step(self, step: int) -> list[Span]:
        """Return the spans that this rank computes. Recomputed microbatches of other ranks come
        first."""
        start, stop = self.span(step)
        spans = self.spans_of(step, start, stop)
        again = [
            (index, True) for index in self.recomputed_here(step, len(spans)) if index is not None
        ]
        mine = self.mine_among(self.assignment_in_step(step), len(spans))
        return [
            Span(
                step=step,
                index=index,
                start=start + spans[index][0],
                stop=start + spans[index][1],
                is_dummy=is_dummy,
            )
            for index, is_dummy in [*again, *mine]
        ]

    def request(self, first: int) -> Iterator[Span]:
        """Yields the spans of each step, for the loader."""
        for step in range(first, self.steps):
            self.requested = step
            yield from self.mine_in_step(step)


@dataclass(slots=True)
class StepLayout:
    """The samples and the rank of each microbatch of a step, for error messages."""

    step: int
    start: int  # the position of the first sample of the global batch
    spans: Spans
    mesh: Mesh
    assignment: MicrobatchAssignment
    order: Order | SampleOrder | None
    origins: dict[int, Origin] | None = None
    """Maps a microbatch to its place in the stream. None if the data is a dataset, not a stream."""

    def mine(self) -> range:
        """Excludes dummy microbatches."""
        return self.assignment.indices(len(self.spans), self.mesh.data.rank)

    def name(self, index: int) -> str:
        split = self.assignment.slices
        return (
            f"slice {index % split} of microbatch {index // split}"
            if split
            else f"microbatch {index}"
        )

    def owner(self, index: int) -> str:
        rank = next(
            rank
            for rank, share in enumerate(self.assignment.indices_by_rank(len(self.spans)))
            if index in share
        )
        return (
            f"rank {rank}" if self.mesh.data.size == self.mesh.world.size else f"data rank {rank}"
        )

    def full_microbatch(self, index: int) -> tuple[int, Sequence[int | str]]:
        if self.origins is not None:
            return index, self.origins[index].names()
        split = self.assignment.slices or 1
        whole = index // split
        parts = range(whole * split, min((whole + 1) * split, len(self.spans)))
        return whole, [sample for part in parts for sample in self.samples_of(part)]

    def words(self, index: int) -> str:
        """Every rank of `mesh.data` must call this method, because only the rank that reads a
        stream knows the names of its samples."""
        if self.origins is None:
            return f"samples {self.samples_of(index)}"
        origin = self.origins.get(index)
        everyone = self.mesh.data.gather_values(None if origin is None else str(origin))
        return str(next(name for name in everyone if name is not None))

    def samples_of(self, index: int) -> list[int]:
        """Return dataset indices, or indices in the global batch if there is no dataset."""
        start, stop = self.spans[index]
        if self.order is None:
            return list(range(start, stop))
        return [
            int(sample)
            for sample in self.order.samples(np.arange(self.start + start, self.start + stop))[1]
        ]


class Microbatches:
    """The microbatches that this rank computes in one step."""

    def __init__(
        self,
        step: int,
        batching: Batching,
        items: Iterator[Microbatch],
        *,
        order: Order | SampleOrder | None,
        positions: Mapping[int, Position] | None = None,
    ) -> None:
        start, stop = batching.span(step)
        self.step = step
        self.samples = stop - start
        mesh, assignment = batching.mesh, batching.assignment_in_step(step)
        self._data, self._device = mesh.data, mesh.world.device
        self.batching = batching
        spans = batching.spans_of(step, start, stop)
        self.layout = StepLayout(
            step, start, spans, mesh, assignment, order, None if positions is None else {}
        )
        self.count = len(spans)
        mine = batching.mine_among(assignment, self.count)
        self.own_count = sum([not is_dummy for _, is_dummy in mine])  # without dummies
        self.weights: Weights | None = None
        """Maps a loss term to its denominator over the global batch. None if the recipe has no
        weight function."""
        self.positions = None if positions is None else dict(positions)
        """Maps a stream shard to its position after the step. Complete once all microbatches of the
        step are fetched."""
        self.recomputed = batching.recomputed(step, self.count)
        self._indices = batching.recomputed_here(step, self.count)
        others = len(self._indices) - self._indices.count(None)
        self._fetched = islice(items, others + len(mine))
        self._others: list[Microbatch | None] | None = None
        self._items = self._own() if positions is None else map(self._record_origin, self._own())
        self._kept: list[Microbatch] | None = None

    def weigh(self, weight: Callable[[Any], Any], names: Sequence[str] | None) -> list[str]:
        """Set `weights` to the sums over all ranks, and return the names of the loss terms. Every
        rank must call this method."""
        self.keep()
        assert self._kept is not None, "kept just now"
        try:
            with nullcontext() if names is not None else CollectivesRefused():
                mine = [weights_of(weight(item.batch)) for item in self._kept if not item.is_dummy]
        except CollectiveCalled as error:
            raise LossError(
                f"Recipe.weight calls {error} of torch.distributed; each rank calls it for its own"
                " microbatches, and lockstep sums the weights over ranks; return this microbatch's"
            ) from None
        if names is None:
            names = next(
                theirs
                for theirs in self._data.gather_values(list(mine[0]) if mine else None)
                if theirs is not None
            )
        for item, weights in zip(self._kept, mine, strict=False):
            if list(weights) != list(names):
                raise LossError(
                    f"after step {self.step}, microbatch {item.index}: the weight has terms"
                    f" {list(weights)} and had {list(names)} before; it must have the same terms"
                    " for every microbatch"
                )
        rows = torch.tensor(
            [list(weights.values()) for weights in mine], dtype=torch.float64
        ).reshape(len(mine), len(names))
        columns = in_order(rows, self.count, self.layout.assignment, self._data).T.tolist()
        self.weights = {
            name: exact_sum(column) for name, column in zip(names, columns, strict=True)
        }
        return list(names)

    def leave_out(self, samples: frozenset[int]) -> None:
        everyone: list[int] = []
        for index in range(self.count):
            own = self.layout.samples_of(index)
            if samples.issuperset(own):
                raise DataError(
                    f"{self.layout.name(index)} of the step has no sample but {own}, which are to"
                    " be left out; every microbatch needs a sample; leave out fewer; the table"
                    " shows what the microbatch adds to the gradient"
                )
            everyone += own
        if missing := sorted(samples.difference(everyone)):
            raise DataError(
                f"the step does not have the samples {missing} that are to be left out; it has"
                f" {some(everyone)}; name some of these"
            )
        self.samples -= len(samples)

    def keep(self) -> None:
        """Keep the batches in memory to compute the microbatches again."""
        if self._kept is None:
            self._kept = list(self._items)

    def peek(self) -> Microbatch | None:
        self.keep()
        assert self._kept is not None, "kept just now"
        return self._kept[0] if self._kept else None

    def batches(
        self, passes: int, only: Microbatch | None = None
    ) -> Iterator[tuple[Microbatch, Any]]:
        """Yields microbatches with their batches on the device. Seeds the random generators before
        each microbatch."""
        mine = self._kept if self._kept is not None else self._items
        for item in mine if only is None else [only]:
            batch = to_device(item.batch, self._device)
            seed_generators(key(*self.position(item, passes)), self._device)
            yield item, batch

    def others(self) -> list[Microbatch | None]:
        """Fetch the microbatches of other ranks that this rank recomputes."""
        if self._others is None:
            self._others = [
                None if index is None else next(self._fetched) for index in self._indices
            ]
        return self._others

    def _own(self) -> Iterator[Microbatch]:
        self.others()  # the loader yields the microbatches of other ranks first
        yield from self._fetched

    def _record_origin(self, item: Microbatch) -> Microbatch:
        if (
            item.origin is not None
            and self.layout.origins is not None
            and self.positions is not None
        ):
            self.layout.origins[item.index] = item.origin
            if not item.is_dummy:
                self.positions[item.origin.shard] = item.origin.after
        return item

    def position(self, item: Microbatch, passes: int) -> tuple[int, ...]:
        """Return the key that seeds a microbatch's random generators."""
        return self.batching.seed, RandomStream.FORWARD, self.step, item.index, passes


def from_data(
    loader: Loader,
    batching: Batching,
    *,
    first: int = 0,
    left_out: SamplesLeftOut | None = None,
) -> Iterator[Microbatches]:
    """Fetches nothing for steps before `first`."""
    if left_out is not None and first <= left_out.step < batching.steps:
        layout_only = Microbatches(left_out.step, batching, iter(()), order=loader.order)
        layout_only.leave_out(left_out.samples)
    fetched = loader.fetch(batching.request(first))
    for step in range(first, batching.steps):
        source = Microbatches(step, batching, fetched, order=loader.order)
        if left_out is not None and step == left_out.step:
            source.leave_out(left_out.samples)
        yield source


def from_indices(batching: Batching, *, first: int = 0) -> Iterator[Microbatches]:
    """Yield microbatches for training without data: each batch is a range of indices in the global
    batch."""
    for step in range(first, batching.steps):
        start, _ = batching.span(step)
        batching.requested = step
        items = (
            Microbatch(
                step,
                span.index,
                span.is_dummy,
                span.stop - span.start,
                range(span.start - start, span.stop - start),
            )
            for span in batching.mine_in_step(step)
        )
        yield Microbatches(step, batching, items, order=None)


def from_stream(
    loader: StreamLoader,
    batching: Batching,
    *,
    first: int = 0,
    positions: Mapping[int, Position] | None = None,
) -> Iterator[Microbatches]:
    begin = positions or {}
    count = batching.max_microbatches
    mine = batching.mine(0)  # the same in all steps
    fetched = loader.fetch(batching.request(first), microbatches=count, positions=begin)
    turns = range(loader.shards // count)
    own = [index for index, is_dummy in mine if not is_dummy]
    read = [
        stream_shard(turn, index, microbatches=count, shards=loader.shards)
        for turn in turns
        for index in own
    ]
    at: Mapping[int, Position] = {
        shard: begin.get(shard, loader.beginning) for shard in sorted(read)
    }
    for step in range(first, batching.steps):
        source = Microbatches(step, batching, fetched, order=None, positions=at)
        yield source
        at = source.positions or {}


def positions_in(values: Mapping[str, Any], stream: Stream) -> dict[int, Position]:
    saved = {int(shard): position_in(position) for shard, position in values["shards"].items()}
    if saved.keys() != set(range(stream.shards)):
        raise CheckpointError(
            f"the checkpoint has positions for {len(saved)} shards of a stream, and this run's"
            f" ls.Stream has shards={stream.shards}; resume with the data that it was saved with"
        )
    if not all(fits(position, stream) for position in saved.values()):
        raise CheckpointError(
            "the checkpoint has positions in the shards of another kind of stream: a mixture has"
            " one for each of its streams by name, packed documents one in the documents; resume"
            " with the data that it was saved with"
        )
    return saved
