"""Which samples each rank was given, in each pass over the data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise, permutations
from typing import Any

from lockstep.audit.checks.area_result import AreaResult
from lockstep.audit.finding import Area
from lockstep.audit.records import Records, training_passes
from lockstep.audit.remedies import Cause
from lockstep.base.errors import first_few
from lockstep.evidence.rows import Row

LEAST_SAMPLES = 4
"""Samples of a pass from which its order can be told from another one."""
SAMPLERS = {
    *(
        "RandomSampler",
        "SequentialSampler",
        "SubsetRandomSampler",
        "WeightedRandomSampler",
        "DistributedSampler",
    ),
    *(
        "_InfiniteConstantSampler",
        "SeedableRandomSampler",
        "LengthGroupedSampler",
        "DistributedLengthGroupedSampler",
    ),
    *(
        "UnrepeatedDistributedSampler",
        "DistributedSamplerWrapper",
        "UnrepeatedDistributedSamplerWrapper",
    ),
}
"""Types of samplers that give each sample once in a pass, or say that they do not: torch's and
libraries'."""
PARTS = {"SubsetRandomSampler", "list", "tuple", "range", "ndarray", "Tensor"}
"""Types of samplers that are given the samples of a part, such as a fold."""
BATCH_SAMPLERS = {"BatchSampler", "BatchSamplerShard", "NoneType"}
MANY = 0.1
"""Share of equal contents that is no accident of the data: different samples may look alike."""


@dataclass(slots=True)
class Pass:
    """One rank's pass over the data of a loader."""

    begin: Row
    indices: list[int] | None = field(default_factory=list)
    contents: list[str] = field(default_factory=list)
    contents_at: list[tuple[int, str]] = field(default_factory=list)
    """Places and contents of the batches of which both are known."""
    batches: int = 0
    is_complete: bool = False
    is_training: bool = False
    end: int = -1
    """The place of its last batch in the record."""


@dataclass(slots=True)
class LoaderPasses:
    """The passes of one loader, by their number and rank; also if it is made anew for each of
    them."""

    numbers: list[int]
    dataset: list[dict[str, Any]]
    """The dataset on each rank that reads it."""
    passes: list[list[Pass]]
    world_size: int

    @property
    def line(self) -> str:
        return str(self.passes[0][0].begin["line"])

    @property
    def is_training(self) -> bool:
        return any(each.is_training for ranks in self.passes for each in ranks)

    @property
    def has_own_sampler(self) -> bool:
        """True if the sampler is not torch's or a library's: it may leave out, repeat, and go on
        without an end."""
        return (
            self.sampler["type"] not in SAMPLERS or self.sampler["batch_type"] not in BATCH_SAMPLERS
        )

    @property
    def sampler(self) -> Row:
        sampler: Row = self.passes[0][0].begin["sampler"]
        return sampler

    def is_followed_by(self, other: LoaderPasses) -> bool:
        """True if the other loader is this one, made anew: by the same line, for the same data,
        after its end."""
        same = [
            (
                each.line,
                each.is_training,
                each.sampler["type"],
                [data["digest"] for data in each.dataset],
            )
            for each in (self, other)
        ]
        is_later = other.passes[0][0].begin["place"] > self.passes[-1][0].end
        return same[0] == same[1] and all(same[0][3]) and is_later

    def samples(self, ranks: Sequence[Pass]) -> tuple[list[list[Any]], bool]:
        """The samples of each rank, and whether they are places in one dataset, which tell them
        apart for sure."""
        wholes = {each.get("whole", each["digest"]) for each in self.dataset}
        if (
            len(wholes) == 1
            and all(wholes)
            and not self.dataset[0]["iterable"]
            and all(each.indices is not None for each in ranks)
        ):
            return [
                _places(each.indices or [], data.get("subset"))
                for each, data in zip(ranks, self.dataset, strict=True)
            ], True
        return [list(each.contents) for each in ranks], False


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
            # a script may look at a first batch, and begin again
            elif any(each.is_training for each in ranks) and not differs:
                passes += (judged := _check_training_pass(result, loader, ranks, records.fetches))
                seen += sum(len(each.contents) for each in ranks) if judged else 0
        if loader.is_training:
            _check_orders(result, loader)
    _check_leak(result, loaders)
    if trained and all(len(loader.passes) < 2 for loader in trained):
        result.miss(
            "one epoch at most was begun: its order cannot be compared with the next one's (more"
            " --steps)"
        )
    on_ranks = "none on two ranks, and " if records.world_size > 1 else ""
    texts = (
        [f"{seen} samples, in passes over the data: {passes}; {on_ranks}none twice in a pass"]
        if seen
        else []
    )
    texts += [f"{evaluated} samples of evaluations, each counted once"] if evaluated else []
    result.right = "; ".join(texts)
    return result


def _say_unseen(result: AreaResult, records: Records, loaders: Sequence[LoaderPasses]) -> None:
    if not records.steps and not loaders:
        return
    if not any(rank.of("batch") for rank in records.ranks):
        result.miss(
            "no DataLoader gave batches: samples that a script takes by itself are not seen"
        )
    elif not all(training_passes(rank.rows) for rank in records.ranks) and not any(
        loader.is_training for loader in loaders
    ):
        result.miss(
            "the DataLoaders gave no batch to a backward: what the training takes by itself is not"
            " seen"
        )
    seen = {number for loader in loaders for number in loader.numbers}
    lost = {number for rank in records.ranks for number, _ in training_passes(rank.rows)} - seen
    if lost:
        result.miss(f"loaders that not all ranks read: {len(lost)}; their samples are not compared")


def loader_passes(records: Records) -> list[LoaderPasses]:
    """The passes of each loader that all ranks have, or that one rank reads for the training of all
    (Accelerate does so with streams)."""
    by_rank = [_passes_of(rank.rows) for rank in records.ranks]
    found: list[LoaderPasses] = []
    for loader in by_rank[0] if by_rank else ():
        readers = [
            each[loader]
            for each in by_rank
            if any(one.batches or one.is_complete for one in each.get(loader, ()))
        ]
        if len(readers) < len(by_rank) and (
            len(readers) > 1 or not any(each.is_training for each in readers[0])
        ):
            continue
        passes = [list(ranks) for ranks in zip(*readers, strict=False)]
        passes = [ranks for ranks in passes if any(each.batches for each in ranks)]
        datasets = [each[0].begin["dataset"] for each in readers]
        if passes and all(datasets):
            made = LoaderPasses([loader], datasets, passes, records.world_size)
            before = next((each for each in reversed(found) if each.is_followed_by(made)), None)
            if before is None:
                found.append(made)
            else:
                before.passes += passes
                before.numbers.append(loader)
    return found


def _passes_of(rows: Sequence[Row]) -> dict[int, list[Pass]]:
    found: dict[int, list[Pass]] = {}
    by_key: dict[tuple[int, int], Pass] = {}
    for row in rows:
        if row["kind"] == "pass":
            by_key[row["loader"], row["number"]] = made = Pass(row)
            found.setdefault(row["loader"], []).append(made)
        elif (
            row["kind"] == "batch"
            and (current := by_key.get((row["loader"], row["number"]))) is not None
        ):
            current.batches, current.end = current.batches + 1, row["place"]
            current.is_complete = current.is_complete or current.batches == current.begin["batches"]
            current.contents += row["samples"]
            if row["indices"] is not None and len(row["indices"]) == len(row["samples"]):
                current.contents_at += zip(row["indices"], row["samples"], strict=True)
            current.indices = (
                current.indices + row["indices"]
                if current.indices is not None and row["indices"] is not None
                else None
            )
        elif row["kind"] == "pass_end" and (row["loader"], row["number"]) in by_key:
            by_key[row["loader"], row["number"]].is_complete = True
    for place in training_passes(rows):
        if (current := by_key.get(place)) is not None:
            current.is_training = True
    return found


def _first_epoch(loader: LoaderPasses, samples: Sequence[list[Any]]) -> list[list[Any]]:
    """Each rank's samples of the first epoch: a sampler of the script's own may go on into the next
    one."""
    length = loader.dataset[0].get("whole_length", loader.dataset[0]["length"]) or 0
    return [one[: max(1, length // len(samples))] for one in samples]


def _look_alike(ranks: Sequence[Pass], samples: Sequence[Sequence[Any]]) -> bool:
    """True if a rank was given one content more often than loader workers explain."""
    most = max(2, *(int(each.begin["workers"]) for each in ranks))
    return any(max(Counter(one).values(), default=0) > most for one in samples)


def _places(indices: Sequence[int], subset: Sequence[int] | None) -> list[int]:
    return (
        list(indices)
        if subset is None
        else [subset[each] for each in indices if each < len(subset)]
    )


def _check_datasets(result: AreaResult, loader: LoaderPasses) -> bool:
    """Find ranks whose datasets differ, although a sampler splits one over them. True if they
    do."""
    first = loader.dataset[0]
    splits = (
        loader.sampler.get("num_replicas", 1) > 1
        or loader.sampler["batch_type"] == "BatchSamplerShard"
    )
    if len(loader.dataset) < 2 or not splits or first["iterable"]:
        return False
    read = [_contents_at(ranks) for ranks in zip(*loader.passes, strict=False)]
    shared = [
        contents
        for place in set().union(*read)
        if len(contents := [each[place] for each in read if place in each]) > 1
    ]
    if 2 * sum(bool(set.intersection(*map(set, each))) for each in shared) > len(shared):
        # what a dataset holds beside its samples may be the rank's own; one place agrees by chance
        return False
    names = [
        name
        for name, digest in first["data"].items()
        if any(other["data"].get(name, digest) != digest for other in loader.dataset[1:])
    ]
    lengths = [each["length"] for each in loader.dataset]
    if names:
        text = f"{first_few(names)} of rank 0's {first['type']} is not that of another rank's"
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
    """Find evaluations of samples on which another rank trains: each rank has split the data
    itself."""
    split = [each for each in loaders if len({data["digest"] for data in each.dataset}) > 1]
    trained, evaluated = (
        [_places_by_rank(each) for each in split if each.is_training is kind]
        for kind in (True, False)
    )
    for data, training in filter(None, trained):
        for other, evaluation in filter(None, evaluated):
            if data != other or any(
                one & two for one, two in zip(training, evaluation, strict=True)
            ):
                continue
            for (first, one), (second, two) in permutations(
                enumerate(zip(training, evaluation, strict=True)), 2
            ):
                if leaked := one[0] & two[1]:
                    result.find(
                        Cause.DATASETS_DIFFER,
                        f"rank {first} trains on {len(leaked)} of the {len(two[1])} samples with"
                        f" which rank {second} evaluates: each rank has split the data by itself",
                        line=next(each.line for each in split if each.is_training),
                    )
                    return


def _places_by_rank(loader: LoaderPasses) -> tuple[str, list[set[int]]] | None:
    """The whole dataset, and the places in it that each rank was given; None if those are not
    known."""
    found: list[set[int]] = [set() for _ in loader.dataset]
    for ranks in loader.passes:
        samples, are_places = loader.samples(ranks)
        if not are_places or len(samples) < loader.world_size:
            return None
        for known, one in zip(found, samples, strict=True):
            known.update(one)
    return loader.dataset[0].get("whole", loader.dataset[0]["digest"]), found


def _contents_at(passes: Sequence[Pass]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for place, content in (each for one in passes for each in one.contents_at):
        found.setdefault(place, []).append(content)
    return found


def _is_stable(read: dict[int, list[str]]) -> bool:
    """True if a rank read several places more than once, and the same there each time."""
    again = [contents for contents in read.values() if len(contents) > 1]
    return len(again) >= LEAST_SAMPLES and all(len(set(each)) == 1 for each in again)


def _contents_vary(loader: LoaderPasses, fetches: Sequence[Row]) -> bool:
    """True if a sample may have other contents when it is read again, as with augmentation.

    Then contents do not tell samples apart. One content that has come again shows that they do.
    """
    read = [_contents_at(ranks) for ranks in zip(*loader.passes, strict=False)]
    again = [contents for each in read for contents in each.values() if len(contents) > 1]
    if len(again) >= LEAST_SAMPLES:
        return all(len(set(each)) == len(each) for each in again)
    contents = [set(each.contents) for ranks in loader.passes for each in ranks]
    return bool(fetches) and not any(one & other for one, other in combinations(contents, 2))


def _check_training_pass(
    result: AreaResult, loader: LoaderPasses, ranks: Sequence[Pass], fetches: Sequence[Row]
) -> bool:
    """Find samples that come twice, or not at all. False if they cannot be judged, which is
    said."""
    samples, are_places = loader.samples(ranks)
    if loader.has_own_sampler and are_places:
        samples = _first_epoch(loader, samples)
    repeats = loader.has_own_sampler and any(len(set(one)) < len(one) for one in samples)
    if (repeats or _draws_with_replacement(loader)) and not _all_equal(samples):
        result.miss(
            f"{loader.sampler['type']} repeats samples, on purpose perhaps: those of the training"
            " are not compared"
        )
        return False
    if not are_places and _contents_vary(loader, fetches):
        result.miss(
            "the training data have other contents at each read (augmentation), and the ranks'"
            " datasets are not known to be one: whether samples are on several ranks cannot be told"
        )
        return False
    if not are_places and _look_alike(ranks, samples):
        result.miss("samples of the training data look alike: they cannot be told apart")
        return False
    if not are_places and not loader.dataset[0]["iterable"]:
        result.miss(
            "what the dataset holds cannot be read: samples are compared by their contents, and"
            " missing ones not seen"
        )
    number = ranks[0].begin["number"]
    for (first, one), (second, other) in combinations(enumerate(samples), 2):
        both = set(one) & set(other)
        if len(both) > _allowed(len(set(one)), are_places, loader, ranks):
            result.find(
                Cause.SAME_SAMPLES,
                f"pass {number} over the training data: {len(both)} of the {len(set(one))} samples"
                f" of rank {first} are also rank {second}'s (sampler: {loader.sampler['type']})",
                line=loader.line,
            )
    for rank, one in enumerate(samples):
        twice = sum(count - 1 for count in Counter(one).values())
        if twice > _allowed(len(one), are_places, loader, ranks) and not _draws_with_replacement(
            loader
        ):
            workers = ranks[rank].begin["workers"]
            result.find(
                Cause.SAMPLES_REPEATED,
                f"pass {number} over the training data: rank {rank} was given {twice} of {len(one)}"
                " samples that it had already"
                + (f" ({workers} loader workers)" if workers else ""),
                line=loader.line,
            )
    if are_places and all(each.is_complete for each in ranks):
        _check_missing(result, loader, ranks, loader.samples(ranks)[0])
    elif loader.dataset[0]["iterable"] and all(each.is_complete for each in ranks):
        _check_stream(result, loader, ranks, samples)
    return True


def _allowed(count: int, are_places: bool, loader: LoaderPasses, ranks: Sequence[Pass]) -> int:
    """The number of equal samples that is no fault: padding to a multiple of the ranks, or data
    that look alike."""
    if not are_places:
        return int(MANY * count)
    length = loader.dataset[0]["length"] or 0
    total = loader.sampler.get("total_size", length)
    # Accelerate's, which pads with whole batches
    if loader.sampler["batch_type"] == "BatchSamplerShard":
        return max(len(each.contents) // max(1, each.batches) for each in ranks) * len(ranks)
    return max(0, int(total) - int(length)) if loader.sampler.get("num_replicas") else 0


def _check_missing(
    result: AreaResult,
    loader: LoaderPasses,
    ranks: Sequence[Pass],
    samples: Sequence[Sequence[Any]],
) -> None:
    whole: Sequence[int] = range(
        loader.dataset[0].get("whole_length", loader.dataset[0]["length"]) or 0
    )
    seen = {each for one in samples for each in one}
    if len({each["digest"] for each in loader.dataset}) == 1:
        whole = _places(range(loader.dataset[0]["length"] or 0), loader.dataset[0].get("subset"))
    batch = ranks[0].begin["batch_size"] or max((len(one) for one in samples), default=1)
    sampler, own = loader.sampler, loader.dataset[0]["length"] or 0
    is_drawn = sampler.get("num_samples", own) * sampler.get("num_replicas", 1) < own
    is_part = sampler["type"] in PARTS or is_drawn
    drops = (
        ranks[0].begin["drop_last"]
        or sampler.get("drop_last")
        or ranks[0].begin["batch_size"] is None
    )
    allowed = batch * len(ranks) - 1 if drops else 0
    missing = sorted(set(whole) - seen)
    may_choose = loader.has_own_sampler or len({each["digest"] for each in loader.dataset}) > 1
    is_chosen = may_choose and missing and missing[-1] - missing[0] >= len(missing)
    # scattered ones are left out on purpose
    if whole and len(missing) > allowed and not is_part and not is_chosen:
        result.find(
            Cause.SAMPLES_MISSING,
            f"pass {ranks[0].begin['number']} over the training data: {len(missing)} of"
            f" {len(whole)} samples were given to no rank",
            line=loader.line,
        )


def _check_stream(
    result: AreaResult,
    loader: LoaderPasses,
    ranks: Sequence[Pass],
    samples: Sequence[Sequence[Any]],
) -> None:
    """Find streams that are split over the ranks twice: a library does so, and the dataset itself
    too."""
    held, seen = loader.dataset[0]["held"], len({each for one in samples for each in one})
    batch = max(
        (len(one) // max(1, each.batches) for one, each in zip(samples, ranks, strict=True)),
        default=1,
    )
    if (
        held
        and abs(seen - held / loader.world_size) <= batch
        and seen < held - batch * loader.world_size
    ):
        result.find(
            Cause.SAMPLES_MISSING,
            f"pass {ranks[0].begin['number']} over a stream: the dataset holds {held} samples, and"
            f" the ranks were given {seen} of them together, one in {loader.world_size}: it is"
            " split over the ranks twice",
            line=loader.line,
        )


def _check_evaluation_pass(
    result: AreaResult, records: Records, loader: LoaderPasses, ranks: Sequence[Pass]
) -> int:
    """Find samples that count twice. Returns the number of samples that were seen to count once
    each."""
    samples, are_places = loader.samples(ranks)
    if not all(each.is_complete for each in ranks):
        result.miss("a pass of an evaluation did not come to its end: its samples are not compared")
        return 0
    if not are_places:
        result.miss(
            "the samples of an evaluation cannot be told apart: what its dataset holds is not the"
            " same on all ranks, or not read"
        )
        return 0
    if _all_equal(samples):  # every rank evaluates all: that counts each once too
        return len(samples[0])
    counts = Counter(each for one in samples for each in one)
    twice = sum(count - 1 for count in counts.values())
    if twice and any(
        row["place"] > ranks[0].begin["place"] for row in records.ranks[0].of("gather_for_metrics")
    ):
        result.miss(
            "an evaluation repeats samples, and gather_for_metrics drops some: whether each counts"
            " once is not seen"
        )
        return 0
    if twice:
        total = sum(counts.values())
        why = (
            ", to give all ranks the same number"
            if loader.sampler.get("num_replicas", 1) > 1
            else ""
        )
        result.find(
            Cause.EVALUATION_REPEATS,
            f"an evaluation over {len(counts)} samples counted {total}: {twice} of them twice{why}",
            line=loader.line,
        )
        return 0
    return len(counts)


def _check_orders(result: AreaResult, loader: LoaderPasses) -> None:
    passes = [ranks[0] for ranks in loader.passes if ranks[0].is_training]
    orders = [each.indices if each.indices is not None else each.contents for each in passes]
    sampler = loader.sampler
    shuffles = (
        sampler.get("shuffle", sampler["type"] == "RandomSampler") or "Random" in sampler["type"]
    )
    for number, (one, other) in enumerate(pairwise(orders)):
        count = min(len(one), len(other))
        if shuffles and count >= LEAST_SAMPLES and list(one[:count]) == list(other[:count]):
            begin = passes[number + 1].begin
            result.find(
                Cause.SAME_ORDER,
                f"the first {count} samples of rank 0 are the same in epochs {number} and"
                f" {number + 1}, in the same order"
                + (
                    f"; the sampler's epoch was {begin['sampler']['epoch']} in both"
                    if "epoch" in sampler
                    else ""
                ),
                line=begin["loop"] or loader.line,
            )


def _draws_with_replacement(loader: LoaderPasses) -> bool:
    return (
        bool(loader.sampler.get("replacement")) or loader.sampler["type"] == "WeightedRandomSampler"
    )


def _all_equal(samples: Sequence[Sequence[Any]]) -> bool:
    return all(sorted(map(str, one)) == sorted(map(str, samples[0])) for one in samples)
