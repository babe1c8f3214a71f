"""A recipe's data: streams, and checks of datasets and samplers. Needs no torch."""

from __future__ import annotations

import math
import numbers
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import accumulate, islice
from typing import Any, Literal

from lockstep.base.errors import DataError, RecipeError
from lockstep.base.field_docs import with_field_docs
from lockstep.recipe.checks import check_callable, check_count

MOST_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Files:
    """Files of any lengths, read as `shards` shards. Shard k has the samples [k * total // shards,
    (k + 1) * total // shards) of the concatenated files."""

    paths: Sequence[Any]
    read: Callable[[Any, int], Iterable[Any]]
    counts: Sequence[int]
    shards: int

    def __call__(self, shard: int, epoch: int, start: int) -> Iterator[Any]:
        ends = list(accumulate(self.counts))
        position, stop = (ends[-1] * each // self.shards for each in (shard, shard + 1))
        position += start
        while position < stop:
            file = bisect_right(ends, position)
            first = position - (ends[file] - self.counts[file])
            count = min(ends[file], stop) - position
            yield from islice(self.read(self.paths[file], first), count)
            position += count


@dataclass(frozen=True, slots=True)
class HuggingFaceStream:
    """A Hugging Face streaming dataset, which can shard and skip efficiently."""

    data: Any
    shards: int

    def __call__(self, shard: int, epoch: int, start: int) -> Iterator[Any]:
        part = self.data.shard(num_shards=self.shards, index=shard)
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
        return iter(part.skip(start) if start else part)


@dataclass(frozen=True, slots=True)
class EveryNth:
    """An iterable dataset, read as `shards` shards. Shard k has the samples k, k + shards, and so
    on. Every shard reads the whole iterable."""

    data: Iterable[Any]
    shards: int

    def __call__(self, shard: int, epoch: int, start: int) -> Iterator[Any]:
        set_epoch = getattr(self.data, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        return islice(iter(self.data), shard + start * self.shards, None, self.shards)


class StreamOfStreams:
    """A stream made of other streams. Only a run can read the stream, because the order of the
    samples follows from the run's seed."""

    __slots__ = ()

    def __call__(self, shard: int, epoch: int, start: int) -> Iterator[Any]:
        raise DataError(
            f"open({shard}, {epoch}, {start}) of a {type(self).__name__}; the order of its samples"
            " follows from a run's seed, so it has no order of its own; open the streams that it"
            " was made of"
        )


@dataclass(frozen=True, slots=True)
class Mixture(StreamOfStreams):
    """Streams mixed into one. Each sample of shard k comes from shard k of one of the streams. A
    stream that ends continues with its next epoch."""

    streams: Mapping[str, Stream]
    """Sorted by name."""
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PackedStream(StreamOfStreams):
    """The documents of a stream, packed into rows of `length` tokens."""

    stream: Stream
    length: int


@with_field_docs
@dataclass(frozen=True, slots=True)
class Stream:
    """Data without a length or without random access. The data is read in logical shards, whose
    number does not depend on the world size.

    The ranks that compute a shard's microbatches read the shard from beginning to end, then start
    its next epoch. Each sample is seen exactly once in each epoch of its shard. With M microbatches
    in a global batch, microbatch i of step s reads from shard i + M * (s mod (shards / M)). A
    resumed run continues at each shard's position, and reads at most `window` samples of a shard
    again.

    The default generators of Python, NumPy and torch are seeded by (seed, epoch, shard, sample)
    before each sample is requested. Raises `RecipeError`.
    """

    open: Callable[[int, int, int], Iterable[Any]]
    """Function of (shard, epoch, start) that returns an iterable of the shard's samples in that
    epoch, without the first `start` samples. The samples and their order must depend on shard and
    epoch only. A source that cannot seek reads and discards the first `start` samples. `start` is 0
    unless a run is resumed. In a resumed run, `start` is a multiple of `window`, or the shard's
    length."""
    shards: int = field(kw_only=True)
    """Number of logical shards, a multiple of the microbatches in a global batch. `open` is called
    with shards 0 to `shards` - 1."""
    window: int = field(kw_only=True, default=1)
    """Number of samples in a shard's shuffle buffer. A process holds one buffer for each shard that
    it reads. 1: no shuffle."""

    def __post_init__(self) -> None:
        check_callable("Stream.open", self.open, optional=False)
        check_count("Stream.shards", self.shards, "shards")
        check_count("Stream.window", self.window, "samples")

    @classmethod
    def files(
        cls,
        paths: Sequence[Any],
        read: Callable[[Any, int], Iterable[Any]],
        *,
        shards: int,
        counts: Sequence[int] | None = None,
        window: int = 1,
    ) -> Stream:
        """A stream of files. The files may have different numbers of samples: the lengths of the
        shards differ by at most one sample.

        `paths`: the files, in the same order in every process. `read`: function of (path, start)
        that returns an iterable of the file's samples without the first `start` samples. `counts`:
        number of samples in each file. None: each process reads all files once to count them.
        Raises `RecipeError` and `DataError`.
        """
        check_callable("Stream.files(read)", read, optional=False)
        lengths = (
            [sum(1 for _ in read(path, 0)) for path in paths] if counts is None else list(counts)
        )
        if len(lengths) != len(paths) or min(lengths, default=0) < 0 or sum(lengths) < shards:
            raise DataError(
                f"Stream.files with {len(paths)} files of {sum(lengths)} samples, {len(lengths)}"
                f" counts and shards={shards}; there must be one count for each file, and at least"
                " one sample in each shard; correct the counts, or give fewer shards"
            )
        return cls(Files(list(paths), read, lengths, shards), shards=shards, window=window)

    @classmethod
    def of(cls, data: Iterable[Any], *, shards: int = 1, window: int = 1) -> Stream:
        """A stream made from an iterable dataset: Hugging Face streaming, torch's
        `IterableDataset`, WebDataset.

        The dataset must not be split by rank or worker. All iterations over the dataset must give
        the same samples. With a dataset that has `set_epoch`, iterations after equal `set_epoch`
        calls must give the same samples. A Hugging Face dataset is read with its own `shard` and
        `skip`. For any other dataset, each shard reads all samples and keeps every `shards`-th, and
        a resumed run reads from the beginning again. Raises `DataError`.
        """
        if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            raise DataError(
                f"Stream.of({type(data).__name__}), which has a length and random access; give it"
                " as data itself"
            )
        if hasattr(data, "shard") and hasattr(data, "skip"):
            available = getattr(data, "num_shards", shards)
            if available % shards:
                raise DataError(
                    f"Stream.of(shards={shards}) of a dataset of {available} files or parts; each"
                    f" shard has equally many; give a divisor of {available}"
                )
            return cls(HuggingFaceStream(data, shards), shards=shards, window=window)
        if not isinstance(data, Iterable):
            raise DataError(
                f"Stream.of({type(data).__name__}), which cannot be iterated over; give an iterable"
                " dataset"
            )
        return cls(EveryNth(data, shards), shards=shards, window=window)

    @classmethod
    def mix(cls, streams: Mapping[str, Stream], *, weights: Mapping[str, float]) -> Stream:
        """Mix streams by name, such as `{"web": web, "code": code}`. Each stream provides samples
        in proportion to its weight.

        The stream of each sample depends only on seed, shard and position. In every 1,024 samples
        of a shard, each stream has its share, rounded up or down to a whole number. The order of a
        stream's samples does not depend on the other streams. If a stream's shard ends, the stream
        continues with its next epoch: the proportions stay the same. Raises `RecipeError` and
        `DataError`.
        """
        shares = checked_mixture(streams, weights)
        names = sorted(streams)
        mixture = Mixture(
            {name: streams[name] for name in names}, {name: shares[name] for name in names}
        )
        return cls(mixture, shards=streams[names[0]].shards)


def checked_mixture(streams: Any, weights: Any) -> dict[str, float]:
    if not isinstance(streams, Mapping) or not streams:
        raise RecipeError(
            f"Stream.mix({streams!r}); it mixes streams by name; give a dict of them, such as"
            " {'web': web, 'code': code}"
        )
    for name, stream in streams.items():
        if not isinstance(name, str):
            raise RecipeError(
                f"Stream.mix with a stream named {name!r}; a name is a str; name it {str(name)!r}"
            )
        if not isinstance(stream, Stream):
            raise DataError(
                f"Stream.mix, and {name!r} is a {type(stream).__name__}; it mixes streams; give"
                " ls.Stream.of(...) or ls.Stream.files(...), or mix datasets by"
                " ls.samplers.mixture"
            )
    if not isinstance(weights, Mapping) or weights.keys() != streams.keys():
        raise RecipeError(
            f"Stream.mix of the streams {sorted(streams)} with weights={weights!r}; each stream has"
            " one weight, under its name; give weights={"
            + ", ".join(f"{name!r}: ..." for name in sorted(streams))
            + "}"
        )
    checked = {name: _weight(weight) for name, weight in weights.items()}
    for name, number in checked.items():
        if not 0 < number < math.inf:
            raise RecipeError(
                f"Stream.mix with the weight {_short_text(weights[name])} of {name!r}; a weight is"
                " a number above 0, and only the proportions count; leave out a stream that is not"
                " to be read"
            )
    if math.isinf(sum(checked.values())):
        raise RecipeError(
            f"Stream.mix with the weights {checked}, whose sum is not a float; only the proportions"
            " count; divide each by the largest"
        )
    shards = {name: stream.shards for name, stream in streams.items()}
    if len(set(shards.values())) > 1:
        raise RecipeError(
            f"Stream.mix of streams with {shards} shards; shard k of the mixture reads shard k of"
            f" each stream, so all have equally many; give each shards={max(shards.values())}"
        )
    return checked


def _weight(value: Any) -> float:
    """Return `inf` for a number that is too large, and NaN for a value that is not a number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | Decimal):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _short_text(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python prints no more than 4,300 digits
        return f"a whole number of {value.bit_length()} bits"
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


def check_data(
    name: str,
    value: Any,
    *,
    global_batch: int,
    microbatch: int | Literal["auto"] | None,
    epochs: int | None,
) -> None:
    if not isinstance(value, Stream):
        check_dataset(name, value)
        return
    if epochs is not None:
        raise RecipeError(
            f"epochs={epochs} with an ls.Stream; a stream has no length, so epochs cannot be"
            " counted; give steps="
        )
    if microbatch is None or microbatch == "auto":
        raise RecipeError(
            f"microbatch={microbatch} with an ls.Stream; each microbatch reads from its own shards,"
            " so the number of microbatches must be fixed; give a microbatch, for example"
            f" microbatch={max(1, global_batch // 8)}"
        )
    count = -(-global_batch // microbatch)
    if value.shards % count:
        raise RecipeError(
            f"an ls.Stream of shards={value.shards} with {count} microbatches in a global batch"
            f" (global_batch={global_batch}, microbatch={microbatch}); each microbatch reads from"
            f" equally many shards, so shards must be a multiple of {count}; write"
            f" shards={-(-value.shards // count) * count}"
        )


def check_samplers(
    sampler: Any, batch_sampler: Any, data: Any, global_batch: Any, microbatch: Any
) -> None:
    check_callable("sampler", sampler, optional=True)
    check_callable("batch_sampler", batch_sampler, optional=True)
    if batch_sampler is None:
        if global_batch is None:
            raise RecipeError(
                "global_batch is None; it counts the samples in one optimizer step over all ranks;"
                " give one, or a batch_sampler"
            )
    elif (global_batch, microbatch, sampler) != (None, None, None):
        raise RecipeError(
            f"batch_sampler with global_batch={global_batch}, microbatch={microbatch} or a sampler;"
            " it makes the batches and the microbatches; leave these out"
        )
    if (sampler or batch_sampler) is not None and (data is None or isinstance(data, Stream)):
        raise RecipeError(
            "a sampler without a map-style dataset; a sampler returns the indices i of data[i];"
            " leave it out, and sample in Stream.open"
        )


def check_dataset(name: str, value: Any) -> None:
    if hasattr(value, "dataset") and hasattr(value, "batch_sampler"):
        raise DataError(
            f"{name} is a {type(value).__name__}; lockstep makes the batches, so that they do not"
            " depend on the processes; give data=loader.dataset, global_batch= and microbatch= for"
            " its batch size, collate=loader.collate_fn if it has its own, sampler= for its"
            " sampler, and workers=N in the plan for its num_workers"
        )
    if not hasattr(value, "__len__") or not (
        hasattr(value, "__getitem__") or hasattr(value, "__getitems__")
    ):
        raise DataError(
            f"{name} is a {type(value).__name__}; it must be a map-style dataset, with len(data)"
            " and data[i]; for data without a length or without random access, give an ls.Stream"
        )
    if len(value) == 0:
        raise DataError(
            f"{name} is empty (its len() is 0); training needs at least one sample; check the path"
            " or the filter that made it"
        )
