"""Checks the samples that each rank got from its data loaders. A pass is one iteration over a
DataLoader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise, permutations
from typing import Any

from lockstep.audit.finding import Area, AreaResult, Cause
from lockstep.audit.records import Records, training_passes
from lockstep.base.errors import first_few
from lockstep.evidence.rows import Row

LEAST_SAMPLES = 4
"""Passes are compared if they have at least this many samples in common."""
SAMPLERS = {
    "RandomSampler",
    "SequentialSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
    "DistributedSampler",
    "_InfiniteConstantSampler",
    "SeedableRandomSampler",
    "LengthGroupedSampler",
    "DistributedLengthGroupedSampler",
    "UnrepeatedDistributedSampler",
    "DistributedSamplerWrapper",
    "UnrepeatedDistributedSamplerWrapper",
}
"""Samplers of torch and of libraries with known behaviour."""
PARTS = {"SubsetRandomSampler", "list", "tuple", "range", "ndarray", "Tensor"}
"""Samplers that may select a part of the dataset, such as a fold."""
BATCH_SAMPLERS = {"BatchSampler", "BatchSamplerShard", "NoneType"}
MANY = 0.1
"""Fraction of a rank's samples that may equal samples of another rank by chance."""


@dataclass(slots=True)
class Pass:
    """The samples of one iteration over a DataLoader, on one rank."""

    begin: Row
    indices: list[int] | None = field(default_factory=list)
    contents: list[str] = field(default_factory=list)
    contents_at: list[tuple[int, str]] = field(default_factory=list)
    batches: int = 0
    is_complete: bool = False
    is_training: bool = False
    end: int = -1

    def add(self, batch: Row) -> None:
        self.batches, self.end = self.batches + 1, batch["place"]
        self.is_complete = self.is_complete or self.batches == self.begin["batches"]
        indices, samples = batch["indices"], batch["samples"]
        self.contents += samples
        if indices is not None and len(indices) == len(samples):
            self.contents_at += zip(indices, samples, strict=True)
        both = self.indices is not None and indices is not None
        self.indices = [*(self.indices or []), *indices] if both else None


@dataclass(slots=True)
class LoaderPasses:
    """All iterations over one DataLoader, on all ranks. Loaders that one line of the script makes
    again and again count as one loader."""

    numbers: list[int]
    dataset: list[dict[str, Any]]
    passes: list[list[Pass]]
    world_size: int

    @property
    def line(self) -> str:
        return str(self.passes[0][0].begin["line"])

    @property
    def is_training(self) -> bool:
        return any(each.is_training for ranks in self.passes for each in ranks)

    @property
    def sampler(self) -> Row:
        sampler: Row = self.passes[0][0].begin["sampler"]
        return sampler

    @property
    def has_own_sampler(self) -> bool:
        """True for a sampler of the script, which may leave out or repeat samples."""
        return (
            self.sampler["type"] not in SAMPLERS or self.sampler["batch_type"] not in BATCH_SAMPLERS
        )

    @property
    def draws_with_replacement(self) -> bool:
        is_weighted = self.sampler["type"] == "WeightedRandomSampler"
        return bool(self.sampler.get("replacement")) or is_weighted

    @property
    def splits(self) -> bool:
        return bool(self.sampler.get("num_replicas", 1) > 1)

    @property
    def pads_batches(self) -> bool:
        return bool(self.sampler["batch_type"] == "BatchSamplerShard")

    @property
    def digests(self) -> list[str]:
        return [each["digest"] for each in self.dataset]

    @property
    def length(self) -> int:
        return self.dataset[0]["length"] or 0

    @property
    def whole_length(self) -> int:
        return self.dataset[0].get("whole_length", self.length) or 0

    def is_followed_by(self, other: LoaderPasses) -> bool:
        """Return True if one line of the script makes both loaders for the same data, `other` after
        this one."""
        one, two = (
            (each.line, each.is_training, each.sampler["type"], each.digests)
            for each in (self, other)
        )
        is_later = other.passes[0][0].begin["place"] > self.passes[-1][0].end
        return one == two and all(self.digests) and is_later

    def samples(self, ranks: Sequence[Pass]) -> tuple[list[list[Any]], bool]:
        wholes = {each.get("whole", each["digest"]) for each in self.dataset}
        is_one = len(wholes) == 1 and all(wholes) and not self.dataset[0]["iterable"]
        if not is_one or any(each.indices is None for each in ranks):
            return [list(each.contents) for each in ranks], False
        found = zip(ranks, self.dataset, strict=True)
        return [_in_whole(each.indices or [], data.get("subset")) for each, data in found], True

    def contents_at(self) -> list[dict[int, list[str]]]:
        by_rank = []
        for passes in zip(*self.passes, strict=False):
            read: dict[int, list[str]] = {}
            for index, content in (each for one in passes for each in one.contents_at):
                read.setdefault(index, []).append(content)
            by_rank.append(read)
        return by_rank


def check_samples(records: Records) -> AreaResult:
    result = AreaResult(Area.SAMPLES)
    loaders = loader_passes(records)
    trained = [loader for loader in loaders if loader.is_training]
    _say_unseen(result, records, loaders)
    seen = passes = evaluated = 0
    for loader in loaders:
        differs = _check_datasets(result, loader)
        for ranks in loader.passes:
            if not loader.is_training:
                evaluated += _check_evaluation_pass(result, records, loader, ranks)
            # a script may look at a first batch, and then start again
            elif any(each.is_training for each in ranks) and not differs:
                judged = _check_training_pass(result, loader, ranks, bool(records.fetches))
                passes += judged
                seen += sum(len(each.contents) for each in ranks) if judged else 0
        if loader.is_training:
            _check_orders(result, loader)
    _check_leak(result, loaders)
    if trained and all(len(loader.passes) < 2 for loader in trained):
        result.miss(
            "one epoch at most was begun: its order cannot be compared with the next one's (more"
            " --steps)"
        )
    texts = []
    if seen:
        on_ranks = "none on two ranks, and " if records.world_size > 1 else ""
        texts = [
            f"{seen} samples, in passes over the data: {passes}; {on_ranks}none twice in a pass"
        ]
    if evaluated:
        texts.append(f"{evaluated} samples of evaluations, each counted once")
    result.right = "; ".join(texts)
    return result


def _say_unseen(result: AreaResult, records: Records, loaders: Sequence[LoaderPasses]) -> None:
    if not records.steps and not loaders:
        return
    trained = [training_passes(rank.rows) for rank in records.ranks]
    if not any(rank.of("batch") for rank in records.ranks):
        result.miss(
            "no DataLoader gave batches: samples that a script takes by itself are not seen"
        )
    elif not all(trained) and not any(loader.is_training for loader in loaders):
        result.miss(
            "the DataLoaders gave no batch to a backward: what the training takes by itself is not"
            " seen"
        )
    seen = {number for loader in loaders for number in loader.numbers}
    if lost := {number for passes in trained for number, _ in passes} - seen:
        result.miss(f"loaders that not all ranks read: {len(lost)}; their samples are not compared")


def loader_passes(records: Records) -> list[LoaderPasses]:
    """Return the passes over each loader that every rank reads, or that one rank reads for all."""
    by_rank = [_passes_of(rank.rows) for rank in records.ranks]
    loaders: list[LoaderPasses] = []
    for loader in by_rank[0] if by_rank else ():
        readers = [each[loader] for each in by_rank if loader in each]
        readers = [each for each in readers if any(one.batches or one.is_complete for one in each)]
        is_of_all = len(readers) == 1 and any(each.is_training for each in readers[0])
        if len(readers) < len(by_rank) and not is_of_all:
            continue
        passes = [list(ranks) for ranks in zip(*readers, strict=False)]
        passes = [ranks for ranks in passes if any(each.batches for each in ranks)]
        datasets = [each[0].begin["dataset"] for each in readers]
        if passes and all(datasets):
            made = LoaderPasses([loader], datasets, passes, records.world_size)
            before = next((each for each in reversed(loaders) if each.is_followed_by(made)), None)
            if before is None:
                loaders.append(made)
            else:
                before.passes += passes
                before.numbers.append(loader)
    return loaders


def _passes_of(rows: Sequence[Row]) -> dict[int, list[Pass]]:
    found: dict[int, list[Pass]] = {}
    by_key: dict[tuple[int, int], Pass] = {}
    for row in rows:
        if row["kind"] == "pass":
            by_key[row["loader"], row["number"]] = made = Pass(row)
            found.setdefault(row["loader"], []).append(made)
        elif row["kind"] in ("batch", "pass_end"):
            current = by_key.get((row["loader"], row["number"]))
            if current is not None and row["kind"] == "batch":
                current.add(row)
            elif current is not None:
                current.is_complete = True
    for key in training_passes(rows) & by_key.keys():
        by_key[key].is_training = True
    return found


def _in_whole(indices: Sequence[int], subset: Sequence[int] | None) -> list[int]:
    """Convert indices in a `torch.utils.data.Subset` to indices in the whole dataset."""
    if subset is None:
        return list(indices)
    return [subset[each] for each in indices if each < len(subset)]


def _check_datasets(result: AreaResult, loader: LoaderPasses) -> bool:
    first = loader.dataset[0]
    is_split = loader.splits or loader.pads_batches
    if len(loader.dataset) < 2 or not is_split or first["iterable"]:
        return False
    read = loader.contents_at()
    shared = [
        contents
        for index in set().union(*read)
        if len(contents := [set(each[index]) for each in read if index in each]) > 1
    ]
    if 2 * sum(bool(set.intersection(*each)) for each in shared) > len(shared):
        # a dataset's other contents may differ between ranks; a single index may agree by chance
        return False
    names = [
        name
        for name, digest in first["data"].items()
        if any(other["data"].get(name, digest) != digest for other in loader.dataset[1:])
    ]
    lengths = [each["length"] for each in loader.dataset]
    if names:
        text = f"{first_few(names)} of rank 0's {first['type']} differs from another rank's"
    elif len(set(lengths)) > 1:
        text = f"the ranks' have {', '.join(map(str, lengths))} samples"
    elif len(shared) >= LEAST_SAMPLES and any(_is_stable(each) for each in read):
        text = (
            f"{len(shared)} of its places were read on several ranks, and held other samples on"
            " each"
        )
    else:
        return False
    result.find(
        Cause.DATASETS_DIFFER,
        f"{loader.sampler['type']} splits one dataset over the ranks, and each rank has a dataset"
        f" of its own: {text}",
        line=loader.line,
    )
    return True


def _check_leak(result: AreaResult, loaders: Sequence[LoaderPasses]) -> None:
    """Find ranks that evaluate on training samples of other ranks, because each rank has split the
    dataset differently."""
    split = [each for each in loaders if len(set(each.digests)) > 1]
    known = [(each.is_training, seen) for each in split if (seen := _seen_by_rank(each))]
    for data, training in (seen for is_training, seen in known if is_training):
        for other, evaluation in (seen for is_training, seen in known if not is_training):
            ranks = list(enumerate(zip(training, evaluation, strict=True)))
            if data != other or any(one & two for _, (one, two) in ranks):
                continue
            for (first, one), (second, two) in permutations(ranks, 2):
                if leaked := one[0] & two[1]:
                    result.find(
                        Cause.DATASETS_DIFFER,
                        f"rank {first} trains on {len(leaked)} of the {len(two[1])} samples with"
                        f" which rank {second} evaluates: each rank has split the data by itself",
                        line=next(each.line for each in split if each.is_training),
                    )
                    return


def _seen_by_rank(loader: LoaderPasses) -> tuple[str, list[set[int]]] | None:
    found: list[set[int]] = [set() for _ in loader.dataset]
    for ranks in loader.passes:
        samples, are_indices = loader.samples(ranks)
        if not are_indices or len(samples) < loader.world_size:
            return None
        for known, one in zip(found, samples, strict=True):
            known.update(one)
    return loader.dataset[0].get("whole", loader.digests[0]), found


def _is_stable(read: dict[int, list[str]]) -> bool:
    again = [contents for contents in read.values() if len(contents) > 1]
    return len(again) >= LEAST_SAMPLES and all(len(set(each)) == 1 for each in again)


def _contents_vary(loader: LoaderPasses, draws: bool) -> bool:
    """Return True if a sample may have other contents when it is read again, as with
    augmentation."""
    read = loader.contents_at()
    again = [contents for each in read for contents in each.values() if len(contents) > 1]
    if len(again) >= LEAST_SAMPLES:
        return all(len(set(each)) == len(each) for each in again)
    contents = [set(each.contents) for ranks in loader.passes for each in ranks]
    return draws and not any(one & other for one, other in combinations(contents, 2))


def _repeated(samples: Sequence[Any]) -> int:
    return len(samples) - len(set(samples))


def _why_unjudged(
    loader: LoaderPasses,
    ranks: Sequence[Pass],
    samples: Sequence[Sequence[Any]],
    are_indices: bool,
    draws: bool,
) -> str:
    repeats = loader.has_own_sampler and any(map(_repeated, samples))
    if (repeats or loader.draws_with_replacement) and not _all_equal(samples):
        return (
            f"{loader.sampler['type']} repeats samples, perhaps on purpose: training samples"
            " are not compared"
        )
    if not are_indices and _contents_vary(loader, draws):
        return (
            "the training data have other contents at each read (augmentation), and the ranks'"
            " datasets are not known to be one: whether samples are on several ranks cannot be told"
        )
    # each worker of a loader may give the same sample of an iterable dataset
    most = max(2, *(int(each.begin["workers"]) for each in ranks))
    if not are_indices and any(max(Counter(one).values(), default=0) > most for one in samples):
        return "samples of the training data look alike: they cannot be told apart"
    return ""


def _check_training_pass(
    result: AreaResult, loader: LoaderPasses, ranks: Sequence[Pass], draws: bool
) -> bool:
    all_samples, are_indices = loader.samples(ranks)
    samples = all_samples
    if loader.has_own_sampler and are_indices:
        # only the first epoch: a sampler of the script may continue into the next epoch
        samples = [one[: max(1, loader.whole_length // len(samples))] for one in samples]
    if reason := _why_unjudged(loader, ranks, samples, are_indices, draws):
        result.miss(reason)
        return False
    is_stream = loader.dataset[0]["iterable"]
    if not are_indices and not is_stream:
        result.miss(
            "what the dataset holds cannot be read: samples are compared by their contents, and"
            " missing ones not seen"
        )
    where = f"pass {ranks[0].begin['number']} over the training data"
    for (first, one), (second, other) in combinations(enumerate(map(set, samples)), 2):
        both = one & other
        if len(both) > _allowed(len(one), are_indices, loader, ranks):
            result.find(
                Cause.SAME_SAMPLES,
                f"{where}: {len(both)} of the {len(one)} samples of rank {first} are also rank"
                f" {second}'s (sampler: {loader.sampler['type']})",
                line=loader.line,
            )
    for rank, given in enumerate(samples):
        twice = _repeated(given)
        is_allowed = twice <= _allowed(len(given), are_indices, loader, ranks)
        if not is_allowed and not loader.draws_with_replacement:
            workers = ranks[rank].begin["workers"]
            result.find(
                Cause.SAMPLES_REPEATED,
                f"{where}: rank {rank} was given {twice} of {len(given)} samples that it had"
                f" already{f' ({workers} loader workers)' if workers else ''}",
                line=loader.line,
            )
    if all(each.is_complete for each in ranks):
        if are_indices:
            _check_missing(result, loader, ranks, all_samples)
        elif is_stream:
            _check_stream(result, loader, ranks, samples)
    return True


def _allowed(count: int, are_indices: bool, loader: LoaderPasses, ranks: Sequence[Pass]) -> int:
    """Return the number of equal samples that are no fault, for example because of padding."""
    if not are_indices:
        return int(MANY * count)
    if loader.pads_batches:
        return max(len(each.contents) // max(1, each.batches) for each in ranks) * len(ranks)
    total = int(loader.sampler.get("total_size", loader.length))
    return max(0, total - loader.length) if loader.sampler.get("num_replicas") else 0


def _check_missing(
    result: AreaResult,
    loader: LoaderPasses,
    ranks: Sequence[Pass],
    samples: Sequence[Sequence[Any]],
) -> None:
    begin, sampler = ranks[0].begin, loader.sampler
    is_one = len(set(loader.digests)) == 1
    whole: Sequence[int] = range(loader.whole_length)
    if is_one:
        whole = _in_whole(range(loader.length), loader.dataset[0].get("subset"))
    missing = sorted(set(whole) - {each for one in samples for each in one})
    batch = begin["batch_size"] or max((len(one) for one in samples), default=1)
    drops = begin["drop_last"] or sampler.get("drop_last") or begin["batch_size"] is None
    drawn = sampler.get("num_samples", loader.length) * sampler.get("num_replicas", 1)
    is_part = sampler["type"] in PARTS or drawn < loader.length
    # missing samples that are scattered over the dataset are left out on purpose
    is_chosen = (loader.has_own_sampler or not is_one) and (
        missing and missing[-1] - missing[0] >= len(missing)
    )
    if len(missing) > (batch * len(ranks) - 1 if drops else 0) and not is_part and not is_chosen:
        result.find(
            Cause.SAMPLES_MISSING,
            f"pass {begin['number']} over the training data: {len(missing)} of {len(whole)} samples"
            " were given to no rank",
            line=loader.line,
        )


def _check_stream(
    result: AreaResult,
    loader: LoaderPasses,
    ranks: Sequence[Pass],
    samples: Sequence[Sequence[Any]],
) -> None:
    """Find iterable datasets that are split over the ranks twice: by a library and by the
    dataset."""
    held, seen = loader.dataset[0]["held"], len({each for one in samples for each in one})
    size = loader.world_size
    batch = max(
        (len(one) // max(1, each.batches) for one, each in zip(samples, ranks, strict=True)),
        default=1,
    )
    if held and abs(seen - held / size) <= batch and seen < held - batch * size:
        result.find(
            Cause.SAMPLES_MISSING,
            f"pass {ranks[0].begin['number']} over a stream: the dataset holds {held} samples, and"
            f" the ranks were given {seen} of them together, one in {size}: it is split over the"
            " ranks twice",
            line=loader.line,
        )


def _check_evaluation_pass(
    result: AreaResult, records: Records, loader: LoaderPasses, ranks: Sequence[Pass]
) -> int:
    """Return the number of samples if each counts exactly once; 0 otherwise."""
    samples, are_indices = loader.samples(ranks)
    if not all(each.is_complete for each in ranks):
        result.miss("a pass of an evaluation did not come to its end: its samples are not compared")
        return 0
    if not are_indices:
        result.miss(
            "the samples of an evaluation cannot be told apart: what its dataset holds is not the"
            " same on all ranks, or not read"
        )
        return 0
    if _all_equal(samples):  # every rank evaluates all samples: then too each counts once
        return len(samples[0])
    counted = [each for one in samples for each in one]
    twice, count = _repeated(counted), len(set(counted))
    if not twice:
        return count
    gathers = records.ranks[0].of("gather_for_metrics")
    if any(row["place"] > ranks[0].begin["place"] for row in gathers):
        result.miss(
            "an evaluation repeats samples, and gather_for_metrics drops some: whether each counts"
            " once is not seen"
        )
        return 0
    why = ", to give all ranks the same number" if loader.splits else ""
    result.find(
        Cause.EVALUATION_REPEATS,
        f"an evaluation over {count} samples counted {len(counted)}: {twice} of them twice{why}",
        line=loader.line,
    )
    return 0


def _check_orders(result: AreaResult, loader: LoaderPasses) -> None:
    passes = [ranks[0] for ranks in loader.passes if ranks[0].is_training]
    kind, is_random = loader.sampler["type"], "Random" in loader.sampler["type"]
    if not (loader.sampler.get("shuffle", kind == "RandomSampler") or is_random):
        return
    orders = [each.contents if each.indices is None else each.indices for each in passes]
    for number, (one, other) in enumerate(pairwise(orders)):
        count = min(len(one), len(other))
        if count >= LEAST_SAMPLES and one[:count] == other[:count]:
            begin = passes[number + 1].begin
            text = (
                f"the first {count} samples of rank 0 are the same in epochs {number} and"
                f" {number + 1}, in the same order"
            )
            if "epoch" in loader.sampler:
                text += f"; the sampler's epoch was {begin['sampler']['epoch']} in both"
            result.find(Cause.SAME_ORDER, text, line=begin["loop"] or loader.line)


def _all_equal(samples: Sequence[Sequence[Any]]) -> bool:
    return all(sorted(map(str, one)) == sorted(map(str, samples[0])) for one in samples)
